"""The profiler of an attempt: it measures steps for the loop, and finds the bottleneck."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hpctrain.config.precision import FORMATS
from hpctrain.data.fetch import workers_can_help
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.rank.agreement import Agreement
from hpctrain.run.bottleneck import Bottleneck
from hpctrain.run.times import Times
from hpctrain.train.precision import slow_precision_reason
from hpctrain.train.profiling.bottleneck import Measurements, RankReport, SlowestRank, find_bottleneck, slowest_of
from hpctrain.train.profiling.flops import FlopCounter
from hpctrain.train.profiling.sampler import StepSampler
from hpctrain.train.training import Training

LOG_EVERY_S = 1.0
"""Seconds between records of values that change slowly: a tiny model logs a record every few milliseconds, and each
value costs about a microsecond in TensorBoard's file alone."""
WRITE_EVERY_S = 10.0
"""Seconds between two writes of `verdict.json`."""
LEAST_STEPS = 3
"""Timed steps of each rank in a stretch; a single slow step says little of a rank."""

log = logging.getLogger("hpctrain.train")


class SlowestRankTracker:
    """Follows the slowest rank over time.

    A stretch lasts from one gathering to the next, or longer, until each rank has timed `LEAST_STEPS` in it.
    """

    def __init__(self) -> None:
        self._before: Sequence[RankReport] = ()
        self._slowest: SlowestRank | None = None

    def add(self, reports: Sequence[RankReport]) -> None:
        """Add the reports that were gathered, in rank order."""
        stretch = reports
        if self._before:
            stretch = [now.since(before) for before, now in zip(self._before, reports, strict=True)]
        if any(report.steps_timed < LEAST_STEPS for report in stretch):
            return
        self._before = reports
        self._slowest = slowest_of(stretch) or self._slowest

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the newest stretch; each is returned once, and empty without a new one."""
        slowest = self._slowest
        self._slowest = None
        if slowest is None:
            return {}
        return {"throughput/slowest_rank": slowest.report.rank, "throughput/slowest_ratio": slowest.ratio}


class Profiler:
    """Measures some of an attempt's steps, and reports the bottleneck.

    When `next_step` steps are completed, the loop calls `do_step` for the next one; it runs all other steps itself.
    So measuring adds only a comparison to most steps. Timing every step would cost a tiny model more than everything
    else in the loop, and each window of torch's profiler costs tens of milliseconds and an import.

    Args:
        training: what is trained.
        loader: of this rank's training batches.
        agreement: of the ranks.
        times: of this attempt.
        start_step: completed steps at its start.
        flops_per_sample: as counted by an earlier attempt.
        trace: the file for `trainer.profile`; None on ranks that write none.
        clock: monotonic seconds.

    Attributes:
        next_step: completed steps before the next step for `do_step`; -1 if none follows.
        logging_s: seconds spent on writing metrics; the training log adds to it.
    """

    def __init__(
        self,
        training: Training,
        loader: TrainLoader,
        agreement: Agreement,
        times: Times,
        *,
        start_step: int,
        flops_per_sample: float | None = None,
        trace: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, world = training.config, training.world
        self._training = training
        self._world = world
        self._agreement = agreement
        self._times = times
        self._start_step = start_step
        self._clock = clock
        self._flops = FlopCounter(
            training.step, training.data.plan, world, config.precision.formats.products, flops_per_sample
        )
        self._sampler: StepSampler | None = None
        if config.logger.measure:
            self._sampler = StepSampler(training.step, world, loader, next_step=start_step + 1, clock=clock)
        self._trace: TorchProfile | None = None
        if trace is not None and config.trainer.profile is not None:
            first, last = config.trainer.profile
            self._trace = TorchProfile(first, last, trace, world.device)
        trained = [parameter for turn in training.step.turns for parameter in turn.module.unfrozen]
        self._gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        self._reports: list[RankReport] = []
        self._slowest = SlowestRankTracker()
        self._records = 0
        self._saves = 0
        self._evaluations = 0
        self._eval_before_s = 0.0
        self._samples_before = training.data.samples_seen(start_step)
        self._logged_at = float("-inf")
        self._written_at = float("-inf")
        self.logging_s = 0.0
        self.next_step = self._next(start_step)

    def do_step(self, step: int, micro_batches: Iterator[MicroBatch]) -> None:
        """Run step ``step``, counted from 0, and measure it; collective."""
        if step == self._start_step:
            # evaluations before the first step: the shares are of the time after it
            self._eval_before_s = self._times.spent().get("eval_s", 0.0)
            self._evaluations = 0
        if self._sampler is not None and self._flops.by_trial and step == self._start_step + 1:
            micro_batches = self._flops.before_step(micro_batches, self._training.task_state)
        if self._trace is not None and self._trace.next_after(step) == step:
            self._trace.trace(step, partial(self._training.step, step, micro_batches))
        elif self._sampler is None:
            self._training.step(step, micro_batches)
        elif step == self._start_step:
            self._flops.in_step(step, micro_batches)
        else:
            self._sampler.do_step(step, micro_batches)
        if step == self._start_step:
            self._samples_before = self._training.data.samples_seen(step + 1)
        self.next_step = self._next(step + 1)

    def metrics(self, step: int, samples_per_s: float) -> dict[str, float]:
        """Return the values that change slowly, at most every `LOG_EVERY_S` and on rank zero; collective.

        They are memory, throughput per device, waiting for data, MFU and the slowest rank.

        Args:
            step: completed steps, after which a record is written.
            samples_per_s: over all ranks, since the last record.
        """
        if self._sampler is None:
            return {}
        self._sampler.read_memory(step)
        self._records += 1
        if self._records & (self._records - 1) == 0:
            # the 1st, 2nd, 4th, 8th ... record: often enough to be known early, too rarely to cost anything
            self._gather(step)
        now = self._clock()
        if not self._world.is_rank_zero or now - self._logged_at < LOG_EVERY_S:
            return {}
        self._logged_at = now
        if now - self._written_at >= WRITE_EVERY_S:
            self._write(step)
        per_device = samples_per_s / self._world.num_devices
        values = {
            "throughput/samples_per_s_per_device": per_device,
            "throughput/waiting_for_data": self._sampler.data_share(),
            "memory/peak_gb": self._sampler.memory.peak() / 1e9,
            **self._slowest.take_metrics(),
        }
        mfu = self._flops.mfu(per_device)
        return values if mfu is None else values | {"throughput/mfu": mfu}

    def before_evaluation(self, step: int) -> None:
        """Count an evaluation, and gather the ranks' reports; collective."""
        self._evaluations += 1
        self._gather(step)

    def before_save(self, step: int) -> None:
        """Count a save, and gather the ranks' reports; collective."""
        self._saves += 1
        self._gather(step)

    def finish(self, step: int) -> None:
        """End the attempt after ``step`` completed steps: write the trace, and log the bottleneck on rank zero."""
        if self._trace is not None:
            self._trace.close()
        if self._sampler is None or not self._world.is_rank_zero:
            return
        bottleneck = self._write(step)
        if bottleneck.shares:
            shares = ", ".join(f"{part.replace('_', ' ')} {share:.0%}" for part, share in bottleneck.shares.items())
            log.info("time since the first step: %s", shares)
        log.info("bottleneck: %s", bottleneck.text)
        for line in bottleneck.also:
            log.info("also: %s", line)

    def _next(self, completed: int) -> int:
        candidates = []
        if self._sampler is not None:
            # the attempt's first step goes through `do_step` because FLOPs are counted in it
            first = completed <= self._start_step
            candidates.append(completed if first else max(completed, self._sampler.next_step))
        if self._trace is not None and (traced := self._trace.next_after(completed)) is not None:
            candidates.append(traced)
        return min(candidates, default=-1)

    def _gather(self, step: int) -> None:
        # only where the ranks communicate anyway: an exchange of its own would hold up the fastest rank
        if self._sampler is not None:
            gathered = self._world.gather(asdict(self._sampler.report(step))) or []
            self._reports = [RankReport(**report) for report in gathered]
            self._slowest.add(self._reports)

    def _write(self, step: int) -> Bottleneck:
        self._written_at = self._clock()
        if self._world.size == 1:
            # with several ranks this would be a collective, and only rank zero is here
            self._gather(step)
        measured = self._measurements(step)
        mfu = self._flops.mfu(measured.samples_per_s_per_device)
        bottleneck = find_bottleneck(measured, flops_per_sample=self._flops.per_sample, mfu=mfu)
        # if no step was timed, the previous attempt's file stays the newest one
        if self._times.claim is not None and bottleneck.shares:
            bottleneck.write(self._times.claim)
        return bottleneck

    def _measurements(self, step: int) -> Measurements:
        spent, plan = self._times.spent(), self._training.data.plan
        begun = min(step, self._start_step + 1)
        faster = FORMATS.get(self._training.config.precision.formats.faster)
        return Measurements(
            config=self._training.config,
            world=self._world,
            reports=self._reports,
            step=step,
            steps=step - begun,
            samples=self._training.data.samples_seen(step) - self._samples_before,
            total_steps=self._training.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            train_s=spent.get("train_s", 0.0),
            eval_s=spent.get("eval_s", 0.0) - self._eval_before_s,
            save_s=spent.get("save_s", 0.0),
            evaluations=self._evaluations,
            saves=self._saves,
            agreement_s=self._agreement.waited_s,
            logging_s=self.logging_s,
            num_workers=self._training.data.workers.num_workers,
            more_workers_help=workers_can_help(self._training.data.dataset),
            gradient_bytes=self._gradient_bytes,
            faster_precision="" if faster is None or slow_precision_reason(faster, self._world.device) else faster.kind,
        )


