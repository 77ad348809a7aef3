"""The loop: steps, and what is done between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from hpctrain.config.root import Config
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.data.plan import BatchPlan
from hpctrain.distributed.agreement import Agreement
from hpctrain.distributed.stop_request import Stop, StopKind, StopRequest
from hpctrain.errors import CheckpointError
from hpctrain.metrics.meter import Meter, Throughput
from hpctrain.metrics.sink import Sink
from hpctrain.run.times import Times
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.step import TrainStep


class Loop:
    """Trains from a step to the last one, or until the ranks agree to stop.

    Args:
        config: of the run.
        plan: the batch arithmetic.
        total_steps: where the run ends.
        train_step: one step.
        profiler: does the steps that are measured.
        evaluate: means over the held-out samples, or the stop that it was abandoned for; None where there are none.
        judge: takes an evaluation's means; whether a save is to follow, since it is among the best; collective.
        check: raises where what is logged of training shows that more of it would be wasted; collective.
        save: writes a checkpoint of so many completed steps; whether their evaluation is still due, and whether to
            wait until it is durable; collective.
        save_interval_s: seconds between saves by rank zero's clock; None: not by time, and on all other ranks.
        before_stop: takes the signal's number, says whether to save; collective.
        agreement: of the ranks.
        stop: this rank's request to stop.
        meter: collects the training loss.
        sinks: rank zero's; empty elsewhere.
        start_step: steps that earlier attempts completed.
        times: of this attempt.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        config: Config,
        plan: BatchPlan,
        total_steps: int,
        train_step: TrainStep,
        profiler: Profiler,
        evaluate: Callable[[Agreement], dict[str, float] | Stop] | None,
        judge: Callable[[int, Mapping[str, float]], bool],
        check: Callable[[int, Mapping[str, float]], None],
        save: Callable[[int, bool, bool], None],
        save_interval_s: Callable[[], float | None],
        before_stop: Callable[[int], bool],
        agreement: Agreement,
        stop: StopRequest,
        meter: Meter,
        sinks: Sequence[Sink],
        start_step: int,
        times: Times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._plan, self._total_steps = config, plan, total_steps
        self._train_step, self._evaluate, self._judge, self._save = train_step, evaluate, judge, save
        self._check, self._before_stop = check, before_stop
        self._agreement, self._stop, self._meter, self._sinks = agreement, stop, meter, sinks
        self._clock, self._times, self._profiler = clock, times, profiler
        self._throughput = Throughput(plan.samples_seen(start_step))
        self._saved_at_s = clock()
        self._save_interval_s, self._interval_s = save_interval_s, save_interval_s()
        self.step = start_step
        self.evaluation_due = False
        self._is_among_the_best = False

    def run(self, micro_batches: Iterator[MicroBatch]) -> bool:
        """Do the steps that are left; collective.

        Returns:
            Whether the last step was reached.
        """
        total, log_every = self._total_steps, self._config.logger.every_steps
        save_every = self._config.checkpoint.every_steps
        eval_every = self._config.trainer.eval_every_steps or self._plan.steps_per_epoch
        train_step, decide = self._train_step, self._agreement.decide
        profiler = self._profiler
        first = self.step + 1
        if stopped := self._agreement.start():
            # nothing is new since the checkpoint that this attempt began with
            self._before_stop(stopped.signal)
            return False
        if self.evaluation_due and (stopped := self._log_evaluation(self.step)):
            return self._leave(stopped)
        if self._is_among_the_best:
            self._save_now(self.step, wait=False)
        while self.step < total:
            if self.step == profiler.next_step:
                profiler.do_step(self.step, micro_batches)
            else:
                train_step(self.step, micro_batches)
            self.step = step = self.step + 1
            if step == first:
                self._times.begin(step)
            if step % log_every == 0 or step == total:
                self._log_training(step)
            evaluates = self._evaluate is not None and (step % eval_every == 0 or step == total)
            if evaluates and (stopped := self._log_evaluation(step)):
                return self._leave(stopped)
            decision = decide(step, save=self._save_is_due())
            if decision.stop and step < total:
                return self._leave(decision.stop)
            if decision.save or step == total or self._is_among_the_best or (save_every and step % save_every == 0):
                self._save_now(step, wait=step == total)
        return True

    def _leave(self, stopped: Stop) -> bool:
        if stopped.kind is StopKind.ERROR:
            raise self._stop.error or CheckpointError(
                "rank zero could not write a checkpoint: see its log", elsewhere=True
            )
        if self._before_stop(stopped.signal):
            self._save_now(self.step, wait=True)
        return False

    def _save_is_due(self) -> bool:
        interval_s = self._interval_s
        return interval_s is not None and self._clock() - self._saved_at_s >= interval_s

    def _save_now(self, step: int, *, wait: bool) -> None:
        self._is_among_the_best = False
        with self._throughput.paused(), self._times.during("save_s"):
            self._profiler.before_save(step)
            for sink in self._sinks:
                sink.flush()
            self._save(step, self.evaluation_due, wait)
        self._times.keep(step, due=True)
        self._saved_at_s = self._clock()
        self._interval_s = self._save_interval_s()

    def _log_training(self, step: int) -> None:
        values = self._meter.means()
        self._meter.reset()
        samples_per_s = self._throughput.rate(self._plan.samples_seen(step))
        values |= self._train_step.update.metrics
        values["train/epoch"] = step / self._plan.steps_per_epoch
        values["throughput/samples_per_s"] = samples_per_s
        values |= self._profiler.metrics(step, samples_per_s)
        begin = self._clock()
        self._log(step, values)
        self._profiler.logging_s += self._clock() - begin
        self._check(step, values)

    def _log_evaluation(self, step: int) -> Stop | None:
        """Evaluate and log; the stop for which it was abandoned, and is due again, if any."""
        assert self._evaluate is not None
        with self._throughput.paused(), self._times.during("eval_s"):
            self._profiler.before_evaluation(step)
            found = self._evaluate(self._agreement)
        self.evaluation_due = isinstance(found, Stop)
        if isinstance(found, Stop):
            return found
        self._log(step, found)
        self._is_among_the_best = self._judge(step, found)
        return None

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._times.keep(step)
        for sink in self._sinks:
            sink.log(step, values)
