"""All keys of a run: their schema, which of them decide the weights, and what makes a composed configuration typed.

The schema is registered with Hydra as ``base_NAME``, which the files of ``conf/`` extend. Without it, the ranks would
be the first to notice a mistyped key, perhaps after hours in a queue.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf

from hpctrain.config import callbacks, cluster, model, optimizer, require, schedule, sweep, task
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.config.cluster import MAX_NODES, Cluster
from hpctrain.config.code import Code
from hpctrain.config.data import Data
from hpctrain.config.health import Health
from hpctrain.config.logger import Logger
from hpctrain.config.notify import Notify
from hpctrain.config.parallel import DIVISION_BY_MESH, Parallel
from hpctrain.config.precision import Precision
from hpctrain.config.resume import Resume
from hpctrain.config.run import ProgramRun
from hpctrain.config.schedule import Schedule
from hpctrain.config.trainer import Trainer
from hpctrain.errors import ConfigError

OPEN_GROUPS = ("task", "model", "optimizer", "callbacks")
"""Groups whose keys are arguments of the class in `_target_`, so that any class works without registration."""
OPEN_PROGRAM_GROUPS = ("args",)
"""Groups of a program's run whose keys the user chooses."""
OWN_KEY_REMEDIES = ("put keys of your own under task, model or optimizer", "put values of your own under args")
"""Where keys of their own belong in a training, and in a program's run."""

FOLDER_NAME = require.that(
    # at most 200: a file system takes 255 bytes, and a job's files add to the name
    lambda name: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", name),
    "is not usable as a folder name",
    "use up to 200 letters, digits and any of _ . + -",
    quoted=True,
)
NOT_EMPTY = require.that(str.strip, "is empty", "name a folder, or omit the key", quoted=True)
RUN_NAME = require.that(str.strip, "contains an empty name", "name runs: after=RUN,RUN; after=[] for none", quoted=True)
OCTAL_MODE = require.that(
    lambda mode: re.fullmatch(r"0?2?7[0-7][0145]", mode),
    "must be octal, give the owner all permissions, and not let every user of the machine write",
    "set {key}='0750'",
)


@dataclass(kw_only=True, slots=True)
class RunConfig(require.Checked):
    """Keys on which launching, supervising and showing a run depend."""

    prefix = ""

    nodes: Annotated[int, require.at_least(1, at_most=MAX_NODES)] = 1
    """Number of machines."""
    name: Annotated[str | None, FOLDER_NAME] = None
    """Name of the run, in the queue and under runs/; null: the task's name, or the program's."""
    run_dir: Annotated[str | None, require.single_line, NOT_EMPTY] = None
    """Run directory, which contains everything about the run; null: runs/NAME/DATE_TIME."""
    # a text: as a number, YAML 1.1 would read 0750 as 488
    run_mode: Annotated[str, OCTAL_MODE] = "0750"
    """Octal permissions of the run directory, of a sweep's directory, and of everything that a run creates in them,
    whatever the umask; 2770 lets a group share runs."""
    after: Annotated[list[str], require.each(require.single_line), require.each(RUN_NAME)] = field(default_factory=list)
    """Start when these runs have completed: their directories, their names under runs/, or a sweep for all of its runs;
    after=RUN,RUN needs no brackets, also in a sweep, where every run waits for all of them."""
    after_failure: Annotated[str, require.one_of("end", "start", "wait")] = "end"
    """When one of those runs has failed, was cancelled or has stopped: end this run too, start it all the same, or wait
    until that run has been resumed and has completed."""
    cluster: Cluster = field(default_factory=Cluster)
    """Where the ranks run."""
    code: Code = field(default_factory=Code)
    """The copy of the code with which the run is made."""
    health: Health = field(default_factory=Health)
    """When a run without progress counts as hanging."""
    notify: Notify = field(default_factory=Notify)
    """What is started when the state of the run changes."""
    resume: Resume = field(default_factory=Resume)
    """What may change when a run is resumed."""

    @property
    def mode(self) -> int:
        """Permissions of the run directory."""
        return int(self.run_mode, 8)


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


@dataclass(kw_only=True, slots=True)
class ProgramConfig(RunConfig):
    """Keys of `python -m hpctrain run`; those of a training, such as `trainer`, don't exist here."""

    # not a `Config` with training switched off: config.yaml would describe a model that isn't trained
    args: dict[str, Any] = field(default_factory=dict)
    """Values of your own for the command: {args.NAME} stands for the value of args.NAME."""
    run: ProgramRun = field(default_factory=ProgramRun)
    """How the program is started and stopped."""


