"""``conf/schedule``: the learning rate's factor at each step. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hpctrain.config import require
from hpctrain.errors import ConfigError

KINDS = ("constant", "linear", "cosine", "step", "one_cycle", "wsd")


@dataclass(kw_only=True, slots=True)
class Schedule(require.Checked):
    """A function of the step, without state. Lengths are in steps or in epochs."""

    kind: Annotated[str, require.one_of(*KINDS)] = "constant"
    """`constant`, `linear`, `cosine`, `step`, `one_cycle` or `wsd` (warmup-stable-decay), after the warm-up."""
    warmup_steps: Annotated[int, require.at_least(0)] = 0
    """Steps over which the factor rises to 1: linearly, and along a half cosine for one_cycle."""
    warmup_epochs: Annotated[float | None, require.at_least(0)] = None
    """The warm-up in epochs, instead of steps. Without either, one_cycle rises over three tenths of the run."""
    final_factor: Annotated[float, require.between(0, 1)] = 0.0
    """Factor at the run's last step, for linear, cosine, one_cycle and wsd."""
    start_factor: Annotated[float, require.between(0, 1)] = 0.04
    """Factor at the first step, for one_cycle."""
    drop_at_steps: Annotated[list[int], require.each(require.at_least(1))] = field(default_factory=list)
    """Steps at which the factor is multiplied by drop_factor, for step."""
    drop_at_epochs: Annotated[list[float], require.each(require.above(0))] = field(default_factory=list)
    """The same in epochs, instead of steps."""
    drop_factor: Annotated[float, require.between(0, 1)] = 0.1
    """Factor of each drop, for step."""
    decay_steps: Annotated[int | None, require.at_least(1)] = None
    """Steps of the linear decay at the end, for wsd; null: decay_epochs, or a tenth of the run."""
    decay_epochs: Annotated[float | None, require.above(0)] = None
    """The decay in epochs, instead of steps."""

    def __post_init__(self) -> None:
        """Also refuse lengths that are given twice, and `step` without drops."""
        require.Checked.__post_init__(self)
        self._refuse_both("warmup_epochs", "warmup_steps")
        self._refuse_both("drop_at_epochs", "drop_at_steps")
        self._refuse_both("decay_epochs", "decay_steps")
        if self.kind == "step" and not (self.drop_at_steps or self.drop_at_epochs):
            problem = "schedule.kind=step needs at least one drop"
            raise ConfigError("schedule.drop_at_epochs", "[]", problem, "set it, such as [30,60,80]")

    def _refuse_both(self, epochs: str, steps: str) -> None:
        if getattr(self, epochs) and getattr(self, steps):
            problem = f"conflicts with schedule.{steps}={getattr(self, steps)}"
            raise ConfigError(f"schedule.{epochs}", getattr(self, epochs), problem, "set one of them")
