"""Files that hpctrain writes as a stream are those that the package writes at once."""

from __future__ import annotations

import contextlib

import pytest
import torch
from safetensors import SafetensorError, TensorSpec
from safetensors.torch import load_file, save

from hpctrain.checkpoint import weight_stream
from hpctrain.checkpoint.stored_tensor import StoredTensor
from hpctrain.checkpoint.weight_stream import WeightStream, write_safetensors
from hpctrain.errors import CheckpointError


@pytest.fixture
def write(tmp_path):
    """Write tensors, count the bytes that are reported, and return the file."""

    def write(tensors, dtype=None):
        path = tmp_path / "model.safetensors"
        counts = []
        streams = {name: WeightStream(StoredTensor.of(tensor), dtype) for name, tensor in tensors.items()}
        write_safetensors(path, streams, counts.append)
        assert sum(counts) == sum(stream.nbytes for stream in streams.values())
        return path

    return write


def every_type():
    """A tensor of each type of torch that the package has."""
    bits = torch.arange(48, dtype=torch.uint8)
    tensors = {}
    for kind in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(kind).removeprefix("torch.")
        with contextlib.suppress(SafetensorError):
            TensorSpec(dtype=name, shape=(0,), data_ptr=0, data_len=0)
            # the package refuses tensors that share memory
            tensors[f"z{name}"] = bits > 9 if kind == torch.bool else bits.clone().view(kind)
    assert len(tensors) >= 18
    return tensors


ODD = {
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "view": torch.arange(10.0)[::3],
    "transposed": torch.randn(3, 7).t(),
    "axes of one": torch.randn(1, 1, 9, 2),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    'näme\n"': torch.ones(1),
    "half": torch.randn(31).half(),
}


@pytest.mark.parametrize("tensors", [every_type(), ODD, {}], ids=["types", "shapes", "none"])
@pytest.mark.parametrize("piece", [64 << 20, 24, 1])
def test_the_file_is_that_of_the_package(write, monkeypatch, tensors, piece):
    monkeypatch.setattr(weight_stream, "PIECE_BYTES", piece)
    plain = {name: tensor.resolve_conj().contiguous() for name, tensor in tensors.items()}
    assert write(tensors).read_bytes() == save(plain, metadata={"format": "pt"})


def test_each_name_of_a_tied_weight_has_its_bytes(write):
    weight = torch.randn(4, 3)
    found = load_file(write({"a": weight, "b": weight, "c": weight[:2]}))
    assert found.keys() == {"a", "b", "c"}
    assert torch.equal(found["b"], weight)
    assert torch.equal(found["c"], weight[:2])


def test_floating_point_tensors_are_converted_and_others_are_not(write):
    tensors = {"w": torch.randn(5, 3), "double": torch.randn(3).double(), "n": torch.tensor(7), "m": torch.ones(3) > 0}
    found = load_file(write(tensors, torch.bfloat16))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "w": torch.bfloat16,
        "double": torch.bfloat16,
        "n": torch.int64,
        "m": torch.bool,
    }
    assert torch.equal(found["w"], tensors["w"].bfloat16())
    assert found["n"] == 7


@pytest.mark.parametrize(
    ("value", "kind", "overflows"),
    [
        (7e4, torch.float16, True),
        (6e4, torch.float16, False),
        (float("inf"), torch.float16, False),
        (float("nan"), torch.float16, False),
        (3e38, torch.bfloat16, False),
    ],
)
def test_what_becomes_infinite_is_known(value, kind, overflows):
    stream = WeightStream(StoredTensor.of(torch.tensor([1.0, value])), kind)
    assert [len(piece) for piece in stream.pieces()] == [4]
    assert stream.overflows is overflows


def test_a_type_that_the_format_lacks(write, tmp_path):
    with pytest.raises(CheckpointError, match=r"^w is complex128, .*\.pt file"):
        write({"w": torch.zeros(1, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_touched(write, tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write({"w": torch.zeros(1)})
    assert (tmp_path / "model.safetensors").read_text() == "mine"