def with_absolute_init(config: Config) -> Config:
    """Return the configuration with `init_from` as an absolute path, as it is stored.

    The ranks may run in another folder, and the same words typed again must mean the same run.
    """
    if config.init_from is None:
        return config
    return replace(config, init_from=str(Path(config.init_from).absolute()))


OPTIONS: dict[str, dict[str, type]] = {
    "callbacks": {
        "average_weights": callbacks.AverageWeights,
        "early_stopping": callbacks.EarlyStopping,
        "log_images": callbacks.LogImages,
        "log_text": callbacks.LogText,
        "log_weights": callbacks.LogWeights,
    },
    "cluster": {"local": cluster.Local, "slurm": cluster.Slurm},
    "task": {
        "digits": task.Digits,
        "image_folder": task.ImageFolder,
        "keras": task.Keras,
        "text": task.Text,
        "tokens": task.Tokens,
    },
    "model": {"convnet": model.ConvNet, "gpt": model.GPT, "mlp": model.MLP, "resnet": model.ResNet},
    "optimizer": {
        "adamw": optimizer.AdamW,
        "custom": optimizer.Custom,
        "named": optimizer.NamedOptimizers,
        "sgd": optimizer.SGD,
    },
    "schedule": {"schedule": schedule.Schedule, "plateau": schedule.Plateau, "custom": schedule.Custom},
}
"""The groups whose options differ in their keys."""
SWEEP_GROUP = "sweep"
"""The group that chooses how a sweep finds its runs."""
LIST_GROUPS = ("callbacks",)
"""The groups of which several options can be chosen, as a list; the keys of each are below its own name."""
TRAINING_KEYS = frozenset(get_type_hints(Config)) - frozenset(get_type_hints(RunConfig))
"""The top-level keys that a training has and a program's run has not."""
PROGRAM_KEYS = frozenset(get_type_hints(ProgramConfig)) - frozenset(get_type_hints(RunConfig))
"""The top-level keys that a program's run has and a training has not."""
_HINTS = get_type_hints(Config) | get_type_hints(ProgramConfig)
GROUPS: dict[str, dict[str, type]] = {
    name: OPTIONS.get(name) or {name: _HINTS[name]}
    # as in the documentation: where it runs, what is trained, and the groups that a reader meets last
    for name in sorted(_HINTS, key=lambda name: (name != "cluster", name not in TRAINING_KEYS, name in PROGRAM_KEYS))
    if name in OPTIONS or is_dataclass(_HINTS[name])
} | {SWEEP_GROUP: dict(sweep.KINDS)}
"""Dataclasses by group and schema name; the last group is of the command that makes a sweep, and not of its runs."""


def register() -> None:
    """Add all schemas to Hydra's store."""
    from hydra.core.config_store import ConfigStore  # slow to import, and ranks read their configuration without it

    repo = ConfigStore.instance().repo
    for name, node in _schemas().items():
        if isinstance(node, dict):
            repo.setdefault(name, {}).update(node)
        else:
            repo[name] = node


@cache  # making them takes a fifth of the time that composing takes
def _schemas() -> dict[str, Any]:
    """The schemas as Hydra stores them: by file name, and below the names of the groups."""
    from hydra.core.config_store import ConfigStore

    root = OmegaConf.structured(Config)
    root.schedule = None  # a default with a type would refuse the keys of the other types
    store = object.__new__(ConfigStore)  # calling the class returns the store of the process
    store.repo = {}
    store.store(name="base_config", node=root, provider="hpctrain")
    store.store(name="base_program", node=OmegaConf.structured(ProgramConfig), provider="hpctrain")
    store.store(name="base_command", node={SWEEP_GROUP: None}, provider="hpctrain")
    for group, schemas in GROUPS.items():
        for name, schema in schemas.items():
            # an entry under its own name, so that several can be chosen
            node = {name: schema} if group in LIST_GROUPS else schema
            store.store(group=group, name=f"base_{name}", node=node, provider="hpctrain")
    return store.repo


