"""The typed schema by group, registered with Hydra as ``base_NAME``, which the files of ``conf/`` extend."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from typing import get_type_hints

from omegaconf import OmegaConf

from hpctrain.config import callbacks, cluster, model, named_optimizers, optimizer, schedule, task
from hpctrain.config.root import Config

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
LIST_GROUPS = ("callbacks",)
"""The groups of which several options can be chosen, as a list; the keys of each are below its own name."""
GROUPS: dict[str, dict[str, type]] = {
    name: OPTIONS.get(name) or {name: schema}
    for name, schema in get_type_hints(Config).items()
    if name in OPTIONS or is_dataclass(schema)
}
"""Dataclasses by group and schema name, in the order of `Config`."""


@cache  # Hydra's store belongs to the process, and filling it takes a fifth of the time that composing takes
def register() -> None:
    """Register all schemas in Hydra's store, once per process."""
    from hydra.core.config_store import ConfigStore  # slow to import, and ranks read their configuration without it

    root = OmegaConf.structured(Config)
    root.schedule = None  # a default with a type would refuse the keys of the other types
    store = ConfigStore.instance()
    store.store(name="base_config", node=root, provider="hpctrain")
    for group, schemas in GROUPS.items():
        for name, schema in schemas.items():
            # an entry under its own name, so that several can be chosen
            node = {name: schema} if group in LIST_GROUPS else schema
            store.store(group=group, name=f"base_{name}", node=node, provider="hpctrain")
