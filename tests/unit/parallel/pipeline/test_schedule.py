"""The order of the passes of a pipeline."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from hpctrain.parallel.pipeline.schedule import Pass, passes_of

GRID = [
    (degree, stages, micro_batches)
    for degree in (1, 2, 3, 4, 5)
    for stages in (1, 2, 3)
    for micro_batches in (1, 2, 3, 4, 7, 8, 9, 12)
]


def _of_torch(order: Any, position: int, degree: int) -> list[Pass]:
    return [
        Pass(action.computation_type.name == "FORWARD", action.stage_index // degree, action.microbatch_index)
        for action in order[position]
        if action is not None
    ]


class _RecordingStage:
    """A stage that computes nothing, and records what `Schedule1F1B` asks of it."""

    def __init__(self, position: int, degree: int) -> None:
        self.passes: list[Pass] = []
        self.stage_index, self.num_stages, self.is_last = position, degree, False

    def forward_one_chunk(self, micro_batch: int, *_: object, **__: object) -> None:
        self.passes.append(Pass(True, 0, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: object) -> None:
        self.passes.append(Pass(False, 0, micro_batch))

    def perform_reduce_grad(self, _: int) -> None:
        """Nothing to reduce."""

    def release_fwd_send_outputs(self, _: int) -> None:
        """torch 2.15 frees them; there are none."""

    def get_fwd_recv_ops(self, _: int) -> list[object]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


@pytest.mark.parametrize(("degree", "micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_one_stage_per_rank_has_the_order_of_torchs_1f1b(degree: int, micro_batches: int) -> None:
    for position in range(degree):
        stage: Any = _RecordingStage(position, degree)
        schedule = Schedule1F1B(stage, micro_batches, loss_fn=None)
        schedule._stage_forward_initialized = True
        schedule._step_microbatches()
        assert passes_of(position, degree, 1, micro_batches) == stage.passes


@pytest.mark.parametrize(
    ("degree", "stages", "micro_batches"), [(2, 2, 4), (2, 3, 6), (4, 2, 8), (4, 2, 3), (4, 2, 10)]
)
def test_several_stages_per_rank_have_the_order_of_torchs_interleaved_1f1b(
    degree: int, stages: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PipelineScheduleMulti, "_validate_and_set_stage_mapping", lambda *_: None)
    monkeypatch.setattr(ScheduleInterleaved1F1B, "_prepare_schedule_with_comms", lambda *_: None)
    stage = SimpleNamespace(group_size=degree, group_rank=0, num_stages=degree * stages)
    order = ScheduleInterleaved1F1B([stage] * stages, micro_batches).pipeline_order  # type: ignore[list-item]  # a form of a stage
    for position in range(degree):
        assert passes_of(position, degree, stages, micro_batches) == _of_torch(order, position, degree)


@pytest.mark.parametrize(("degree", "stages", "micro_batches"), GRID)
def test_each_pass_finds_what_it_needs_at_the_head_of_its_queue(degree: int, stages: int, micro_batches: int) -> None:
    """Ranks that send without waiting, and receive in their own order, never wait for one another in a circle."""
    orders = [deque(passes_of(position, degree, stages, micro_batches)) for position in range(degree)]
    assert all(
        sorted(order)
        == sorted(Pass(way, s, m) for way in (True, False) for s in range(stages) for m in range(micro_batches))
        for order in orders
    )
    last = degree * stages - 1
    sent: dict[tuple[bool, int], deque[tuple[int, int]]] = {
        (way, position): deque() for way in (True, False) for position in range(degree)
    }
    done = [set[Pass]() for _ in range(degree)]
    moved = True
    while moved:
        moved = False
        for position, order in enumerate(orders):
            while order:
                each = order[0]
                stage = each.local_stage * degree + position
                needs = stage > 0 if each.is_forward else stage < last
                queue = sent[each.is_forward, position]
                if needs and not queue:
                    break
                if needs:
                    assert queue.popleft() == (stage, each.micro_batch)
                if not each.is_forward:
                    assert Pass(True, each.local_stage, each.micro_batch) in done[position]
                step = 1 if each.is_forward else -1
                if 0 <= stage + step <= last:
                    sent[each.is_forward, (position + step) % degree].append((stage + step, each.micro_batch))
                done[position].add(order.popleft())
                moved = True
    assert not any(orders)


def test_a_rank_keeps_few_micro_batches() -> None:
    for position in range(4):
        kept = most = 0
        for each in passes_of(position, 4, 1, 32):
            kept += 1 if each.is_forward else -1
            most = max(most, kept)
        assert most == 4 - position