class TorchProfile:
    """Traces the steps from ``first`` to ``last``, counted as metrics.jsonl counts them.

    Args:
        first: first step of the trace.
        last: last step of the trace.
        file: of the trace; TensorBoard's plugin looks for names that end in ``.pt.trace.json``.
        device: on which the steps run.
    """

    def __init__(self, first: int, last: int, file: Path, device: torch.device) -> None:
        self._first = first
        self._last = last
        self._file = file
        self._device = device
        self._profiler: profile | None = None

    def next_after(self, step: int) -> int | None:
        """Return the number of completed steps before the next traced step; None if none follows."""
        return None if step >= self._last else max(step, self._first - 1)

    def trace(self, step: int, do: Callable[[], None]) -> None:
        """Run a step that belongs to the trace, and write the trace after the last one."""
        if self._profiler is None:
            self._profiler = self._start()
        do()
        if step + 1 == self._last:
            self.close()

    def close(self) -> None:
        """Write the trace so far; an error is logged as a warning."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        try:
            self._file.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            log.warning("can't write the trace to %s: %s", self._file, error)
            return
        log.info("a trace of steps %d to %d: %s (ui.perfetto.dev, TensorBoard)", self._first, self._last, self._file)

    def _start(self) -> profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        profiler = profile(activities=activities, record_shapes=True)
        with warnings.catch_warnings():
            # torch 2.11 warns that events are cleared between cycles; this profiler has one cycle. acc_events=True,
            # which the warning suggests, would make stop() parse every event
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            profiler.start()
        return profiler