DECIDES_THE_WEIGHTS = (
    *("seed", "task", "model", "optimizer", "schedule", "init_from", "init_match", "init_strict"),
    *("data.shuffle", "data.drop_last"),
    *("precision.kind", "precision.initial_loss_scale", "precision.loss_scale_growth_steps"),
    *("trainer.global_batch_size", "trainer.micro_batch_size", "trainer.clip_grad_norm", "trainer.clip_grad_value"),
    *("trainer.compile", "trainer.compile_mode", "trainer.channels_last"),
    *("trainer.ema_decay", "trainer.sync_batchnorm"),
    *("parallel.kind", "parallel.gradient_compression", "parallel.bucket_cap_mb", "parallel.find_unused_parameters"),
    *(f"parallel.{name}" for name in DIVISION_BY_MESH),
    *("args", "run.command", "run.processes"),
)
"""Keys and groups of keys that change the weights, even if only by the rounding of sums. The last three are those of a
program."""
UNUSED: Mapping[str, object] = {
    "optimizer.groups": [],
    "optimizer.layer_decay": None,
    "optimizer.layer_decay_module": "blocks",
    **{f"parallel.{name}": value for name, value in asdict(Parallel()).items() if name in DIVISION_BY_MESH},
}
"""Keys that earlier versions didn't store, and the values with which they change nothing. They are left out, so that
runs of those versions stay the same runs."""
ARGS_AS_TYPED = "run.args_as_typed"
"""The key of the texts of `args`. Runs are compared by the values, not by their texts."""


def decides_the_weights(key: str) -> bool:
    """Whether another value of this key can lead to other weights."""
    return any(key == group or key.startswith(f"{group}.") for group in DECIDES_THE_WEIGHTS)


def flat(config: RunConfig) -> dict[str, Any]:
    """Return all values by their full keys."""
    return flat_values(asdict(config))


def flat_values(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration in plain containers by their full keys, without `ARGS_AS_TYPED`."""
    values: dict[str, Any] = {}

    def walk(prefix: str, value: object) -> None:
        if prefix == ARGS_AS_TYPED:
            return
        if isinstance(value, dict) and value:
            for key, inside in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inside)
        elif prefix not in UNUSED or value != UNUSED[prefix]:
            values[prefix] = value

    walk("", groups)
    return values


def stored_texts(plain: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of `args` in a stored configuration in plain containers, by full key."""
    run = plain.get("run")
    texts = run.get("args_as_typed") if isinstance(run, dict) else None
    return {str(key): str(text) for key, text in texts.items()} if isinstance(texts, dict) else {}


def config_digest(config: Config) -> str:
    """Return the SHA-256, in hex, of the keys that decide the weights and their values, as sorted JSON."""
    values = {key: value for key, value in flat(config).items() if decides_the_weights(key)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def to_config(node: DictConfig, schema: type[AnyConfig]) -> AnyConfig:
    """Convert a composed or stored configuration to the typed one, and check each group.

    Args:
        node: with all keys; it loses those that the schema lacks.
        schema: the class for it.

    Raises:
        ConfigError: an unknown key or an invalid value.
        OmegaConfBaseException: a missing value, a wrong type or an interpolation of a key that doesn't exist.
    """
    field_names, names = {item.name for item in fields(schema)}, set(map(str, node))
    for name in sorted(names - field_names):
        raise ConfigError(name, node[name], "is not a known key", OWN_KEY_REMEDIES[schema is ProgramConfig])
    for name in sorted(field_names - names):
        raise ConfigError(f"~{name}", None, "is required", "do not remove it")
    extra = list(_extra_keys(node))
    open_groups = _open_groups(node)
    for key in extra:
        if key.partition(".")[0] not in open_groups:
            raise ConfigError(key, OmegaConf.select(node, key), "is not a known key", "remove it, or correct it")
    plain = {
        key: OmegaConf.to_container(node[key], resolve=True, throw_on_missing=True)
        for key in open_groups
        if isinstance(node[key], DictConfig)
    }
    # to_object sets every key as an attribute, which slots refuse for those that the class lacks
    for key in extra:
        group, _, name = key.rpartition(".")
        inside = OmegaConf.select(node, group)
        OmegaConf.set_struct(inside, False)
        del inside[name]
    config = OmegaConf.to_object(node)
    assert isinstance(config, schema)
    for key, value in plain.items():
        setattr(config, key, value)
    return config


def _open_groups(node: DictConfig) -> tuple[str, ...]:
    if "schedule" not in node:
        return OPEN_PROGRAM_GROUPS
    # without a type: stored, with the arguments of a class
    is_open = OmegaConf.get_type(node.schedule) in (schedule.Custom, dict)
    return (*OPEN_GROUPS, "schedule") if is_open else OPEN_GROUPS


def _extra_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the full names of the keys that were added to a typed group."""
    schema = OmegaConf.get_type(node)
    field_names = {item.name for item in fields(schema)} if is_dataclass(schema) else None
    for name in map(str, node):
        key = f"{prefix}{name}"
        if field_names is not None and name not in field_names:
            yield key
        elif isinstance(inside := node._get_node(name), DictConfig) and not inside._is_none():
            yield from _extra_keys(inside, f"{key}.")
