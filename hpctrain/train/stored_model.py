"""The model of a run that has checkpoints, built as the run built it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.read import choose_newest, load
from hpctrain.checkpoint.restore import copy_saved, restore_weights
from hpctrain.checkpoint.state import PlainNames
from hpctrain.checkpoint.stored_tensor import StoredTensor
from hpctrain.config.root import Config
from hpctrain.errors import CheckpointError
from hpctrain.phrases import listed
from hpctrain.rank.determinism import seed_everything
from hpctrain.run.checkpoints import BestCheckpoint
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import describe_gone
from hpctrain.tasks.task import Task
from hpctrain.train.build import build_model, build_task
from hpctrain.train.precision import compute_in, dtype_of
from hpctrain.train.process_state import process_state_restored

CheckpointChoice: TypeAlias = Literal["newest", "best"] | int
"""Which checkpoint: the newest intact one, that with the best score, or that of a step."""

log = logging.getLogger("hpctrain.checkpoint")


def load_task(config: Config) -> Task:
    """Build a run's task, without preparing its data."""
    with process_state_restored():
        seed_everything(config.seed)
        return build_task(config.task)


def load_model(
    config: Config,
    directory: RunDirectory,
    which: CheckpointChoice,
    *,
    device: torch.device | str,
    averaged: bool | None,
) -> nn.Module:
    """Build a run's model and load a checkpoint's weights into it; not collective.

    Args:
        config: of the run.
        directory: of the run.
        which: of its checkpoints.
        device: where the model ends up.
        averaged: whether to load the moving average of the weights; None: if the run evaluates it.

    Returns:
        The model in evaluation mode, without DDP, compilation or memory formats.

    Raises:
        CheckpointError: there is no such checkpoint, it isn't intact, or doesn't fit the model.
        ConfigError: a class can't be imported here.
    """
    path = choose_checkpoint(directory, which)
    with process_state_restored():
        seed_everything(config.seed)  # as on the ranks: building may draw what no checkpoint holds
        model = build_model(config.model, build_task(config.task))
    if (dtype := dtype_of(config.precision.formats.model)) is not None:
        model.to(dtype)
        compute_in(dtype, model, outer_dtype=torch.float32)
    checkpoint = load(path)
    restore_weights(checkpoint.states, model)
    if averaged or (averaged is None and config.trainer.eval_ema and checkpoint.average):
        _load_average(model, checkpoint.average, path)
    return model.to(device).eval()


def choose_checkpoint(directory: RunDirectory, which: CheckpointChoice) -> Path:
    """Return the path of a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    if which == "newest":
        newest, _ = choose_newest(directory)
        if newest is None:
            missing = f"{directory.path}: expected a checkpoint, but the run has saved none yet"
            raise CheckpointError(describe_gone(directory) or missing)
        return newest
    if which == "best":
        best = BestCheckpoint.of(directory)
        path = best.require(directory).path
        if best.warning:
            log.warning("%s: %s", directory.path, best.warning)
        return path
    if which not in (steps := directory.checkpoint_steps()):
        choices = listed(map(str, steps)) or "none"
        raise CheckpointError(f"{directory.path}: expected newest, best or a saved step ({choices}), got {which!r}")
    return directory.checkpoint(which)


@torch.no_grad()
def _load_average(model: nn.Module, average: Mapping[str, Tensor | StoredTensor], path: Path) -> None:
    plain = PlainNames(model)
    parameters = {plain(name): parameter for name, parameter in model.named_parameters()}
    if not average or average.keys() - parameters.keys():
        raise CheckpointError(f"{path} holds no moving average of this model's weights; see trainer.ema_decay")
    for name, weights in average.items():
        copy_saved(parameters[name].detach(), weights)
