"""A checkpoint's weights as files and folders of other formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpctrain.checkpoint import weight_stream
from hpctrain.checkpoint.export import FORMS, weights_of, write_weights
from hpctrain.checkpoint.read import LoadedCheckpoint, load
from hpctrain.checkpoint.sharded.chunk_file import Chunk, write_chunks
from hpctrain.checkpoint.state import Head, LiveState
from hpctrain.checkpoint.stored_tensor import open_index
from hpctrain.checkpoint.warm_start import read_weights
from hpctrain.errors import CheckpointError
from hpctrain.run.checkpoint_manifest import ChunkPlace, IndexedTensor, Region

HEAD = Head(step=1, samples_seen=8, world_size=1, config_digest="c0")


class Tied(nn.Module):
    """Two names of one weight, a buffer, and extra state of two kinds."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("counts", torch.arange(3))

    def get_extra_state(self):
        return {"calls": 7}

    def set_extra_state(self, state):
        assert state == {"calls": 7}


@pytest.fixture
def saved(writer):
    """Write a checkpoint of a model, and load it."""

    def save(model, **extra):
        optimizer = torch.optim.SGD(model.parameters())
        path = writer.write(LiveState(model, {"": optimizer}, head=HEAD, extra=extra).capture())
        return load(path)

    return save


def averages(model):
    return {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}


def ignore(_):
    pass


def test_a_torch_file_is_a_state_dict_whose_ties_hold(saved, tmp_path):
    model = Tied()
    weights = weights_of(saved(model))
    assert weights.left_out == ("_extra_state",)
    counts = []
    assert write_weights(weights, tmp_path / "model.pt", "torch", counts.append) == 1
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    expected = {name: value for name, value in model.state_dict().items() if name != "_extra_state"}
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    assert found["norm.weight"].data_ptr() != found["norm.bias"].data_ptr()
    # the tied weight once
    assert sum(counts) == sum(value.nbytes for name, value in expected.items() if name != "head.weight")
    assert found._metadata == model.state_dict()._metadata
    mapped = torch.load(tmp_path / "model.pt", weights_only=True, mmap=True)
    assert torch.equal(mapped["head.weight"], model.head.weight)
    other = Tied()
    other.load_state_dict({**found, "_extra_state": {"calls": 7}})
    assert read_weights(tmp_path / "model.pt").keys() == expected.keys()


@pytest.mark.parametrize("form", FORMS)
def test_an_average_is_that_of_both_names_of_a_tied_weight(saved, tmp_path, form):
    model = Tied()
    weights = weights_of(saved(model, ema=averages(model)), averaged=True)
    output = tmp_path / "output"
    write_weights(weights, output, form, ignore, max_bytes=10**9)
    if form == "torch":
        found = torch.load(output, weights_only=True)
    else:
        found = load_file(output / "model.safetensors" if form == "folder" else output)
    assert torch.equal(found["embedding.weight"], model.embedding.weight + 1)
    assert torch.equal(found["head.weight"], model.embedding.weight + 1)
    assert torch.equal(found["norm.bias"], model.norm.bias + 1)
    # what isn't averaged
    assert torch.equal(found["counts"], model.counts)
    assert torch.equal(found["norm.running_mean"], model.norm.running_mean)


def test_an_average_can_be_in_another_type(saved, tmp_path):
    model = nn.Linear(3, 2).bfloat16()
    average = {name: torch.randn_like(weight, dtype=torch.float32) for name, weight in model.named_parameters()}
    found = saved(model, ema=average)
    for dtype, expected in [(None, torch.float32), (torch.bfloat16, torch.bfloat16)]:
        output = tmp_path / f"{dtype}.safetensors"
        write_weights(weights_of(found, averaged=True, dtype=dtype), output, "safetensors", ignore)
        weight = load_file(output)["weight"]
        assert weight.dtype == expected
        assert torch.equal(weight, average["weight"].to(expected))


def test_a_checkpoint_without_an_average_or_with_one_of_another_model(saved):
    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"no averaged weights: trainer\.ema_decay"):
        weights_of(saved(model), averaged=True)
    with pytest.raises(CheckpointError, match="averages weights that its model lacks: other"):
        weights_of(saved(model, ema={"other": torch.ones(1)}), averaged=True)
    assert weights_of(saved(model, ema={"other": torch.ones(1)})).streams.keys() == {"weight", "bias"}


def test_a_folder_has_numbered_files_and_an_index(saved, tmp_path):
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 100), nn.Linear(100, 2))
    weights = weights_of(saved(model))
    folder = tmp_path / "published"
    # in kilobytes: 0.4 and 0.04, then 4, then 0.4 and 0.8, then 0.008
    assert write_weights(weights, folder, "folder", ignore, max_bytes=1200) == 4
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(file.name for file in folder.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": sum(value.nbytes for value in model.state_dict().values())},
        "weight_map": {
            "0.weight": names[0],
            "0.bias": names[0],
            "1.weight": names[1],
            "1.bias": names[2],
            "2.weight": names[2],
            "2.bias": names[3],
        },
    }
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], model.state_dict()[name])


