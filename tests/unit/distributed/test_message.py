from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.distributed.message import decode, encode


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


def test_an_empty_tensor_arrives():
    assert decode(encode(torch.empty(0, dtype=torch.uint8))).numel() == 0


@pytest.mark.parametrize("value", [Path("a"), {1, 2}, torch.zeros(2, 2), torch.zeros(2), object()])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="expected a value of JSON's types"):
        encode(value)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle from another rank was executed",))


def test_a_pickle_is_not_opened():
    data = torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"codec can't decode|Expecting value"):
        decode(data)
