"""``conf/health``: when a run without progress counts as hanging. Owner: hpctrain.attempt."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from hpctrain.config import require

LONGEST_S = 1e7
"""Four months; the largest bound, for runs that want none."""
USUAL_S = 1800.0
"""The default bound of a phase, unless hang_timeout_s is longer."""


@dataclass(kw_only=True, slots=True)
class Health(require.Checked):
    """Bounds on the time without progress, per rank; beyond them the attempt ends as `hang`, with stacks in logs/.

    Each key is a bound in seconds; `collective_timeout_s` relies on it.
    """

    hang_timeout_s: Annotated[float, require.between(1, LONGEST_S)] = 1800.0
    """Seconds without a completed step, after the attempt's first step."""
    start_timeout_s: Annotated[float | None, require.between(1, LONGEST_S)] = None
    """Seconds for start-up and the first step: preparing the data, rendezvous, loading a checkpoint, compiling.
    null: 1800, or `hang_timeout_s` if that is longer."""
    eval_timeout_s: Annotated[float | None, require.between(1, LONGEST_S)] = None
    """Seconds without an evaluated batch during an evaluation. null: 1800, or `hang_timeout_s` if that is longer."""
    save_timeout_s: Annotated[float | None, require.between(1, LONGEST_S)] = None
    """Seconds for one save, and for a program of a run without a job to end after `cancel`. null: 1800, or
    `hang_timeout_s` if that is longer."""

    def bound_s(self, key: str) -> float:
        """The value of a key of this group in seconds, or its default if it is null."""
        bound: float | None = getattr(self, key)
        return max(USUAL_S, self.hang_timeout_s) if bound is None else bound

    @property
    def meeting_timeout_s(self) -> float:
        """Bound on the rendezvous, in seconds."""
        # shorter than the bound on start-up: the rendezvous can name the ranks that are missing
        return self.bound_s("start_timeout_s") * 0.9

    @property
    def collective_timeout_s(self) -> float:
        """Bound on one collective, in seconds."""
        # longer than all others: the watchdog reports a hang with stacks, the process group only with an error
        return max(self.bound_s(field.name) for field in fields(self)) * 1.25 + 5
