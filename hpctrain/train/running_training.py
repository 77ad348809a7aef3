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
from hpctrain.data.eval_loader import EvalLoader
from hpctrain.data.micro_batch import shapes_of
from hpctrain.distributed.replica import buffers_and_rng_restored, inner
from hpctrain.run.directory import RunDirectory
from hpctrain.train.callbacks import CallbackContext
from hpctrain.train.modes import evaluation_mode
from hpctrain.train.parts import Parts
from hpctrain.train.precision import autocast


class RunningTraining(CallbackContext):
    """The training of one attempt.

    Args:
        parts: of the training.
        directory: of the run.
    """

    def __init__(self, parts: Parts, directory: RunDirectory) -> None:
        self.callback_name = ""
        self.update = None
        self.task = parts.task
        self.model = inner(parts.model)
        self.position = parts.position
        self.log = self.own_log = parts.task_log
        self.config = parts.config
        self.is_sharded = parts.sharded is not None
        self.rank = parts.world.rank
        self.world_size = parts.world.size
        self.device = parts.world.device
        self.run_dir = Path(directory.path)
        self.metric, self.metric_mode = judged_by(parts.config.checkpoint, parts.task.metric, parts.task.metric_mode)
        self._parts = parts
        self._plain_names = PlainNames(parts.module)

    @property
    def loss_scale(self) -> float:
        """See `Training`."""
        update = self._parts.step.turns[0].update if self.update is None else self.update
        return update.loss_scale

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """See `Training`."""
        return {self._plain_names(name): parameter for name, parameter in self._parts.module.named_parameters()}

    def eval_samples(self, number: int) -> Any | None:
        """See `Training`."""
        dataset = self._parts.eval_data
        if dataset is None:
            return None
        loader = EvalLoader(dataset, number, rank=0, world_size=1, collate_fn=self.task.collate_fn)
        with buffers_and_rng_restored(self.model, self._parts.world), closing_unless_lost(loader.rounds(1)) as rounds:
            batch = next(rounds, None)
        return None if batch is None else self.task.to_device(batch, self.device)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """See `Training`."""
        parts = self._parts
        averaged = parts.ema if self.config.trainer.eval_ema else None
        precision = autocast(self.config.precision.formats, self.device)
        with (
            buffers_and_rng_restored(self.model, parts.world),
            evaluation_mode(self.model),
            nullcontext() if averaged is None else averaged.in_place(),
            parts.task_log.discarding(),
            torch.no_grad(),
            precision,
            # after the average: it gathers the weights that are in place then
            nullcontext() if parts.sharded is None else parts.sharded.gathered(),
            nullcontext() if parts.pipeline is None else parts.pipeline.calls(shapes_of),
        ):
            yield

    def weights(self) -> dict[str, Tensor]:
        """See `Training`."""
        state = self._parts.module.state_dict()
        tensors = {self._plain_names(name): value for name, value in state.items() if isinstance(value, Tensor)}
        # in a pipeline, other ranks have them
        return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}

    def end(self, reason: str) -> None:
        """See `Training`."""
        self._parts.ending.request(reason, callback=self.callback_name)
