"""The training of one attempt, as its callbacks see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.attempt.lost_gpu import closing_unless_lost
from hpctrain.checkpoint.best import judged_by
from hpctrain.checkpoint.state import PlainNames
from hpctrain.data.loader import EvalLoader
from hpctrain.parallel.trial_pass import buffers_and_rng_restored
from hpctrain.run.directory import RunDirectory
from hpctrain.train.callbacks import CallbackContext
from hpctrain.train.modes import evaluation_mode
from hpctrain.train.precision import autocast
from hpctrain.train.training import Training


class RunningTraining(CallbackContext):
    """The training of one attempt.

    Args:
        training: with its task, model and optimizers.
        directory: of the run.
    """

    def __init__(self, training: Training, directory: RunDirectory) -> None:
        self.callback_name = ""
        self.update = training.step.turns[0].update
        self.task = training.task
        self.model = training.network.replica.model
        self.position = training.position
        self.log = self.own_log = training.task_log
        self.config = training.config
        self.is_sharded = training.network.replica.is_shared
        self.rank = training.world.rank
        self.world_size = training.world.size
        self.device = training.world.device
        self.run_dir = Path(directory.path)
        self.metric, self.metric_mode = judged_by(
            training.config.checkpoint, training.task.metric, training.task.metric_mode
        )
        self._training = training
        self._plain_names = PlainNames(training.module)

    @property
    def loss_scale(self) -> float:
        """See `hpctrain.callbacks.Training`."""
        return self.update.loss_scale

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """See `hpctrain.callbacks.Training`."""
        return {self._plain_names(name): parameter for name, parameter in self._training.module.named_parameters()}

    def eval_samples(self, number: int) -> Any | None:
        """See `hpctrain.callbacks.Training`."""
        dataset = self._training.eval_data
        if dataset is None:
            return None
        loader = EvalLoader(dataset, number, rank=0, world_size=1, collate_fn=self.task.collate_fn)
        with (
            buffers_and_rng_restored(self.model, self._training.world),
            closing_unless_lost(loader.rounds(1)) as rounds,
        ):
            batch = next(rounds, None)
        return None if batch is None else self.task.to_device(batch, self.device)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """See `hpctrain.callbacks.Training`."""
        training = self._training
        averaged = training.ema if self.config.trainer.eval_ema else None
        precision = autocast(self.config.precision.formats, self.device)
        with (
            buffers_and_rng_restored(self.model, training.world),
            evaluation_mode(self.model),
            nullcontext() if averaged is None else averaged.in_place(),
            training.task_log.discarding(),
            torch.no_grad(),
            precision,
            # after the average: it gathers the weights that are in place then
            training.network.replica.calls(),
        ):
            yield

    def weights(self) -> dict[str, Tensor]:
        """See `hpctrain.callbacks.Training`."""
        state = self._training.module.state_dict()
        tensors = {self._plain_names(name): value for name, value in state.items() if isinstance(value, Tensor)}
        # other ranks have them
        return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}

    def end(self, reason: str) -> None:
        """See `hpctrain.callbacks.Training`."""
        self._training.ending.request(reason, callback=self.callback_name)
