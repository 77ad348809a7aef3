"""The typed schema by group, registered with Hydra as ``base_NAME``, which the files of ``conf/`` extend."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from hpctrain.config import callbacks, cluster, model, named_optimizers, optimizer, schedule, sweep, task
from hpctrain.config.program import ProgramConfig
from hpctrain.config.root import Config
from hpctrain.config.run_config import RunConfig

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
        "named": named_optimizers.NamedOptimizers,
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
