from __future__ import annotations

import io

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import nn

from hpctrain.checkpoint.digest import raw_bytes
from hpctrain.checkpoint.exchange import write_safetensors
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.warm_start import read_weights
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.errors import CheckpointError
from hpctrain.run.checkpoints import list_checkpoints, read_manifest


def written(state):
    file = io.BytesIO()
    write_safetensors(state, file)
    return file.getvalue()


def test_the_package_reads_every_dtype_and_shape():
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]
    state = {str(kind): torch.arange(7).to(kind) for kind in kinds}
    state |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "eight bits": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "view": torch.arange(10.0)[::3],
        "complex": torch.tensor([1 + 2j]),
        "näme": torch.ones(1),
    }
    found = load(written(state))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert raw_bytes(found[name]) == raw_bytes(tensor)


def test_tied_weights_have_each_of_their_names_and_other_state_none():
    weight = torch.randn(3, 3)
    found = load(written({"a": weight, "b": weight, "_extra_state": {"calls": 7}}))
    assert found.keys() == {"a", "b"}
    assert torch.equal(found["a"], found["b"])


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(CheckpointError, match=r"w is of torch\.complex128.*checkpoint\.safetensors=false"):
        written({"w": torch.zeros(1, dtype=torch.complex128)})


def test_a_checkpoint_has_it_with_plain_names_and_under_its_own_checksum(directory, snapshot, trained):
    writer = CheckpointWriter(directory, lambda: None, Retention(), safetensors=True)
    path = writer.write(snapshot(1))
    file = path / "model.safetensors"
    assert read_manifest(path)["files"].keys() == {"model.pt", "model.safetensors", "optimizer.pt", "state.pt"}
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    expected = torch.load(path / "model.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_weights(file).items())
    model, _ = trained(seed=9)
    model.load_state_dict(found)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    (info,) = list_checkpoints(directory)
    assert "model.safetensors doesn't match its checksum" in info.problem
    for step in (2, 3, 4):
        writer.write(snapshot(step))
    assert directory.checkpoint_steps() == [3, 4]


def test_names_of_wrappers_are_left_out(directory, trained):
    from hpctrain.checkpoint.state import Head, capture

    model, optimizer = trained()
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    head = Head(step=1, samples_seen=1, world_size=1, config_digest="c")
    found = load(written(capture(wrapped, optimizer, head=head).model))
    assert found.keys() == model.state_dict().keys()
