"""The identity of a run: the keys that decide its weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hpctrain.config.root import Config, RunConfig

DECIDES_THE_WEIGHTS = (
    "seed",
    "task",
    "model",
    "data.shuffle",
    "data.drop_last",
    "optimizer",
    "schedule",
    "precision.kind",
    "precision.initial_loss_scale",
    "precision.loss_scale_growth_steps",
    "trainer.global_batch_size",
    "trainer.micro_batch_size",
    "trainer.compile",
    "trainer.compile_mode",
    "trainer.channels_last",
    "trainer.clip_grad_norm",
    "trainer.clip_grad_value",
    "parallel.kind",
    "parallel.gradient_compression",
    "parallel.bucket_cap_mb",
    "parallel.find_unused_parameters",
    "parallel.replicate_degree",
    "parallel.shard_degree",
    "parallel.tensor_degree",
    "parallel.pipeline_degree",
    "parallel.stages_per_rank",
    "parallel.stages",
    "parallel.blocks",
    "parallel.keep_gradients_whole",
    "parallel.cpu_offload",
    "trainer.ema_decay",
    "init_from",
    "init_match",
    "init_strict",
    "trainer.sync_batchnorm",
    "args",
    "run.command",
    "run.processes",
)
"""Keys and groups of keys that change the weights, even if only by the rounding of sums. The last three are those of a
program."""


UNUSED: Mapping[str, object] = {
    "optimizer.groups": [],
    "optimizer.layer_decay": None,
    "optimizer.layer_decay_module": "blocks",
    "parallel.replicate_degree": 1,
    "parallel.shard_degree": -1,
    "parallel.tensor_degree": 1,
    "parallel.pipeline_degree": 1,
    "parallel.stages_per_rank": 1,
    "parallel.stages": [],
    "parallel.blocks": [],
    "parallel.keep_gradients_whole": False,
    "parallel.cpu_offload": False,
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
    return flat_values(dataclasses.asdict(config))


def flat_values(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration in plain containers by their full keys, without `ARGS_AS_TYPED`."""
    found: dict[str, Any] = {}

    def walk(prefix: str, value: object) -> None:
        if prefix == ARGS_AS_TYPED:
            return
        if isinstance(value, dict) and value:
            for key, inside in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inside)
        elif prefix not in UNUSED or value != UNUSED[prefix]:
            found[prefix] = value

    walk("", groups)
    return found


def stored_texts(plain: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of `args` in a stored configuration in plain containers, by full key."""
    group, _, name = ARGS_AS_TYPED.partition(".")
    texts = inside.get(name) if isinstance(inside := plain.get(group), dict) else None
    return {str(key): str(text) for key, text in texts.items()} if isinstance(texts, dict) else {}


def config_digest(config: Config) -> str:
    """Return the SHA-256, in hex, of the keys that decide the weights and their values, as sorted JSON."""
    chosen = {key: value for key, value in flat(config).items() if decides_the_weights(key)}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()
