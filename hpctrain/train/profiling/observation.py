"""What an attempt learns about itself while it trains, and its verdict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hpctrain.config.root import Config
from hpctrain.data.loader import MicroBatch
from hpctrain.data.plan import BatchPlan
from hpctrain.distributed.world import World
from hpctrain.run.bottleneck import Bottleneck
from hpctrain.run.times import Times
from hpctrain.train.profiling.bottleneck import find_bottleneck
from hpctrain.train.profiling.flop_counting import FlopCounting
from hpctrain.train.profiling.measurements import Measurements, RankReport
from hpctrain.train.profiling.measuring import Measuring
from hpctrain.train.profiling.profile import Profile
from hpctrain.train.step import TrainStep

LOG_EVERY_S = 1.0
"""Between records of values that change slowly."""
WRITE_EVERY_S = 10.0

log = logging.getLogger("hpctrain.train")


class Observation:
    """Steps that are looked at, values that are logged now and then, and the verdict; see docs/adr/0006.

    Args:
        config: of the run.
        step: the step of the training.
        plan: the batch arithmetic.
        world: the ranks.
        times: of this attempt.
        start_step: completed steps at its start.
        total_steps: where the run ends.
        num_workers: loading processes of this rank.
        waited_s: seconds that this rank has waited for data so far.
        agreed_s: seconds that it has waited for the other ranks' word.
        flops_per_sample: as an earlier attempt counted them.
        trace: the file of `trainer.profile`, where this rank writes one.
        clock: monotonic seconds.

    Attributes:
        next_step: completed steps before the next step that goes through this object; the loop compares it.
        logging_s: seconds spent on writing metrics; the loop adds to it.
    """

    def __init__(
        self,
        config: Config,
        step: TrainStep,
        plan: BatchPlan,
        world: World,
        times: Times,
        *,
        start_step: int,
        total_steps: int,
        num_workers: int,
        waited_s: Callable[[], float],
        agreed_s: Callable[[], float],
        flops_per_sample: float | None = None,
        trace: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._step, self._plan, self._world, self._times = config, step, plan, world, times
        self._start_step, self._total_steps, self._num_workers = start_step, total_steps, num_workers
        self._agreed_s, self._clock = agreed_s, clock
        self._flops = FlopCounting(step, plan, world, config.precision.kind, flops_per_sample)
        self._measuring: Measuring | None = None
        if config.logger.measure:
            self._measuring = Measuring(step, world, start_step=start_step, waited_s=waited_s, clock=clock)
        self._profile: Profile | None = None
        if trace is not None and config.trainer.profile is not None:
            first, last = config.trainer.profile
            self._profile = Profile(first, last, trace, world.device)
        self._reports: list[RankReport] = []
        self._windows = self._saves = self._evaluations = 0
        self.logging_s = 0.0
        self._logged_at = self._written_at = float("-inf")
        self._waited: tuple[float, float] | None = None
        self.next_step = self._next(start_step)

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch]) -> None:
        """Do step ``step``, counted from 0, and look at it; collective."""
        if self._measuring is not None and self._flops.by_trial and step == self._start_step + 1:
            micro_batches = self._flops.before_step(micro_batches)
        if self._profile is not None and self._profile.wants(step):
            self._profile(step, partial(self._step, step, micro_batches))
        elif self._measuring is None:
            self._step(step, micro_batches)
        elif step == self._start_step:
            self._flops.in_step(step, micro_batches)
        else:
            self._measuring(step, micro_batches)
        self.next_step = self._next(step + 1)

    def window(self, step: int, samples_per_s: float) -> dict[str, float]:
        """Values of the machine for the record of ``step``, at most every `LOG_EVERY_S`; collective.

        Args:
            step: completed steps.
            samples_per_s: over all ranks.
        """
        if self._measuring is None:
            return {}
        self._measuring.look_at_memory(step)
        self._windows += 1
        if self._windows & (self._windows - 1) == 0:
            # the 1st, 2nd, 4th, 8th ... record: often enough to be known early, too rarely to cost anything
            self._meet(step)
        now = self._clock()
        if not self._world.is_rank_zero or now - self._logged_at < LOG_EVERY_S:
            return {}
        self._logged_at = now
        if now - self._written_at >= WRITE_EVERY_S:
            self._write(step)
        share, self._waited = self._measuring.data_share(self._waited)
        per_device = samples_per_s / self._devices
        values = {
            "throughput/samples_per_s_per_device": per_device,
            "throughput/waiting_for_data": share,
            "memory/peak_gb": self._measuring.memory.peak() / 1e9,
        }
        mfu = self._flops.mfu(per_device)
        return values if mfu is None else values | {"throughput/mfu": mfu}

    def before_evaluation(self, step: int) -> None:
        """An evaluation begins: the ranks meet; collective."""
        self._evaluations += 1
        self._meet(step)

    def before_save(self, step: int) -> None:
        """A save begins: the ranks meet; collective."""
        self._saves += 1
        self._meet(step)

    def conclude(self, step: int) -> None:
        """Write and tell the verdict on rank zero, and the trace where it is; the end of an attempt."""
        if self._profile is not None:
            self._profile.close()
        if self._measuring is None or not self._world.is_rank_zero:
            return
        verdict = self._write(step)
        self._measuring.memory.close()
        if verdict.shares:
            listed = ", ".join(f"{part.replace('_', ' ')} {share:.0%}" for part, share in verdict.shares.items())
            log.info("time since the first step: %s", listed)
        log.info("verdict: %s", verdict.text)
        for line in verdict.also:
            log.info("also: %s", line)

    @property
    def _devices(self) -> int:
        """Over all ranks; a process on the CPU counts as one."""
        return self._world.size * max(1, len(self._world.gpus))

    def _next(self, completed: int) -> int:
        looks = []
        if self._measuring is not None:
            # the first step is the one in which FLOPs are counted
            looks.append(max(completed, self._measuring.next_step) if completed > self._start_step else completed)
        if self._profile is not None and (traced := self._profile.next_after(completed)) is not None:
            looks.append(traced)
        return min(looks, default=-1)

    def _meet(self, step: int) -> None:
        if self._measuring is not None:
            self._reports = self._world.gather(self._measuring.report(step)) or []

    def _write(self, step: int) -> Bottleneck:
        self._written_at = self._clock()
        if self._world.size == 1:
            self._meet(step)
        measured = self._measurements(step)
        mfu = self._flops.mfu(measured.samples_per_s_per_device)
        verdict = find_bottleneck(measured, flops_per_sample=self._flops.per_sample, mfu=mfu)
        if self._times.claim is not None and verdict.shares:
            # an attempt without a step to speak of leaves the word to the one before
            verdict.write(self._times.claim)
        return verdict

    def _measurements(self, step: int) -> Measurements:
        spent, plan = self._times.spent(), self._plan
        begun = min(step, self._start_step + 1)
        return Measurements(
            config=self._config,
            reports=self._reports,
            step=step,
            steps=step - begun,
            samples=plan.samples_seen(step) - plan.samples_seen(begun),
            total_steps=self._total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            train_s=spent.get("train_s", 0.0),
            eval_s=spent.get("eval_s", 0.0),
            save_s=spent.get("save_s", 0.0),
            evaluations=self._evaluations,
            saves=self._saves,
            agreement_s=self._agreed_s(),
            logging_s=self.logging_s,
            num_workers=self._num_workers,
            num_devices=self._devices,
            cores=self._world.cores,
            on_gpu=self._world.device.type == "cuda",
        )
