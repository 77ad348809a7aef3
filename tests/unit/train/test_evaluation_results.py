from __future__ import annotations

import pytest
import torch

from hpctrain.errors import TaskError
from hpctrain.train.evaluation_results import Gathering


@pytest.fixture
def gathering(lone_world):
    return Gathering("Mine.evaluate", lone_world)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.int64, torch.complex64]
)
def test_values_of_any_type_and_shape_come_back_in_order(gathering, dtype):
    values = torch.arange(12).reshape(3, 2, 2).to(dtype)
    ragged = [torch.arange(6).reshape(3, 2).to(dtype), torch.ones(0, 5, dtype=dtype), torch.ones(1, 1, dtype=dtype)]
    gathering.add(0, 2, {"values": values[:2], "ragged": ragged[:2]})
    gathering.add(3, 1, {"values": values[2:], "ragged": ragged[2:]})
    found = gathering.gather(interleaved=False)
    assert torch.equal(found["values"], values)
    assert [each.tolist() for each in found["ragged"]] == [each.tolist() for each in ragged]
    assert [each.shape for each in found["ragged"]] == [each.shape for each in ragged]
    assert {each.dtype for each in [found["values"], *found["ragged"]]} == {dtype}


def test_values_without_an_element_still_have_their_samples(gathering):
    gathering.add(0, 2, {"values": torch.ones(2, 0), "ragged": [torch.ones(0)] * 2})
    found = gathering.gather(interleaved=True)
    assert found["values"].shape == (2, 0)
    assert len(found["ragged"]) == 2


def test_nothing_is_gathered_from_nothing(gathering):
    gathering.add(0, 2, {})
    assert gathering.gather(interleaved=False) == {}


def test_a_later_change_of_a_batch_is_not_seen_and_a_view_does_not_keep_the_whole(gathering):
    logits = torch.ones(2, 1000)
    gathering.add(0, 2, {"score": logits[:, 0]})
    logits.zero_()
    assert gathering.num_bytes == 8
    (kept,) = [tensor for _, tensor in gathering._pending]
    assert kept.untyped_storage().nbytes() == 8
    assert gathering.gather(interleaved=False)["score"].tolist() == [1, 1]


def test_it_counts_the_bytes(gathering):
    gathering.add(0, 25, {"x": torch.ones(25)})
    gathering.add(1, 1, {"x": torch.ones(1)})
    assert gathering.num_bytes == 104


@pytest.mark.parametrize(
    ("first", "later", "problem"),
    [
        ({"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}, r"have shape \[3\], and later shape \[4\]: return a list"),
        ({"x": torch.ones(2, 3)}, {"x": [torch.ones(3)] * 2}, r"have shape \[3\], and later tensors"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2).long()}, "have torch.float32 .*, and later torch.int64 with 1"),
        (
            {"x": [torch.ones(1)] * 2},
            {"x": [torch.ones(1), torch.ones(1, 1)]},
            "with 1 dim.*, and later torch.float32 with 2",
        ),
        ({"x": torch.ones(2)}, {}, "must return the same PerSample for every batch: x, and later none"),
        ({}, {"x": torch.ones(2)}, "must return the same PerSample for every batch: none, and later x"),
    ],
)
def test_batches_that_differ_are_refused(gathering, first, later, problem):
    gathering.add(0, 2, first)
    with pytest.raises(TaskError, match=rf"^Mine\.evaluate.* {problem}"):
        gathering.add(1, 2, later)
