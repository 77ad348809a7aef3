from __future__ import annotations

import hashlib

import pytest
import torch

from hpctrain.checkpoint.digest import weights_digest


def test_the_digest_is_the_documented_one():
    state = {"b": torch.tensor([1.0, -2.0]), "a.bias": torch.tensor(3, dtype=torch.int64)}
    expected = hashlib.sha256(
        b"a.bias\0int64\0\0" + (3).to_bytes(8, "little") + b"b\0float32\x002\0" + bytes.fromhex("0000803f000000c0")
    )
    assert weights_digest(state) == expected.hexdigest()


def test_bfloat16_goes_in_by_its_own_bytes():
    expected = hashlib.sha256(b"w\0bfloat16\x001,2\0" + bytes.fromhex("803f00c0"))
    assert weights_digest({"w": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)}) == expected.hexdigest()


def test_layout_and_order_don_t_count():
    weight = torch.randn(3, 4)
    plain = weights_digest({"x": weight, "y": weight[:, 1]})
    assert weights_digest({"y": weight[:, 1].clone(), "x": weight.t().contiguous().t()}) == plain


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(2, 3)},
        {"w": torch.zeros(3, 2)},
        {"w": torch.zeros(6)},
        {"w": torch.zeros(2, 3, dtype=torch.float64)},
        {"w": torch.zeros(2, 3, dtype=torch.int32)},
        {"w": -torch.zeros(2, 3)},
        {"w": torch.zeros(2, 3), "x": torch.zeros(0)},
        {},
    ],
    ids=["name", "shape", "rank", "size", "kind", "sign bit", "one more", "none"],
)
def test_whatever_differs_shows(other):
    assert weights_digest(other) != weights_digest({"w": torch.zeros(2, 3)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,)])
def test_every_dense_dtype_and_shape_has_one(dtype, shape):
    assert len(weights_digest({"w": torch.zeros(shape, dtype=dtype)})) == 64


def test_extra_state_is_passed_over():
    assert weights_digest({"w": torch.ones(2), "_extra_state": {"a": 1}}) == weights_digest({"w": torch.ones(2)})
