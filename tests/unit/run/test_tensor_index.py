from __future__ import annotations

import json

import pytest

from hpctrain.errors import CheckpointDamagedError
from hpctrain.run.region import Region
from hpctrain.run.tensor_index import ChunkPlace, IndexedTensor, decode_index, encode_index

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
