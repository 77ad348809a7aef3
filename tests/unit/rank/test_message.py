from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.rank.message import DTYPES, decode, encode


@pytest.mark.parametrize("value", [None, True, 0.1 + 0.2, "a", ["n1", {"a/b": 1.5, "c": None}], {"tensor": "a word"}])
def test_values_arrive_as_they_were(value):
    assert decode(encode(value)) == value


def test_a_tuple_arrives_as_a_list():
    assert decode(encode(("n1", (2, None)))) == ["n1", [2, None]]


def test_random_states_arrive_to_the_bit():
    state = rng_state()
    expected = torch.rand(3)
    arrived = decode(encode([state]))[0]
    restore_rng(arrived)
    assert torch.equal(torch.rand(3), expected)
    assert arrived["numpy"]["key"].dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_an_empty_tensor_arrives(dtype):
    arrived = decode(encode(torch.empty(0, dtype=dtype)))
    assert (arrived.numel(), arrived.dtype) == (0, dtype)


@pytest.mark.parametrize("value", [Path("a"), {1, 2}, torch.zeros(2, 2), torch.zeros(2), object()])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="expected a value of JSON's types"):
        encode(value)


@pytest.mark.parametrize("value", [{1: 2}, [({"a": {None: 1}},)]])
def test_keys_that_would_arrive_as_strings_are_refused(value):
    with pytest.raises(TypeError, match=r"expected keys that are strings, got (1|None)"):
        encode(value)


@pytest.mark.parametrize(
    "record", [{"tensor": "AA==", "dtype": "float64"}, {"tensor": 1, "dtype": "uint8"}, {"tensor": "", "dtype": []}]
)
def test_a_malformed_tensor_is_refused(record):
    data = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"expected the data of a tensor, and one of uint8, int64, got \{"):
        decode(data)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle from another rank was executed",))


def test_a_pickle_is_not_opened():
    data = torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"codec can't decode|Expecting value"):
        decode(data)
