from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import CheckpointDamagedError
from hpctrain.run.checkpoint_manifest import ChunkPlace, IndexedTensor, Region, decode_index, encode_index


def indices(region):
    return set(itertools.product(*(range(each.start, each.stop) for each in region.slices())))


def boxes(dimensions):
    numbers = st.tuples(*[st.integers(0, 5)] * dimensions)
    return st.builds(Region, numbers, numbers)


@given(st.integers(0, 3).flatmap(lambda dimensions: st.tuples(boxes(dimensions), boxes(dimensions))))
def test_what_lies_in_both_boxes(pair):
    one, other = pair
    shared = one.intersect(other)
    assert shared == other.intersect(one)
    assert (indices(shared) if shared else set()) == indices(one) & indices(other)
    assert one.numel == len(indices(one))


@given(st.integers(0, 3).flatmap(lambda dimensions: st.tuples(boxes(dimensions), boxes(dimensions))))
def test_offsets_counted_from_the_begin_of_another_box(pair):
    one, outer = pair
    inner = one.intersect(outer)
    if inner is not None:
        relative = inner.relative_to(outer)
        assert relative.intersect(Region.whole(outer.sizes)) == relative
        assert Region(tuple(map(sum, zip(relative.offsets, outer.offsets, strict=True))), relative.sizes) == inner


def test_a_tensor_without_dimensions_has_one_element():
    scalar = Region.whole(())
    assert (scalar, scalar.numel, scalar.slices()) == (Region((), ()), 1, ())
    assert scalar.intersect(scalar) == scalar


def test_boxes_of_different_numbers_of_dimensions_are_a_mistake():
    with pytest.raises(ValueError, match="zip"):
        Region.whole((2, 3)).intersect(Region.whole((2,)))


PLACE = [[0, 2], [2, 3], "__0_0.distcp", 64, 2000, 832]


def test_an_index_is_read_as_it_was_written():
    matrix = IndexedTensor(
        (2, 5),
        "bfloat16",
        (
            ChunkPlace(Region((0, 0), (2, 2)), "__0_0.distcp", 0, 1500, 768),
            ChunkPlace(Region((0, 2), (2, 3)), "__1_0.distcp", 64, 1500, 832),
        ),
    )
    index = {
        "model.b.weight": matrix,
        "model.a.weight": matrix,
        "model.steps": IndexedTensor((), "int64", (ChunkPlace(Region((), ()), "__0_0.distcp", 1536, 1400, 2304),)),
        "model.nothing": IndexedTensor((0, 4), "float32", ()),
    }
    data = encode_index(index)
    assert decode_index(data) == index
    assert encode_index(dict(reversed(index.items()))) == data, "the order of the tensors doesn't matter"


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": ["2", 5]},
        {"shape": [2.5, 5]},
        {"shape": [-2, 5]},
        {"shape": "25"},
        {"dtype": 16},
        {"chunks": None},
        {"chunks": [PLACE[:-1]]},
        {"chunks": [[*PLACE, 1]]},
        {"chunks": [[[0], [2, 3], *PLACE[2:]]]},
        {"chunks": [[[0], [2], *PLACE[2:]]]},
        {"chunks": [[[0, -1], [2, 3], *PLACE[2:]]]},
        {"chunks": [[[0, 3], [2, 3], *PLACE[2:]]]},
        {"chunks": [[*PLACE[:2], 7, *PLACE[3:]]]},
        {"chunks": [[*PLACE[:3], 64, 2000, 63]]},
        {"chunks": [[*PLACE[:3], 64, 2000, 2065]]},
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_damaged(changes):
    record = {"shape": [2, 5], "dtype": "float32", "chunks": [PLACE]}
    assert decode_index(json.dumps({"w": record}).encode())
    with pytest.raises(CheckpointDamagedError, match=r"index.json isn't an index of tensors"):
        decode_index(json.dumps({"w": record | changes}).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"1", b'{"w":', b'{"w":1}', b"[" * 100_000], ids=lambda data: data[:8]
)
def test_what_is_not_a_record_of_tensors_is_damaged(data):
    with pytest.raises(CheckpointDamagedError, match=r"index.json isn't an index of tensors"):
        decode_index(data)
