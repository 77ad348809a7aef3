"""The trainer of one attempt: it resumes the run and trains it to the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import nullcontext
from functools import partial
from typing import TextIO

from hpctrain.attempt.lost_gpu import closing_unless_lost
from hpctrain.attempt.outcome import train_on_command
from hpctrain.checkpoint.read import prepare_resume
from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.config.root import Config
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.distributed.determinism import rank_seed, seed_everything
from hpctrain.distributed.world import World
from hpctrain.errors import ConfigError
from hpctrain.metrics.bar import Bar, open_bar
from hpctrain.run.bottleneck import last_bottleneck
from hpctrain.run.config_change import keep_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim
from hpctrain.run.times import Times
from hpctrain.train.callbacks import Callbacks
from hpctrain.train.checkpointing import Checkpointing, Start
from hpctrain.train.divergence import Divergence
from hpctrain.train.loop import Loop
from hpctrain.train.parts import Parts
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.running_training import RunningTraining
from hpctrain.train.start_table import log_start
from hpctrain.train.step import unknown_optimizers_refused
from hpctrain.train.stopping import Stopping
from hpctrain.train.training_log import TrainingLog, cut_sample_logs, log_samples

log = logging.getLogger("hpctrain")
"""Its handlers print on the terminal, where a bar has to make room."""


class Trainer:
    """One attempt of a run, on one rank; building and running are collective.

    Args:
        config: of the run.
        directory: of the run.
        world: the ranks.
        stopping: of this attempt.
        claim: of this attempt.
        times: of this attempt.
        log_stream: the rank's log, if standard output doesn't go there already.
        terminal: where to draw a bar if standard output isn't the terminal.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        world: World,
        *,
        stopping: Stopping,
        claim: Claim,
        times: Times,
        log_stream: TextIO | None,
        terminal: TextIO | None = None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._world = world
        self._stopping = stopping
        self._claim = claim
        self._times = times
        self._log_stream = log_stream
        self._bar: Bar | None = None
        if world.is_rank_zero:
            self._bar = open_bar(config.trainer.progress, terminal or sys.stdout, is_log=log_stream is None)
        resumes = prepare_resume(directory, claim, world)
        self._parts = Parts(
            config,
            world,
            fresh=not resumes,
            resumes=resumes,
            stop=stopping.request,
            callbacks=lambda parts: Callbacks(config.callbacks, RunningTraining(parts, directory)),
        )
        # built before the random state is restored: the task's draws for its held-out samples must not advance it
        self._parts.require_same_evaluation()
        if self._parts.evaluation is None:
            self._refuse_without_evaluation()
        self._saver = self._new_saver()
        agreement = stopping.agreement
        self._checkpointing = Checkpointing(self._parts, directory, self._saver, agreement=agreement, claim=claim)
        # the parts were built from the same numbers on all ranks; from here on each rank draws its own
        seed_everything(rank_seed(config.seed, world.random_stream))
        times.enter("load_s")
        start = self._resume()
        self._start_step = start.step
        self.resumed_world_size = start.resumed_world_size
        self._loader = self._parts.loader(start.step, self._parts.stream_state.bookmarks)
        before = last_bottleneck(directory) if world.is_rank_zero else None
        self._flops_per_sample = None if before is None else before.flops_per_sample
        self._profiler = self._new_profiler(start)
        self._log = TrainingLog(self._parts, start, self._profiler, times)
        self._loop = self._new_loop(start)

    def _new_saver(self) -> CheckpointSaver:
        world, policy = self._world, self._parts.checkpoint_policy
        arguments = self._directory, self._claim, policy, self._stopping.request
        if self._parts.sharded is None:
            return CheckpointSaver(*arguments)
        # they import torch's DTensor, which takes half a second
        from hpctrain.checkpoint.sharded.saver import ShardedSaver
        from hpctrain.checkpoint.sharded.write import ShardedWriter

        writer = ShardedWriter(self._directory, self._claim, world, num_files=policy.writers)
        return ShardedSaver(*arguments, writer=writer, leads=world.is_rank_zero)

    def _refuse_without_evaluation(self) -> None:
        why, keep_best = "nothing is evaluated: the task has no eval_dataset", self._config.checkpoint.keep_best
        if keep_best:
            raise ConfigError("checkpoint.keep_best", keep_best, why, "set it to 0")
        for rate in (update.learning_rate for update in self._parts.step.updates):
            if rate.followed is not None:
                remedy = "choose another schedule, such as cosine"
                raise ConfigError(rate.key, "plateau", why, remedy)
        self._parts.callbacks.require_evaluation(why)

    def _resume(self) -> Start:
        bar = self._bar
        if bar is None:
            return self._checkpointing.resume()
        if self._parts.evaluation is not None:
            self._parts.evaluation.on_round = partial(bar.show, "evaluation")
        with bar.sharing_terminal(log.handlers):
            return self._checkpointing.resume(partial(bar.show, "reading the checkpoint", in_gb=True))

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._loop.step

    @property
    def progress(self) -> object:
        """A value that changes after each step and each evaluated batch."""
        return self.step, 0 if self._parts.evaluation is None else self._parts.evaluation.num_batches

    @property
    def why_ended(self) -> str:
        """Why the run was completed before its last step; empty if it wasn't."""
        return self._loop.why_ended

    @property
    def keep_best(self) -> int:
        """Number of checkpoints with the best evaluations that the run keeps."""
        return self._parts.checkpoint_policy.keep_best or 0

    @property
    def total_steps(self) -> int:
        """The last step of the run."""
        return self._parts.total_steps

    def log_start(self, hosts: list[str]) -> None:
        """Log the start table; on rank zero, before `run`.

        Args:
            hosts: of all ranks, in rank order.
        """
        log_start(
            self._directory,
            self._parts,
            attempt=self._claim.attempt,
            step=self.step,
            hosts=hosts,
            flops_per_sample=self._flops_per_sample,
        )

    def run(self) -> bool:
        """Train; collective.

        Returns:
            Whether the last step was reached; if not, the run stopped, and is saved if there was time.

        Raises:
            TaskError: the task broke its contract.
            ConfigError: the evaluation doesn't return the metric that `checkpoint.metric` names.
            SupersededError: a later attempt owns the run.
        """
        self._times.enter("first_step_s")
        if self._world.is_rank_zero:
            # the start may have taken long, and a later attempt may own the metrics by now
            self._claim.require_ownership()
        room = nullcontext() if self._bar is None else self._bar.sharing_terminal(log.handlers)
        try:
            with room:
                return self._run()
        finally:
            self._times.record(self.step, due=True)

    def _run(self) -> bool:
        if self._loop.start(try_out=self._needs_sanity_check()):
            return self._train()
        self._saver.finish()
        return False

    def _needs_sanity_check(self) -> bool:
        """Whether the run is new, or resumes with another configuration; collective."""
        return self.step == 0 or bool(self._world.broadcast(self._directory.config_before.exists()))

    def _train(self) -> bool:
        if self._world.is_rank_zero:
            # the evaluation may have taken long, and a later attempt may own the run by now
            self._claim.require_ownership()
        with self._log.opened(self._directory, self._log_stream, self._bar):
            # end the loading processes first: the last write can use their cores
            with (
                closing_unless_lost(self._micro_batches()) as micro_batches,
                unknown_optimizers_refused(self._parts.step),
            ):
                finished = self._loop.run(micro_batches, self._after_first_step)
            self._saver.finish()
            if self.step > self._start_step:
                self._keep_config()  # again, in case the file system failed after the first step
            if finished:
                self._parts.loss_weights.check_end(self.step)
            if self.why_ended:
                log.info("to train on: %s", train_on_command(self._directory, self.why_ended))
            self._profiler.finish(self.step)
            if finished:
                self._log.complete()
            # last: an error in a callback must not keep anything above from being written
            self._loop.conclude(finished=finished)
        return finished

    def _after_first_step(self) -> None:
        self._checkpointing.require_constant_buffers()
        self._keep_config()

    def _keep_config(self) -> None:
        """Keep a resume's change to the configuration, once a step was trained with it."""
        if self._world.is_rank_zero:
            self._claim.require_ownership()
            keep_config(self._directory, self._start_step)

    def finish_save_within(self, seconds: float) -> None:
        """Wait for a checkpoint that is being written, but no longer than ``seconds``; after an error."""
        self._saver.finish_within(seconds)

    def _new_profiler(self, start: Start) -> Profiler:
        return Profiler(
            self._parts,
            self._loader,
            self._stopping.agreement,
            self._times,
            start_step=start.step,
            flops_per_sample=self._flops_per_sample,
            trace=self._directory.trace(self._world.rank) if self._world.is_rank_zero else None,
        )

    def _new_loop(self, start: Start) -> Loop:
        return Loop(
            self._parts,
            start,
            profiler=self._profiler,
            log=self._log,
            checkpointing=self._checkpointing,
            divergence=Divergence(self._parts, self._directory, self._saver, start.step),
            stopping=self._stopping,
            times=self._times,
        )

    def _micro_batches(self) -> Generator[MicroBatch, None, None]:
        position, loading = self._parts.position, None
        # a hook that runs before each step may change what a checkpoint holds
        if not self._parts.callbacks.before_step:
            loading = self._stopping.agreement.loading_stop(lambda: f"step/{position.step}")
        micro_batches = self._loader.micro_batches(self._parts.transfer, loading)
        if self._parts.loss_weights.vary:
            micro_batches = self._parts.loss_weights.of_steps(micro_batches)
        if not self._config.logger.samples or not self._world.counts_samples:
            return micro_batches
        if self._world.is_rank_zero:
            cut_sample_logs(self._directory, range(0, self._world.size, self._world.tensor_size), self.step)
        return log_samples(micro_batches, self._directory.sample_log(self._world.rank), self.step)
