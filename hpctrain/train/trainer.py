"""The trainer: takes up where the run is, and trains to the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TextIO

from torch import nn

from hpctrain.checkpoint.warm_start import warm_start
from hpctrain.config.root import Config
from hpctrain.data.loader import TrainLoader
from hpctrain.distributed.agreement import Agreement
from hpctrain.distributed.determinism import rank_seed, seed_everything
from hpctrain.distributed.stop_request import StopRequest
from hpctrain.distributed.world import World
from hpctrain.errors import ConfigError
from hpctrain.metrics.sink import Sink
from hpctrain.run.bottleneck import Bottleneck, last_bottleneck
from hpctrain.run.directory import RunDirectory
from hpctrain.run.times import Times
from hpctrain.train.checkpointing import Continuity
from hpctrain.train.divergence import Divergence
from hpctrain.train.evaluation import Evaluation
from hpctrain.train.loop import Loop
from hpctrain.train.parts import Parts
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.sample_log import recorded
from hpctrain.train.sinks import open_sinks
from hpctrain.train.start_table import log_start
from hpctrain.train.stopping import Departure

log = logging.getLogger("hpctrain.train")


class Trainer:
    """One attempt of a run, on one rank; building and running are collective.

    Args:
        config: of the run.
        directory: of the run.
        world: the ranks.
        stop: this rank's request to stop.
        require_ownership: raises SupersededError once a later attempt owns the run.
        departure: how this attempt leaves when it is stopped.
        times: of this attempt.
        log_stream: the rank's log, where standard output doesn't go there already.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        world: World,
        stop: StopRequest,
        require_ownership: Callable[[], None],
        *,
        departure: Departure,
        times: Times,
        log_stream: TextIO | None,
    ) -> None:
        self._config, self._directory, self._world, self._stop = config, directory, world, stop
        self._log, self._departure, self._times = log_stream, departure, times
        self._require_ownership = require_ownership
        self._parts = Parts(config, world, self._begin_with())
        self._continuity = Continuity(
            config, directory, world, self._parts, stop=stop, require_ownership=require_ownership
        )
        seed_everything(rank_seed(config.seed, world.rank))
        self._loop: Loop | None = None
        self._before: Bottleneck | None = None
        self._evaluation: Evaluation | None = None
        times.enter("load_s")
        self._start_step = self._continuity.take_up()

    @property
    def step(self) -> int:
        """Steps that are completed."""
        return self._start_step if self._loop is None else self._loop.step

    @property
    def progress(self) -> object:
        """Another value after each step and each evaluated batch."""
        return self.step, 0 if self._evaluation is None else self._evaluation.turns_done

    @property
    def total_steps(self) -> int:
        """Where the run ends."""
        return self._parts.total_steps

    def run(self) -> bool:
        """Train; collective.

        Returns:
            Whether the last step was reached; otherwise the run stopped, and is saved.
        """
        self._times.enter("first_step_s")
        self._evaluation = self._parts.evaluation()
        if self._evaluation is None and self._config.checkpoint.keep_best:
            why = "nothing is evaluated: the task holds no samples out"
            raise ConfigError("checkpoint.keep_best", self._config.checkpoint.keep_best, why, "set it to 0")
        sinks, agreement, loader = self._sinks(), Agreement(self._world, self._stop), self._parts.loader(self.step)
        micro_batches = self._parts.on_their_way(iter(loader))
        if self._config.logger.samples:
            micro_batches = recorded(micro_batches, self._directory.sample_log(self._world.rank), self.step)
        profiler = self._profiler(loader, agreement)
        self._loop = loop = self._new_loop(profiler, agreement, sinks)
        try:
            with closing(micro_batches):
                finished = loop.run(micro_batches)
            self._continuity.finish()
            profiler.finish(loop.step)
        finally:
            for sink in sinks:
                sink.close()
            self._times.keep(loop.step, due=True)
        return finished

    def give_time(self, seconds: float) -> None:
        """Wait for a checkpoint that is being written, but no longer than this; after an error, and not collective."""
        self._continuity.give_time(seconds)

    def log_start(self, attempt: int, hosts: list[str]) -> None:
        """Log the table of what runs, where; rank zero's business, before `run`.

        Args:
            attempt: its number.
            hosts: of all ranks, in rank order.
        """
        self._before = last_bottleneck(self._directory)
        log_start(
            self._config,
            self._directory,
            self._parts,
            attempt=attempt,
            step=self.step,
            hosts=hosts,
            before=self._before,
        )

    def _new_loop(self, profiler: Profiler, agreement: Agreement, sinks: list[Sink]) -> Loop:
        parts, continuity = self._parts, self._continuity
        divergence = Divergence(
            self._directory,
            self._world,
            parts.step,
            parts.meter,
            settle=continuity.finish,
            min_loss_scale=self._config.precision.min_loss_scale,
            start_step=self.step,
        )

        def save(step: int, evaluation_due: bool, wait: bool) -> None:
            divergence.check_before_save(step)
            continuity.save(step, evaluation_due, wait)

        loop = Loop(
            config=self._config,
            plan=parts.plan,
            total_steps=parts.total_steps,
            train_step=parts.step,
            profiler=profiler,
            evaluate=self._evaluation,
            judge=continuity.judge,
            check=divergence.check,
            save=save,
            save_interval_s=continuity.save_interval_s,
            before_stop=lambda signal: self._departure.begin(signal, continuity.save_takes_s),
            agreement=agreement,
            stop=self._stop,
            meter=parts.meter,
            sinks=sinks,
            start_step=self.step,
            times=self._times,
        )
        loop.evaluation_due = continuity.evaluation_due
        return loop

    def _profiler(self, loader: TrainLoader, agreement: Agreement) -> Profiler:
        before = self._before
        return Profiler(
            self._parts,
            loader,
            agreement,
            self._times,
            start_step=self.step,
            flops_per_sample=None if before is None else before.flops_per_sample,
            trace=self._directory.trace(self._world.rank) if self._world.is_rank_zero else None,
        )

    def _begin_with(self) -> Callable[[nn.Module], object] | None:
        config = self._config
        if config.init_from is None or self._directory.checkpoint_steps():
            return None
        return partial(warm_start, source=Path(config.init_from), match=config.init_match, strict=config.init_strict)

    def _sinks(self) -> list[Sink]:
        if not self._world.is_rank_zero:
            return []
        # a start may take long, and whoever owns the run by now logs already
        self._require_ownership()
        return open_sinks(
            self._config.logger,
            self._directory,
            step=self.step,
            total_steps=self.total_steps,
            evaluation_due=self._continuity.evaluation_due,
            log_stream=self._log,
        )
