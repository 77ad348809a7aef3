"""Lightning: report to hpctrain, save when the run has to stop, and continue from the newest save."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers.logger import Logger
    from lightning.pytorch.plugins import AsyncCheckpointIO
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
except ImportError:  # the package by its earlier name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.loggers.logger import Logger
    from pytorch_lightning.plugins import AsyncCheckpointIO
    from pytorch_lightning.plugins.environments import SLURMEnvironment
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

from hpctrain import session


def resume_path() -> str | None:
    """The newest reported save, for `Trainer.fit(ckpt_path=...)`; None if training begins from scratch."""
    save = session.last_save()
    return None if save is None else str(save.path)


class SessionCallback(Callback):
    """Reports steps, logged metrics and the saves of every ModelCheckpoint; at a stop, saves and leaves the program.

    The program ends inside of `fit`, by SystemExit with code 0, so that nothing after `fit` runs before the training is
    complete. Create it before `fit`: from then on a stop signal no longer ends the process.

    Args:
        done: whether the end of `fit` completes the run. If the program does more, pass False, and call
            `session.done()` at its end.

    Raises:
        MisconfigurationException: in `fit`, if Lightning would requeue the job itself, or writes its checkpoints in the
            background, so that a reported one could be incomplete.
    """

    def __init__(self, *, done: bool = True) -> None:
        session.start()
        self._handler = signal.getsignal(signal.SIGTERM)
        self._done = done
        self._step = -1
        self._stopping = False
        self._reported: set[tuple[str, int]] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what contradicts hpctrain, and receive the logged metrics."""
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            raise MisconfigurationException(
                "SLURMEnvironment(auto_requeue=True) would requeue the job in addition to hpctrain: leave the plugin "
                "out, or pass SLURMEnvironment(auto_requeue=False)"
            )
        if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            raise MisconfigurationException(
                "AsyncCheckpointIO returns before a checkpoint is complete, so that hpctrain can't know when a resume "
                "is safe: leave the plugin out"
            )
        trainer.loggers = [*trainer.loggers, _SessionLogger(trainer)]

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep Lightning's handler of SIGTERM from running."""
        # it broadcasts inside of the handler, between whatever collectives the ranks are in (Lightning 2.6)
        signal.signal(signal.SIGTERM, self._handler)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the number of steps."""
        self.on_sanity_check_start(trainer, pl_module)
        total = math.inf
        with contextlib.suppress(MisconfigurationException):  # accumulation changes in the course of the epochs
            total = trainer.estimated_stepping_batches
        session.start(total_steps=total if total >= 0 else None)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Report a step, and save if the run has to stop; collective."""
        step = trainer.global_step
        if step == self._step:
            return  # gradients are being accumulated
        self._step = step
        session.step(step)
        self._report_saves(trainer)
        if session.should_stop():
            earlier = sorted(session.checkpoint_dir().glob("stop_*.ckpt"))
            path = session.checkpoint_dir() / f"stop_{step:08d}.ckpt"
            trainer.save_checkpoint(path)
            session.saved(step, path)
            for old_path in earlier:
                if old_path != path:
                    trainer.strategy.remove_checkpoint(old_path)
            # Lightning logs this step's metrics after the hook
            self._stopping = True

    def on_train_batch_start(self, *_: Any) -> None:
        """Leave after a save at a stop."""
        self._leave()

    def on_validation_start(self, *_: Any) -> None:
        """Leave after a save at a stop: the next attempt validates."""
        self._leave()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave after a save at a stop: otherwise ModelCheckpoint would save an epoch that looks complete."""
        self._leave()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last saves, and the end."""
        self._report_saves(trainer)
        if self._done:
            session.done()

    def _leave(self) -> None:
        if self._stopping:
            raise SystemExit(0)

    def _report_saves(self, trainer: Trainer) -> None:
        for callback in trainer.checkpoint_callbacks:
            path = getattr(callback, "_last_checkpoint_saved", "")
            save = (path, getattr(callback, "_last_global_step_saved", 0))
            if path and save not in self._reported and Path(path).exists():
                self._reported.add(save)
                session.saved(save[1], path)


class ShuffledBatches:
    """Batch sampler whose order follows from seed and step, so that a resume continues in the middle of an epoch.

    Lightning restores how many batches of the epoch are done, but begins the data again: without this, the rest of the
    epoch would be its first samples. The last, incomplete batch is left out. Pass `use_distributed_sampler=False` to
    the Trainer, and use it as `DataLoader(dataset, batch_sampler=ShuffledBatches(self, len(dataset), 32))`.

    Args:
        module: what is trained.
        samples: length of the dataset.
        batch_size: samples of each rank per batch.
        seed: of the order.
    """

    def __init__(self, module: LightningModule, samples: int, batch_size: int, seed: int = 0) -> None:
        self._module = module
        self._samples = samples
        self._batch_size = batch_size
        self._seed = seed

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return self._samples // (self._batch_size * int(self._module.trainer.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of this rank's samples, from the batch on at which the training is."""
        trainer = self._module.trainer
        accumulated = trainer.accumulate_grad_batches
        epoch, steps = divmod(trainer.global_step, -(-len(self) // accumulated))
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order = torch.randperm(self._samples, generator=generator)[trainer.global_rank :: trainer.world_size]
        for batch in range(steps * accumulated, len(self)):
            yield order[batch * self._batch_size : (batch + 1) * self._batch_size].tolist()


class _SessionLogger(Logger):
    # a logger gets exactly what is logged at a step; `trainer.callback_metrics` would repeat older values
    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    @property
    def name(self) -> str:
        return "hpctrain"

    @property
    def version(self) -> int:
        return session.attempt()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._trainer.is_global_zero:
            # Lightning's step counts from zero
            session.step(self._trainer.global_step, metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass
