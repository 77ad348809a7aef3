"""The schedule of a pipeline: the passes of a step in the order in which a rank computes them."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """The forward or the backward pass of one micro-batch through one stage.

    Attributes:
        is_forward: whether it is the forward pass.
        local_stage: which of the rank's stages, from 0 for the one nearest to the model's first layers.
        micro_batch: of the step, from 0.
    """

    is_forward: bool
    local_stage: int
    micro_batch: int


def passes_of(position: int, degree: int, stages_per_rank: int, num_micro_batches: int) -> list[Pass]:
    """Return the passes of one step in their order: 1F1B, or interleaved 1F1B with several stages per rank.

    After some forward passes, each further one is followed by a backward pass, so that a rank keeps the activations of
    a few micro-batches only. The orders are those of `Schedule1F1B` and `ScheduleInterleaved1F1B` of
    torch.distributed.pipelining (Narayanan et al. 2021), but for any number of micro-batches. Zero-bubble schedules
    divide the backward pass by private functions of torch, and aren't used.

    Args:
        position: of the rank in the pipeline, from 0 for the model's first layers.
        degree: number of positions.
        stages_per_rank: number of stages of each rank.
        num_micro_batches: of this step.
    """
    total = stages_per_rank * num_micro_batches
    behind = degree - 1 - position
    at_once = num_micro_batches // _rounds(degree, num_micro_batches)
    # micro-batches pass through all stages of the ranks before the first of them comes back
    ahead = behind if stages_per_rank == 1 else (stages_per_rank - 1) * at_once + 2 * behind
    ahead = min(ahead, total)
    forward = [Pass(True, *place) for place in _places(stages_per_rank, num_micro_batches, at_once)]
    backward = [
        Pass(False, stages_per_rank - 1 - stage, micro_batch)
        for stage, micro_batch in _places(stages_per_rank, num_micro_batches, at_once)
    ]
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *(step_pass for pair in pairs for step_pass in pair), *backward[total - ahead :]]


def _rounds(degree: int, num_micro_batches: int) -> int:
    """The number of equal groups of micro-batches that pass through one stage of each rank before the next stage."""
    max_rounds = max(1, num_micro_batches // degree)
    return next(rounds for rounds in range(max_rounds, 0, -1) if num_micro_batches % rounds == 0)


def _places(stages_per_rank: int, num_micro_batches: int, at_once: int) -> list[tuple[int, int]]:
    """Stage and micro-batch of all passes in one direction, in the order in which a rank computes them."""
    return [
        (stage, micro_batch)
        for begin in range(0, num_micro_batches, at_once)
        for stage in range(stages_per_rank)
        for micro_batch in range(begin, begin + at_once)
    ]
