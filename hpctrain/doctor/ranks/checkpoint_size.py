"""The size of a checkpoint of the configured model, without training it."""

from __future__ import annotations

from hpctrain.config.root import Config
from hpctrain.rank.determinism import random_states_restored
from hpctrain.train.build import build_model, build_trained_task
from hpctrain.train.initial_values import build_without_values

COPIES = 3
"""The weights, and two states of the optimizer of the same size, as AdamW has; other optimizers have fewer."""


def checkpoint_bytes(config: Config) -> int:
    """About how many bytes a checkpoint takes: the weights, and two states of the optimizer for each.

    The model is built without the memory for its weights, if torch's meta device can build it.

    Args:
        config: of a training.

    Raises:
        Exception: whatever the task raises.
    """
    with random_states_restored([]):
        task = build_trained_task(config)
        model = build_without_values(lambda: build_model(config.model, task))
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return COPIES * sum(tensor.numel() * tensor.element_size() for tensor in held.values())
