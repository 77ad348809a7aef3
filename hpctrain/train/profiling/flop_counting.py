"""How many floating-point operations a sample takes, counted once per run, and what share of the peak that makes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import torch

from hpctrain.data.loader import MicroBatch
from hpctrain.data.plan import BatchPlan
from hpctrain.distributed.world import World
from hpctrain.train.profiling.flop_trial import flops_by_trial, is_compiled
from hpctrain.train.profiling.flops import FlopCount, flops_text, peak_flops
from hpctrain.train.step import TrainStep

log = logging.getLogger("hpctrain.train")


class FlopCounting:
    """Counts in a step that is done anyway, or, where the model is compiled, in a trial before one.

    Args:
        step: of the training.
        plan: the batch arithmetic.
        world: the ranks.
        precision: the kind, which decides the peak.
        per_sample: as an earlier attempt counted; None where there was none.

    Attributes:
        per_sample: FLOPs, forward and backward; None as long as they aren't known.
        by_trial: whether they are counted before a step, by all ranks, since a compiled model hides its operators.
    """

    def __init__(
        self, step: TrainStep, plan: BatchPlan, world: World, precision: str, per_sample: float | None
    ) -> None:
        self._step, self._plan, self._world = step, plan, world
        self.per_sample, self.by_trial = per_sample, is_compiled(step)
        self._peak: float | None = None
        if world.device.type == "cuda":
            self._peak = peak_flops(torch.cuda.get_device_name(world.device), precision)

    def in_step(self, step: int, micro_batches: Iterator[MicroBatch]) -> None:
        """Do a step, and count on rank zero what isn't known yet; collective."""
        if self.by_trial or self.per_sample is not None or not self._world.is_rank_zero:
            self._step(step, micro_batches)
            return
        with FlopCount() as count:
            self._step(step, micro_batches)
        self._tell((count.total or 0) * self._world.size / self._plan.step_samples(step))

    def before_step(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Count with samples of the next micro-batch; collective.

        Returns:
            The same micro-batches.
        """
        first = next(micro_batches)
        self._tell(flops_by_trial(self._step, first, self._world))
        return itertools.chain([first], micro_batches)

    def mfu(self, samples_per_s_per_device: float) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B); None where FLOPs or peak aren't known."""
        if self.per_sample is None or self._peak is None:
            return None
        return self.per_sample * samples_per_s_per_device / self._peak

    def _tell(self, per_sample: float | None) -> None:
        self.per_sample = per_sample or None
        if self.per_sample is not None and self._world.is_rank_zero:
            log.info("%-12s%s", "flops", flops_text(self.per_sample, self._plan.global_batch_size))
