"""Floating-point operations: those of a sample, the peak of a device, and the share of the peak that is used."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hpctrain.data.micro_batch import MicroBatch, map_tensors
from hpctrain.data.plan import BatchPlan
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.trial_pass import OperatorMode, training_pass_undone
from hpctrain.phrases import scaled
from hpctrain.rank.compiler import is_any_compiled, uncompiled
from hpctrain.train.step import TrainStep
from hpctrain.train.task_state import TaskState

Formula = Callable[..., int]

log = logging.getLogger("hpctrain.train")

TRIAL_SAMPLES = 2
"""Samples in the trial; batch norm refuses a batch of one."""
_COLUMNS = {"bf16": 0, "fp16": 0, "tf32": 1, "fp32": 2}
"""The column of `PEAKS` for each format of matrix products."""
PEAKS: tuple[tuple[tuple[float, float | None, float], tuple[str, ...]], ...] = (
    ((2250.0, 1125.0, 75.0), ("B200",)),
    ((989.4, 494.7, 66.9), ("H200", "GH200 480GB", "GH200 120GB", "GH200 144G HBM3e", "H100 80GB HBM3")),
    ((835.5, 417.5, 60.0), ("H100 NVL", "H200 NVL")),
    ((756.5, 378.0, 51.2), ("H100 PCIe",)),
    ((311.9, 155.9, 19.5), ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-SXM-80GB", "A100-PCIE-40GB", "A100 80GB PCIe")),
    ((149.7, 74.8, 37.4), ("A40",)),
    ((124.9, 62.4, 31.2), ("A10",)),
    ((362.1, 183.2, 91.6), ("L40S",)),
    ((121.0, 60.2, 30.3), ("L4",)),
    ((154.8, 77.4, 38.7), ("RTX A6000",)),
    ((165.2, 82.6, 82.6), ("GeForce RTX 4090",)),
    ((71.2, 35.6, 35.6), ("GeForce RTX 3090",)),
    ((125.0, None, 15.7), ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB")),
    ((112.0, None, 14.0), ("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB")),
    ((65.1, None, 8.1), ("Tesla T4",)),
    ((1307.4, 653.7, 163.4), ("AMD Instinct MI300X",)),
)
"""Dense peaks in TFLOP/s, and the devices that have them. In this order: half precision accumulated in fp32 (bf16; fp16
on V100 and T4), TF32 (None where the device has none), fp32 without tensor cores.

Names must match exactly, without "NVIDIA", which older drivers leave out. A longer name is that of a different card
(A10G, RTX 3090 Ti), or of a slice of a GPU (A100-SXM4-40GB MIG 1g.5gb).

From the makers' data sheets; figures with structured sparsity are halved. NVIDIA's for DGX B200, H100, H200, GH200,
A100, A40, A10, L40S, L4, V100 and T4; the RTX A6000, GA102 and Ada white papers; AMD's for MI300X.
"""
_PEAKS_BY_NAME = {name: peaks for peaks, names in PEAKS for name in names}


def peak_flops(name: str, products: str) -> float | None:
    """Return a device's peak in FLOP/s; None if it isn't known.

    Args:
        name: as `torch.cuda.get_device_name` returns it.
        products: the format of matrix products: `fp32`, `tf32`, `bf16` or `fp16`.
    """
    column = _COLUMNS[products]
    peaks = _PEAKS_BY_NAME.get(name.removeprefix("NVIDIA "))
    peak = None if peaks is None else peaks[column]
    return None if peak is None else peak * 1e12


class FlopCountMode(OperatorMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Count the floating-point operations of matrix products, convolutions and attention inside a ``with`` block.

    The formulas are those of `torch.utils.flop_counter`, a multiplication and an addition being two; attention on the
    CPU and grouped-query attention are added, causal attention counts in full. Activation checkpointing computes twice,
    and is counted twice. An operator without a formula isn't counted (flex_attention has none in torch 2.11), nor is
    one inside of torch.cond and its like. The operators' results don't change, and counting doesn't raise.

    Attributes:
        total: FLOPs so far; None after a formula failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total: int | None = 0
        self._formulas = _formulas()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count its FLOPs."""
        kwargs = kwargs or {}
        kinds = {kind.__name__ for kind in types}
        if "DTensor" in kinds:
            # torch then calls this again with the part that this rank computes
            return NotImplemented
        result = func(*args, **kwargs)
        if "FakeTensor" in kinds:
            # DTensor's, when it first finds out the shape of a result
            return result
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None and self.total is not None:
            try:
                self.total += formula(*args, **kwargs, out_val=result)
            except Exception as error:  # an error of a formula on unusual tensors must not end the step
                self.total = None
                log.info("FLOPs are not counted: torch's formula for %s fails: %s", func, error)
        return result


def _formulas() -> dict[Any, Formula]:
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    def with_heads_of(query: Any, *keys: Any) -> Iterator[tuple[int, ...]]:
        # torch 2.11's formulas refuse keys and values with fewer heads than the queries (GQA)
        return ((*key.shape[:1], query.shape[1], *key.shape[2:]) for key in keys)

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, *with_heads_of(query, key, value)))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        shapes = gradient.shape, query.shape, *with_heads_of(query, key, value)
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    formulas: dict[Any, Formula] = dict(flop_registry)
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = attention
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = attention_backward
    return formulas


