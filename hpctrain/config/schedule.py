"""``conf/schedule``: the learning rate's factor at each step. Owner: hpctrain.train."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from omegaconf import MISSING

from hpctrain.config import require
from hpctrain.errors import ConfigError

KINDS = ("constant", "linear", "cosine", "step", "one_cycle", "wsd")


@dataclass(kw_only=True, slots=True)
class WarmUp(require.Checked):
    """The rise at the start of a run."""

    warmup_steps: Annotated[int, require.at_least(0)] = 0
    """Steps over which the factor rises to 1: linearly, and along a half cosine for one_cycle."""
    warmup_epochs: Annotated[float | None, require.at_least(0)] = None
    """The warm-up in epochs, instead of steps. Without either, one_cycle rises over three tenths of the run."""

    def __post_init__(self) -> None:
        """Also refuse a length that is given twice."""
        require.Checked.__post_init__(self)
        self._refuse_both("warmup_epochs", "warmup_steps")

    def _refuse_both(self, epochs: str, steps: str) -> None:
        if getattr(self, epochs) and getattr(self, steps):
            problem = f"conflicts with schedule.{steps}={getattr(self, steps)}"
            raise ConfigError(f"schedule.{epochs}", getattr(self, epochs), problem, "set one of them")


@dataclass(kw_only=True, slots=True)
class Schedule(WarmUp):
    """A function of the step, without state. Lengths are in steps or in epochs."""

    kind: Annotated[str, require.one_of(*KINDS)] = "constant"
    """`constant`, `linear`, `cosine`, `step`, `one_cycle` or `wsd` (warmup-stable-decay), after the warm-up."""
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
        WarmUp.__post_init__(self)
        self._refuse_both("drop_at_epochs", "drop_at_steps")
        self._refuse_both("decay_epochs", "decay_steps")
        if self.kind == "step" and not (self.drop_at_steps or self.drop_at_epochs):
            problem = "schedule.kind=step needs at least one drop"
            raise ConfigError("schedule.drop_at_epochs", "[]", problem, "set it, such as [30,60,80]")


@dataclass(kw_only=True, slots=True)
class Plateau(WarmUp):
    """Lower rates when the run's metric stops improving, as torch's ReduceLROnPlateau does."""

    kind: Annotated[str, require.one_of("plateau")] = "plateau"
    """`plateau`."""
    factor: Annotated[float, require.half_open(0, 1)] = 0.1
    """Multiplies the learning rate when the metric has stopped improving."""
    patience: Annotated[int, require.at_least(0)] = 10
    """Evaluations without an improvement that are tolerated; the next one lowers the rate."""
    threshold: Annotated[float, require.at_least(0)] = 1e-4
    """Smallest improvement that counts, relative to the best value."""
    cooldown: Annotated[int, require.at_least(0)] = 0
    """Evaluations after a drop that are ignored. Those during the warm-up are ignored, too."""
    min_factor: Annotated[float, require.between(0, 1)] = 0.0
    """Lower limit of the learning rate, relative to the optimizer's own rate."""


@dataclass(kw_only=True, slots=True)
class Custom(require.Checked):
    """Your own function, or a class of torch.optim.lr_scheduler; add its arguments as +schedule.NAME=VALUE."""

    _target_: str = MISSING
    """Import path of a function that returns a function of the step, or of a class of torch.optim.lr_scheduler."""


AnySchedule = Schedule | Plateau | Mapping[str, Any]
"""A schedule of the configuration; a mapping has a `_target_`."""


def schema_of(node: Mapping[str, Any]) -> type[Schedule | Plateau | Custom]:
    """Return the schema that a schedule's keys belong to."""
    if "_target_" in node:
        return Custom
    return Plateau if node.get("kind") == "plateau" else Schedule


def schedule_of(key: str, node: Mapping[str, Any]) -> AnySchedule:
    """Check the keys of a schedule that is part of another group.

    Args:
        key: its full name, such as `optimizer.named.critic.schedule`.
        node: its keys.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    schema = schema_of(node)
    if issubclass(schema, Custom):
        return node
    names = [item.name for item in fields(schema)]
    for name in node:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {key}.{near[0]}?" if near else f"it has {', '.join(names)}"
            raise ConfigError(f"{key}.{name}", node[name], "is not a known key", remedy)
    return require.to_schema(schema, key, node)
