"""The configuration of a run: ``conf/train.yaml``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from hpctrain.config import require
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.config.cluster import MAX_NODES, Cluster
from hpctrain.config.data import Data
from hpctrain.config.health import Health
from hpctrain.config.logger import Logger
from hpctrain.config.parallel import Parallel
from hpctrain.config.precision import Precision
from hpctrain.config.resume import Resume
from hpctrain.config.schedule import Schedule
from hpctrain.config.trainer import Trainer

FOLDER_NAME = require.that(
    # at most 200: a file system takes 255 bytes, and a job's files add to the name
    lambda name: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", name),
    "is not usable as a folder name",
    "use up to 200 letters, digits and any of _ . + -",
    quoted=True,
)
NOT_EMPTY = require.that(str.strip, "is empty", "name a folder, or omit the key", quoted=True)
OWNER_MAY_ALL = require.that(
    lambda mode: re.fullmatch(r"0?2?7[0-7][0145]", mode),
    "must be octal, give the owner all permissions, and not let every user of the machine write",
    "set {key}='0750'",
)


@dataclass(kw_only=True, slots=True)
class Config(require.Checked):
    """Top-level keys, and one field per group; task, model and optimizer have the arguments of their `_target_`."""

    prefix = ""

    nodes: Annotated[int, require.at_least(1, at_most=MAX_NODES)] = 1
    """Number of machines."""
    seed: Annotated[int, require.between(0, 2**63 - 1)] = 0
    """Seed of everything random in the run."""
    name: Annotated[str | None, FOLDER_NAME] = None
    """Name of the run, in the queue and under runs/; null: the task's name."""
    run_dir: Annotated[str | None, require.single_line, NOT_EMPTY] = None
    """Run directory, which contains everything about the run; null: runs/NAME/DATE_TIME."""
    init_from: str | None = None
    """Start with the weights of another run, a checkpoint, or a .pt or .safetensors file; null: with new weights."""
    init_match: str = "*"
    """Names of the weights to load, with * and ?, such as encoder.*."""
    init_strict: bool = True
    """Require that every matching name is in the model and in the file, with the same shape."""
    # a text: as a number, YAML 1.1 would read 0750 as 488
    run_mode: Annotated[str, OWNER_MAY_ALL] = "0750"
    """Octal permissions of the run directory, of a sweep's directory, and of everything that a run creates in them,
    whatever the umask; 2770 lets a group share runs."""
    cluster: Cluster = field(default_factory=Cluster)
    """Where the ranks run."""
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
    health: Health = field(default_factory=Health)
    """When a run without progress counts as hanging."""
    resume: Resume = field(default_factory=Resume)
    """What may change when a run is resumed."""

    @property
    def mode(self) -> int:
        """Permissions of the run directory."""
        return int(self.run_mode, 8)


def with_absolute_init(config: Config) -> Config:
    """Return the configuration with `init_from` as an absolute path, as it is stored.

    The ranks may run in another folder, and the same words typed again must mean the same run.
    """
    if config.init_from is None:
        return config
    return replace(config, init_from=str(Path(config.init_from).absolute()))
