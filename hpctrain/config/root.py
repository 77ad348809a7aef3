"""The configuration of a run: ``conf/train.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from hpctrain.config import require
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.config.data import Data
from hpctrain.config.logger import Logger
from hpctrain.config.parallel import Parallel
from hpctrain.config.precision import Precision
from hpctrain.config.run_config import RunConfig
from hpctrain.config.schedule import Schedule
from hpctrain.config.trainer import Trainer


@dataclass(kw_only=True, slots=True)
class Config(RunConfig):
    """Top-level keys, and one field per group; task, model and optimizer have the arguments of their `_target_`."""

    seed: Annotated[int, require.between(0, 2**63 - 1)] = 0
    """Seed of everything random in the run."""
    init_from: str | None = None
    """Start with the weights of another run, a checkpoint, or a .pt or .safetensors file; null: with new weights."""
    init_match: str = "*"
    """Names of the weights to load, with * and ?, such as encoder.*."""
    init_strict: bool = True
    """Require that every matching name is in the model and in the file, with the same shape."""
    task: Any = None
    """What is trained."""
    model: Any = None
    """The network."""
    data: Data = field(default_factory=Data)
    """How samples reach the ranks."""
    optimizer: Any = None
    """Any class of torch.optim."""
    schedule: Any = field(default_factory=Schedule)
    """The learning rate over the run."""
    precision: Precision = field(default_factory=Precision)
    """The number format of the forward pass."""
    parallel: Parallel = field(default_factory=Parallel)
    """How the ranks share the work."""
    trainer: Trainer = field(default_factory=Trainer)
    """How long, how large, how often."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When to save and what to keep."""
    logger: Logger = field(default_factory=Logger)
    """What is logged."""
    callbacks: Any = field(default_factory=dict)
    """What watches the training, by name, in this order."""


def with_absolute_init(config: Config) -> Config:
    """Return the configuration with `init_from` as an absolute path, as it is stored.

    The ranks may run in another folder, and the same words typed again must mean the same run.
    """
    if config.init_from is None:
        return config
    return replace(config, init_from=str(Path(config.init_from).absolute()))
