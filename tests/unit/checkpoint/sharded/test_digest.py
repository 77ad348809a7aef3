from __future__ import annotations

import itertools
import math
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.sharded.digest import MODULUS, combine_sums, partial_sums

TYPES = ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64", "complex128"]


def sums(chunks):
    return tuple(sum(lane) % MODULUS for lane in zip(*map(partial_sums, chunks), strict=True))


def splitmix64(state):
    """As in the public-domain splitmix64.c by Vigna, its state counted in steps."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % MODULUS
    return state ^ (state >> 31)


def key(lane, axis, index):
    seed = lane * 0x632BE59BD9B4E019 + axis * 0x8CB92BA72F3D8DD7
    return splitmix64((seed + (index + 1) * 0x9E3779B97F4A7C15) % MODULUS) | 1


def by_hand(tensor):
    """The two sums as the module defines them, element by element."""
    word = min(tensor.element_size(), 4)
    words = (tensor if tensor.dim() else tensor.reshape(1)).contiguous()
    shape = (*words.shape, *((words.element_size() // word,) if words.element_size() > word else ()))
    raw = words.reshape(-1).view(torch.uint8).numpy().tobytes()
    numbers = [int.from_bytes(raw[begin : begin + word], "little") for begin in range(0, len(raw), word)]
    places = list(itertools.product(*map(range, shape)))
    return tuple(
        sum(
            number * math.prod(key(lane, axis, index) for axis, index in enumerate(place))
            for number, place in zip(numbers, places, strict=True)
        )
        % MODULUS
        for lane in range(2)
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 2, 2)], ids=str)
def test_the_sums_are_those_of_the_definition(values, cut, shape, dtype):
    tensor = values(shape, dtype)
    assert partial_sums(cut("w", tensor)[0]) == by_hand(tensor)


def test_the_keys_begin_as_those_of_splitmix64():
    """With the seed 1234567, as in the examples at rosettacode.org; an even one only without its last bit."""
    golden = 0x9E3779B97F4A7C15
    assert [splitmix64((1234567 + step * golden) % MODULUS) for step in (1, 2)] == [
        6457827717110365317,
        3203168211198807973,
    ]


@given(st.data())
def test_any_cut_has_the_same_sums(values, cut, data):
    shape = data.draw(st.lists(st.integers(0, 12), max_size=4).map(tuple))
    tensor = values(shape, data.draw(st.sampled_from(TYPES)))
    edges = [data.draw(st.lists(st.integers(0, size), max_size=3).map(sorted)) for size in shape]
    tensor_of_strides = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    assert sums(cut("w", tensor_of_strides, *edges)) == sums(cut("w", tensor))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_part_of_one_element_has_any_stride(values, cut, dtype):
    tensor = values((3, 4), dtype)
    by_columns = tensor.mT.contiguous().mT
    assert sums(cut("w", by_columns, [1, 2], [1, 2, 3])) == sums(cut("w", tensor))


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
@pytest.mark.parametrize("shape", [(300_000,), (3, 200_001), (2, 3, 140_000), (70_000, 4), (150, 300, 3, 3)], ids=str)
def test_tensors_of_many_blocks_have_the_sums_of_their_parts(values, cut, shape, dtype):
    tensor = values(shape, dtype)
    halves = cut("w", tensor, *([size // 2] for size in shape))
    assert sums(halves) == sums(cut("w", tensor))


@pytest.mark.parametrize("shape", [(8_000_000,), (2_000_000, 4), (2, 4_000_000), (2000, 4000)], ids=str)
def test_sums_take_little_memory_whatever_the_shape(cut, shape):
    tensor = torch.zeros(shape, dtype=torch.uint8)
    tracemalloc.start()
    partial_sums(cut("w", tensor)[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "complex128"])
def test_signs_that_change_in_pairs_are_seen(values, cut, dtype):
    """The highest bit of a word of eight bytes would count the same in each place, so that two of them cancel out."""
    tensor = values((4, 6), dtype)
    two, exchanged = tensor.clone(), tensor.clone()
    two[0, 1], two[2, 3] = -tensor[0, 1], -tensor[2, 3]
    exchanged[0, 0] = -tensor[3, 5]
    exchanged[3, 5] = tensor[3, 5]
    swapped = exchanged.clone()
    swapped[0, 0], swapped[3, 5] = exchanged[3, 5], exchanged[0, 0]
    found = [sums(cut("w", each)) for each in (tensor, -tensor, two, exchanged, swapped)]
    if tensor.is_complex():
        found.append(sums(cut("w", tensor.conj())))
    for lane in range(2):
        assert len({each[lane] for each in found}) == len(found)


@given(st.data())
def test_one_flipped_bit_changes_both_sums(values, cut, data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    tensor = values(shape, data.draw(st.sampled_from([one for one in TYPES if one != "bool"])))
    changed = tensor.clone().reshape(-1).view(torch.uint8)
    changed[data.draw(st.integers(0, changed.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    before, after = sums(cut("w", tensor)), sums(cut("w", changed.view(tensor.dtype).reshape(shape)))
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_the_digest_covers_name_type_and_shape():
    forms = {"w": ((2, 3), "float32", (1, 2))}
    others = [
        {"v": ((2, 3), "float32", (1, 2))},
        {"w": ((3, 2), "float32", (1, 2))},
        {"w": ((2, 3), "int32", (1, 2))},
        {"w": ((2, 3), "float32", (2, 1))},
        {**forms, "x": ((0,), "float32", (0, 0))},
        {},
    ]
    assert len({combine_sums(each) for each in (forms, *others)}) == 1 + len(others)
    assert combine_sums({"a": forms["w"], "b": forms["w"]}) == combine_sums({"b": forms["w"], "a": forms["w"]})


def test_the_digest_is_that_of_every_version(cut):
    """Checkpoints keep it for years."""
    tensors = {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "b": torch.arange(3, dtype=torch.bfloat16),
        "steps": torch.tensor(-7),
    }
    found = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), sums(cut(name, tensor)))
        for name, tensor in tensors.items()
    }
    assert combine_sums(found) == "sum128:caaa59b3640591032df18dcf5c64823a3a80c9dfec2a1d08fa31fe6342adb391"
