"""``conf/optimizer``: any class of torch.optim, by ``_target_``. Owner: hpctrain.train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from omegaconf import MISSING

from hpctrain.config import require
from hpctrain.errors import ConfigError

BETWEEN_0_AND_1 = require.that(lambda value: 0 < value <= 1, "must be above 0, and at most 1", "set {key}=0.75")


@dataclass(kw_only=True, slots=True)
class Handling(require.Checked):
    """What hpctrain does with the learning rate and the parameters; not passed to the class."""

    lr_scaling: Annotated[str, require.one_of("none", "linear", "sqrt")] = "none"
    """`none`; `linear`: lr x global_batch_size / lr_base_batch_size (Goyal et al., 2017); `sqrt`: its square root."""
    lr_base_batch_size: Annotated[int, require.at_least(1)] = 256
    """Global batch size for which lr was chosen."""
    no_decay_norm_bias: bool = False
    """No weight decay for biases and for parameters of fewer than two dimensions, such as those of norms."""
    groups: list[Any] = field(default_factory=list)
    """Parameter groups: a list of entries such as {match: "NAME.*", lr_factor: 0.1, weight_decay: 0.0}. match is a
    pattern or a list of patterns; the first entry that matches a parameter applies. With frozen: true the parameters
    aren't trained; with unfreeze_at_step or unfreeze_at_epoch they are trained after that number of steps or epochs."""
    layer_decay: Annotated[float | None, BETWEEN_0_AND_1] = None
    """Learning rate of a block relative to that of the next one, such as 0.75; null: the same for all."""
    layer_decay_module: Annotated[str, require.not_empty] = "blocks"
    """For layer_decay: name of the module whose children are the numbered blocks, such as blocks or encoder.layer; may
    have * and ?."""


HANDLING_KEYS = tuple(item.name for item in fields(Handling))


def handling_of(node: Mapping[str, Any]) -> Handling:
    """Return the keys of an optimizer's node that hpctrain handles itself."""
    return Handling(**{key: node[key] for key in HANDLING_KEYS if key in node})


@dataclass(kw_only=True, slots=True)
class Fusible(Handling):
    """An optimizer that can update several parameters at once."""

    foreach: bool | None = None
    """Update many parameters per operation; null: on GPUs."""
    fused: bool | None = None
    """Update in one kernel; null: no."""

    def __post_init__(self) -> None:
        """Also refuse both ways of updating at once."""
        Handling.__post_init__(self)
        if self.fused and self.foreach:
            raise ConfigError("optimizer.fused", True, "conflicts with optimizer.foreach=True", "set one of them")


PAIR = require.that(lambda betas: len(betas) == 2, "must be two numbers", "write {key}=[0.9,0.999]")


IS_NUMBER = require.that(
    lambda value: isinstance(value, int | float) and not isinstance(value, bool), "must be a number", "correct it"
)
ARE_NUMBERS = require.that(
    lambda value: isinstance(value, list), "must be a list of numbers", "write {key}=[0.9,0.999]"
)
OF_ANY_CLASS: Mapping[str, tuple[require.Check, ...]] = {
    "weight_decay": (IS_NUMBER, require.at_least(0)),
    "momentum": (IS_NUMBER, require.at_least(0)),
    "betas": (ARE_NUMBERS, require.each(IS_NUMBER), require.each(require.half_open(0, 1))),
}
"""Checks of options that mean the same in every class that has them."""


def check_option(key: str, value: object, *, is_of_torch: bool) -> None:
    """Check an option of an optimizer's class, or of one of its groups, by its name.

    Args:
        key: its full name.
        value: of any type.
        is_of_torch: whether the class is one of torch.optim, none of which takes null for a number.

    Raises:
        ConfigError: the value is wrong for any class.
    """
    checks = OF_ANY_CLASS.get(key.rpartition(".")[2], ())
    if value is None and not is_of_torch:
        return
    for check in checks:
        check(key, value)


@dataclass(kw_only=True, slots=True)
class AdamW(Fusible):
    """torch.optim.AdamW (Loshchilov & Hutter, 2019)."""

    _target_: str = "torch.optim.AdamW"
    """Class to instantiate."""
    lr: Annotated[float, require.above(0)] = 3e-3
    """Learning rate at the schedule's factor 1."""
    betas: Annotated[list[float], PAIR, require.each(require.half_open(0, 1))] = field(
        default_factory=lambda: [0.9, 0.999]
    )
    """Decay rates of the two moments."""
    eps: Annotated[float, require.at_least(0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, require.at_least(0)] = 0.01
    """Decoupled weight decay, per unit of learning rate."""


@dataclass(kw_only=True, slots=True)
class SGD(Fusible):
    """torch.optim.SGD with momentum."""

    _target_: str = "torch.optim.SGD"
    """Class to instantiate."""
    lr: Annotated[float, require.above(0)] = 0.1
    """Learning rate at the schedule's factor 1."""
    momentum: Annotated[float, require.between(0, 1)] = 0.9
    """Momentum factor."""
    weight_decay: Annotated[float, require.at_least(0)] = 5e-4
    """L2 penalty."""
    nesterov: bool = False
    """Nesterov's momentum."""

    def __post_init__(self) -> None:
        """Also refuse Nesterov's momentum without momentum."""
        Fusible.__post_init__(self)
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov", True, "needs a momentum", "set optimizer.momentum above 0")


@dataclass(kw_only=True, slots=True)
class Custom(Handling):
    """Any other optimizer class; add its other arguments as +optimizer.NAME=VALUE."""

    _target_: str = MISSING
    """Class to instantiate, such as torch.optim.RMSprop."""
    lr: Annotated[float, require.above(0)] = 1e-3
    """Learning rate at the schedule's factor 1."""
