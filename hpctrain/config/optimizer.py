"""``conf/optimizer``: any class of torch.optim, by ``_target_``. Owner: hpctrain.train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from hpctrain.config import require
from hpctrain.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Handling:
    """What hpctrain does with the learning rate and the parameters; not passed to the class."""

    lr_scaling: str = "none"
    """`none`; `linear`: lr x global_batch_size / lr_base_batch_size (Goyal et al., 2017); `sqrt`: its square root."""
    lr_base_batch_size: int = 256
    """Global batch size for which lr was chosen."""
    no_decay_norm_bias: bool = False
    """No weight decay for biases and for parameters of fewer than two dimensions, such as those of norms."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.one_of("optimizer.lr_scaling", self.lr_scaling, ("none", "linear", "sqrt"))
        require.at_least("optimizer.lr_base_batch_size", self.lr_base_batch_size, 1)


HANDLING_KEYS = tuple(item.name for item in fields(Handling))


def handling_of(node: Mapping[str, Any]) -> Handling:
    """Return the keys of an optimizer's node that hpctrain handles itself."""
    return Handling(**{key: node[key] for key in HANDLING_KEYS if key in node})


@dataclass(kw_only=True, slots=True)
class AdamW(Handling):
    """torch.optim.AdamW (Loshchilov & Hutter, 2019)."""

    _target_: str = "torch.optim.AdamW"
    """Class to instantiate."""
    lr: float = 3e-3
    """Learning rate at the schedule's factor 1."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.01
    """Decoupled weight decay, per unit of learning rate."""
    foreach: bool | None = None
    """Update many parameters per operation; null: on GPUs."""
    fused: bool | None = None
    """Update in one kernel; null: no."""

    def __post_init__(self) -> None:
        """Check single values."""
        Handling.__post_init__(self)
        require.above("optimizer.lr", self.lr, 0)
        require.at_least("optimizer.weight_decay", self.weight_decay, 0)
        for beta in self.betas:
            require.between("optimizer.betas", beta, 0, 1)
        _refuse_both(self)


@dataclass(kw_only=True, slots=True)
class SGD(Handling):
    """torch.optim.SGD with momentum."""

    _target_: str = "torch.optim.SGD"
    """Class to instantiate."""
    lr: float = 0.1
    """Learning rate at the schedule's factor 1."""
    momentum: float = 0.9
    """Momentum factor."""
    weight_decay: float = 5e-4
    """L2 penalty."""
    nesterov: bool = False
    """Nesterov's momentum."""
    foreach: bool | None = None
    """Update many parameters per operation; null: on GPUs."""
    fused: bool | None = None
    """Update in one kernel; null: no."""

    def __post_init__(self) -> None:
        """Check single values."""
        Handling.__post_init__(self)
        require.above("optimizer.lr", self.lr, 0)
        require.between("optimizer.momentum", self.momentum, 0, 1)
        require.at_least("optimizer.weight_decay", self.weight_decay, 0)
        _refuse_both(self)


@dataclass(kw_only=True, slots=True)
class Custom(Handling):
    """Any other optimizer class; add its other arguments as +optimizer.NAME=VALUE."""

    _target_: str = MISSING
    """Class to instantiate, such as torch.optim.RMSprop."""
    lr: float = 1e-3
    """Learning rate at the schedule's factor 1."""

    def __post_init__(self) -> None:
        """Check single values."""
        Handling.__post_init__(self)
        require.above("optimizer.lr", self.lr, 0)


def _refuse_both(node: AdamW | SGD) -> None:
    if node.fused and node.foreach:
        raise ConfigError("optimizer.fused", True, "conflicts with optimizer.foreach=True", "set one of them")