def test_weights_that_fit_one_file_need_no_index(saved, tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    model = nn.Linear(3, 2)
    assert write_weights(weights_of(saved(model)), folder, "folder", ignore, max_bytes=24 + 8) == 1
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    assert load_file(folder / "model.safetensors").keys() == {"weight", "bias"}


def test_only_the_weights_of_a_folder_are_replaced(saved, tmp_path):
    folder = tmp_path / "published"
    weights = weights_of(saved(nn.Linear(30, 20)))
    write_weights(weights, folder, "folder", ignore, max_bytes=100)
    mine = ("config.json", "model.safetensors.bak", "my-model.safetensors")
    for name in mine:
        (folder / name).write_text("mine")
    write_weights(weights, folder, "folder", ignore, max_bytes=10**9)
    assert sorted(file.name for file in folder.iterdir()) == sorted(["model.safetensors", *mine])
    write_weights(weights, folder, "folder", ignore, max_bytes=100)
    assert not (folder / "model.safetensors").exists()
    assert {file.name for file in folder.iterdir()} > {"model.safetensors.index.json", *mine}
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".tmp")] == []


@pytest.fixture
def sharded(tmp_path):
    """Write tensors in the parts of two ranks, and return how they are read."""

    def write(tensors, axis):
        written = []
        for rank in range(2):
            chunks = []
            for name, tensor in tensors.items():
                part = tensor.tensor_split(2, dim=axis)[rank]
                offsets = [0] * tensor.ndim
                offsets[axis] = 0 if rank == 0 else tensor.tensor_split(2, dim=axis)[0].shape[axis]
                region = Region(tuple(offsets), tuple(part.shape))
                chunks.append(Chunk(name=name, shape=tuple(tensor.shape), region=region, tensor=part))
            written.append(write_chunks(tmp_path / f"__{rank}_0.distcp", chunks))
        index = {
            name: IndexedTensor(
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                tuple(ChunkPlace.from_list(place) for each in written for own, place in each.places if own == name),
            )
            for name, tensor in tensors.items()
        }
        return open_index(tmp_path, index)

    return write


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_that_ranks_wrote_are_put_together(sharded, tmp_path, monkeypatch, form, axis):
    monkeypatch.setattr(weight_stream, "PIECE_BYTES", 100)
    weight, average, empty = torch.randn(7, 5), torch.randn(7, 5), torch.empty(0, 3)
    stored = sharded({"w": weight, "ema.w": average, "frozen": weight.bfloat16(), "empty": empty}, axis)
    found = LoadedCheckpoint(
        path=tmp_path,
        model={name: stored[name] for name in ("w", "frozen", "empty")} | {"_extra_state": {"calls": 7}},
        optimizer={},
        state={"extra": {"ema": {"w": stored["ema.w"]}}},
    )
    for averaged, expected in [(False, weight), (True, average)]:
        weights = weights_of(found, averaged=averaged)
        assert weights.left_out == ("_extra_state",)
        output = tmp_path / f"{averaged}"
        write_weights(weights, output, form, ignore, max_bytes=10**9)
        if form == "torch":
            read = torch.load(output, weights_only=True)
        else:
            read = load_file(output / "model.safetensors" if form == "folder" else output)
        assert read.keys() == {"w", "frozen", "empty"}
        assert torch.equal(read["w"], expected)
        assert torch.equal(read["frozen"], weight.bfloat16())
        assert read["empty"].shape == (0, 3)


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_leaves_nothing_and_what_was_there(saved, tmp_path, file_size_limit, form):
    weights = weights_of(saved(nn.Linear(300, 200)))
    output = tmp_path / "output"
    if form != "folder":
        output.write_text("before")
    before = sorted(tmp_path.iterdir())
    with (
        file_size_limit(20_000),
        pytest.raises(CheckpointError, match=r"output can't be written: (File too large|torch: )"),
    ):
        write_weights(weights, output, form, ignore, max_bytes=10**9)
    assert sorted(tmp_path.iterdir()) == before
    assert form == "folder" or output.read_text() == "before"


def test_files_have_the_permissions_of_the_umask(saved, tmp_path):
    weights = weights_of(saved(nn.Linear(3, 2)))
    before = os.umask(0o027)
    try:
        for form in FORMS:
            write_weights(weights, tmp_path / form, form, ignore, max_bytes=10)
    finally:
        os.umask(before)
    files = [tmp_path / "torch", tmp_path / "safetensors", *(tmp_path / "folder").iterdir()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750


MEASURED = """
import json, re, sys
from pathlib import Path
from hpctrain.checkpoint.export import DTYPES, weights_of, write_weights
from hpctrain.checkpoint.read import load

def memory(field):
    return int(re.search(rf"^{field}:\\s*(\\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024

found = load(Path(sys.argv[1]), verified=True)
weights = weights_of(found, dtype=DTYPES.get(sys.argv[4]))
before = memory("RssAnon"), memory("VmHWM")
peaks = []
write_weights(weights, Path(sys.argv[2]), sys.argv[3], lambda _: peaks.append(memory("RssAnon")), max_bytes=10**8)
in_memory = memory("RssShmem") > 0
print(json.dumps([max(peaks) - before[0], 0 if in_memory else memory("VmHWM") - before[1]]))
"""


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("safetensors", "bf16"),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in product(FORMS, ("-", "bf16"))),
    ],
)
def test_memory_does_not_grow_with_the_model(saved, tmp_path, form, dtype):
    model = nn.ParameterList([nn.Parameter(torch.randn(25_000_000)) for _ in range(4)])
    path = saved(model).path
    words = [str(path), str(tmp_path / "output"), form, dtype]
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=True)
    # 400 MB of weights; pieces of 17 MB and what these are converted to, and modules that are imported meanwhile
    own, resident = json.loads(done.stdout)
    assert own < 200e6
    # with the pages of the checkpoint, unless its file system is memory itself
    assert resident < 300e6
