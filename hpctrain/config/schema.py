"""The typed schema by group, registered with Hydra as ``base_NAME``, which the files of ``conf/`` extend."""

from __future__ import annotations

from hpctrain.config import (
    checkpoint,
    cluster,
    data,
    health,
    logger,
    model,
    optimizer,
    parallel,
    precision,
    resume,
    schedule,
    task,
    trainer,
)
from hpctrain.config.root import Config

GROUPS: dict[str, dict[str, type]] = {
    "cluster": {"local": cluster.Local, "slurm": cluster.Slurm},
    "task": {
        "digits": task.Digits,
        "image_folder": task.ImageFolder,
        "keras": task.Keras,
        "text": task.Text,
        "tokens": task.Tokens,
    },
    "model": {"convnet": model.ConvNet, "gpt": model.GPT, "mlp": model.MLP, "resnet": model.ResNet},
    "data": {"data": data.Data},
    "optimizer": {"adamw": optimizer.AdamW, "custom": optimizer.Custom, "sgd": optimizer.SGD},
    "schedule": {"schedule": schedule.Schedule},
    "precision": {"precision": precision.Precision},
    "parallel": {"parallel": parallel.Parallel},
    "trainer": {"trainer": trainer.Trainer},
    "checkpoint": {"checkpoint": checkpoint.Checkpoint},
    "logger": {"logger": logger.Logger},
    "health": {"health": health.Health},
    "resume": {"resume": resume.Resume},
}
"""Dataclasses by group and schema name."""


def register() -> None:
    """Register all schemas in Hydra's store."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="base_config", node=Config, provider="hpctrain")
    for group, schemas in GROUPS.items():
        for name, node in schemas.items():
            store.store(group=group, name=f"base_{name}", node=node, provider="hpctrain")