class FlopCounter:
    """Counts the FLOPs of a sample, forward and backward, once per run.

    They are counted in a step of the training: a pass of its own would delay the first step, and call the task's code
    once more than training does. A compiled model hides its operators, and so do nn.DataParallel's
    threads; and a turn may take part in a few steps only. In these cases, two samples go through the model itself,
    uncompiled, before a step (`by_trial`). Where ranks compute different amounts, nothing is counted.

    Args:
        step: of the training.
        plan: the batch arithmetic.
        world: the ranks.
        products: the format of matrix products, which decides the peak.
        per_sample: as counted by an earlier attempt; None without one.

    Attributes:
        per_sample: FLOPs per sample, forward and backward; None until they are known.
        by_trial: whether `before_step` counts, which is collective, and not `in_step`.
    """

    def __init__(
        self, step: TrainStep, plan: BatchPlan, world: TrainingWorld, products: str, per_sample: float | None
    ) -> None:
        self._step = step
        self._plan = plan
        self._world = world
        self.per_sample = per_sample
        hidden = hides_operators(step) or any(turn.every_steps > 1 for turn in step.turns)
        self._is_possible = step.turns[0].module.replica.counts_flops
        self.by_trial = hidden and self._is_possible
        self._peak: float | None = None
        if world.device.type == "cuda":
            self._peak = peak_flops(torch.cuda.get_device_name(world.device), products)

    def in_step(self, step: int, micro_batches: Iterator[MicroBatch]) -> None:
        """Do a step, and count it on rank zero if its FLOPs aren't known yet; collective."""
        if self.by_trial or self.per_sample is not None or not (self._world.is_rank_zero and self._is_possible):
            self._step(step, micro_batches)
            return
        sizes: list[int] = []
        with FlopCountMode() as count:
            self._step(step, _record_sizes(micro_batches, sizes))
        # ranks that compute layers together have the same samples, and this one counts its part
        num_samples, together = sum(sizes), self._world.share.num_together
        self._record((count.total or 0) * together / num_samples if num_samples else None)

    def before_step(self, micro_batches: Iterator[MicroBatch], task_state: TaskState) -> Iterator[MicroBatch]:
        """Count with the first samples of the next micro-batch; collective.

        Args:
            micro_batches: of this rank.
            task_state: of the task, which the counting leaves as it is.

        Returns:
            The same micro-batches.
        """
        first = next(micro_batches)
        with task_state.restored():
            flops = flops_by_trial(self._step, first, self._world)
        self._record(None if flops is None else flops * self._world.share.num_together)
        return itertools.chain([first], micro_batches)

    def mfu(self, samples_per_s_per_device: float) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B); None if FLOPs or peak aren't known."""
        if self.per_sample is None or self._peak is None:
            return None
        return self.per_sample * samples_per_s_per_device / self._peak

    def _record(self, per_sample: float | None) -> None:
        self.per_sample = per_sample or None
        if self.per_sample is not None and self._world.is_rank_zero:
            log.info("%-12s%s", "flops", flops_text(self.per_sample, self._plan.global_batch_size))


def hides_operators(step: TrainStep) -> bool:
    """Whether the model hides its operators from `FlopCountMode`: compiled in part, or in nn.DataParallel's threads."""
    replica = step.turns[0].module.replica
    return replica.in_threads or is_any_compiled(replica.model)


def _record_sizes(micro_batches: Iterator[MicroBatch], sizes: list[int]) -> Iterator[MicroBatch]:
    """Yield the same micro-batches, and note how many samples each of them holds."""
    for micro_batch in micro_batches:
        sizes.append(_num_samples(micro_batch))
        yield micro_batch


def _num_samples(micro_batch: MicroBatch) -> int:
    return micro_batch.num_samples if micro_batch.weight is None else micro_batch.num_delivered


def flops_by_trial(step: TrainStep, micro_batch: MicroBatch, world: TrainingWorld) -> float | None:
    """Count the FLOPs per sample, forward and backward, of a few samples in the uncompiled model; collective.

    Weights, buffers, gradients and random state don't change. It is collective because a task's loss may be.

    Args:
        step: of the training.
        micro_batch: whose first samples are taken.
        world: the ranks.

    Returns:
        FLOPs; None if a rank has no samples, or if the model or the task fails on so few.
    """
    model = step.turns[0].module.replica.model
    size = _num_samples(micro_batch)
    # the same number everywhere: a rank whose batch is empty would leave the others alone in their collectives
    few = int(world.combine_(torch.tensor(min(TRIAL_SAMPLES, size)), "min"))
    if not few:
        return None
    batch = map_tensors(
        lambda tensor: tensor[:few] if tensor.ndim and len(tensor) == size else tensor,
        micro_batch.batch,
    )
    total = 0.0
    try:
        with uncompiled(), training_pass_undone(model, world, compiled=False):
            for turn in step.turns:
                with FlopCountMode() as count, turn.module.gradients_required():
                    samples = micro_batch._replace(batch=batch, num_samples=few)
                    compute = partial(turn.compute_unlogged, micro_batch=samples)
                    turn.module.replica.try_gradients(compute, turn.module.unfrozen)
                total += (count.total or 0) / turn.every_steps
    except Exception as error:  # a user's code may fail on two samples alone; that must not end the run
        log.info("FLOPs are not counted: the model fails on %s samples alone (%s)", few, error)
        return None
    return total / few or None


def flops_text(flops_per_sample: float, global_batch_size: int) -> str:
    """Format as ``1.3 TFLOP per step, 20.2 GFLOP per sample, forward and backward``."""
    step, sample = scaled(flops_per_sample * global_batch_size, "FLOP"), scaled(flops_per_sample, "FLOP")
    return f"{step} per step, {sample} per sample, forward and backward"
