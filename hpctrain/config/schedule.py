"""``conf/schedule``: the learning rate's factor at each step. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.config import require
from hpctrain.errors import ConfigError

KINDS = ("constant", "linear", "cosine", "step", "one_cycle", "wsd")


@dataclass(kw_only=True, slots=True)
class Schedule:
    """A function of the step, without state. Lengths are in steps or in epochs."""

    kind: str = "constant"
    """`constant`, `linear`, `cosine`, `step`, `one_cycle` or `wsd` (warmup-stable-decay), after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the factor rises to 1: linearly, and along a half cosine for one_cycle."""
    warmup_epochs: float | None = None
    """The warm-up in epochs, instead of steps. Without either, one_cycle rises over three tenths of the run."""
    final_factor: float = 0.0
    """Factor at the run's last step, for linear, cosine, one_cycle and wsd."""
    start_factor: float = 0.04
    """Factor at the first step, for one_cycle."""
    drop_at_steps: list[int] = field(default_factory=list)
    """Steps at which the factor is multiplied by drop_factor, for step."""
    drop_at_epochs: list[float] = field(default_factory=list)
    """The same in epochs, instead of steps."""
    drop_factor: float = 0.1
    """Factor of each drop, for step."""
    decay_steps: int | None = None
    """Steps of the linear decay at the end, for wsd; null: decay_epochs, or a tenth of the run."""
    decay_epochs: float | None = None
    """The decay in epochs, instead of steps."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.one_of("schedule.kind", self.kind, KINDS)
        require.at_least("schedule.warmup_steps", self.warmup_steps, 0)
        require.at_least("schedule.warmup_epochs", self.warmup_epochs, 0)
        require.at_least("schedule.decay_steps", self.decay_steps, 1)
        require.above("schedule.decay_epochs", self.decay_epochs, 0)
        for key in ("final_factor", "start_factor", "drop_factor"):
            require.between(f"schedule.{key}", getattr(self, key), 0, 1)
        for steps in self.drop_at_steps:
            require.at_least("schedule.drop_at_steps", steps, 1)
        for epochs in self.drop_at_epochs:
            require.above("schedule.drop_at_epochs", epochs, 0)
        self._refuse_both("warmup_epochs", "warmup_steps")
        self._refuse_both("drop_at_epochs", "drop_at_steps")
        self._refuse_both("decay_epochs", "decay_steps")
        if self.kind == "step" and not (self.drop_at_steps or self.drop_at_epochs):
            raise ConfigError(
                "schedule.drop_at_epochs",
                "[]",
                "schedule.kind=step needs at least one drop",
                "set it, such as [30,60,80]",
            )

    def _refuse_both(self, epochs: str, steps: str) -> None:
        if getattr(self, epochs) and getattr(self, steps):
            raise ConfigError(
                f"schedule.{epochs}",
                getattr(self, epochs),
                f"conflicts with schedule.{steps}={getattr(self, steps)}",
                "set one of them",
            )
