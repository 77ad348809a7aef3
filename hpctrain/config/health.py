"""``conf/health``: when a silent run counts as hanging. Owner: hpctrain.worker."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require

LONGEST_S = 1e7
"""Four months: whoever wants no bound sets this one."""
USUAL_S = 1800.0
"""What phases get that have no bound of their own, if hang_timeout_s isn't longer."""


@dataclass(kw_only=True, slots=True)
class Health:
    """Bounds on silence, per rank; beyond them the attempt ends as `hang`, with every rank's stacks in logs/."""

    hang_timeout_s: float = 1800.0
    """Seconds without a completed step after which a rank hangs, from the attempt's first completed step on."""
    start_timeout_s: float | None = None
    """Seconds for start-up and the first step together: preparing the data, meeting the other ranks, loading a
    checkpoint, compiling. null: 1800, or `hang_timeout_s` where that is longer."""
    eval_timeout_s: float | None = None
    """Seconds without an evaluated batch during an evaluation. null: 1800, or `hang_timeout_s` where that is longer."""
    save_timeout_s: float | None = None
    """Seconds for one save. null: 1800, or `hang_timeout_s` where that is longer."""

    def __post_init__(self) -> None:
        """Check single values."""
        for name in ("hang_timeout_s", "start_timeout_s", "eval_timeout_s", "save_timeout_s"):
            value = getattr(self, name)
            if value is not None:
                require.between(f"health.{name}", value, 1, LONGEST_S)

    @property
    def start_bound_s(self) -> float:
        """`start_timeout_s`, or what stands for it."""
        return self._or_usual(self.start_timeout_s)

    @property
    def eval_bound_s(self) -> float:
        """`eval_timeout_s`, or what stands for it."""
        return self._or_usual(self.eval_timeout_s)

    @property
    def save_bound_s(self) -> float:
        """`save_timeout_s`, or what stands for it."""
        return self._or_usual(self.save_timeout_s)

    @property
    def meeting_timeout_s(self) -> float:
        """Bound on the ranks' meeting in seconds: shorter than start-up's, since who waits in vain knows for whom."""
        return self.start_bound_s * 0.9

    @property
    def collective_timeout_s(self) -> float:
        """Bound on one collective in seconds: longer than all others, so that whoever watches speaks first."""
        bounds = (self.hang_timeout_s, self.start_bound_s, self.eval_bound_s, self.save_bound_s)
        return max(bounds) * 1.25 + 5

    def _or_usual(self, given: float | None) -> float:
        return max(USUAL_S, self.hang_timeout_s) if given is None else given
