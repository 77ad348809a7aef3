"""The programs on docs/reference/checkpoint_format.md read a checkpoint of which ranks wrote parts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.sharded.chunk_file import Chunk, encode_metadata, write_chunks
from hpctrain.checkpoint.sharded.digest import MODULUS, combine_sums, partial_sums
from hpctrain.checkpoint.write import write_manifest
from hpctrain.run.checkpoint_manifest import (
    INDEX,
    MANIFEST,
    SHARDED_VERSION,
    ChunkPlace,
    IndexedTensor,
    Region,
    encode_index,
)
from tests.unit.checkpoint.documented import run

PAGE = (Path(__file__).parents[3] / "docs/reference/checkpoint_format.md").read_text()
VERSION_2 = PAGE.partition("## Version 2")[2].partition("## How it is written")[0]
TYPES = ("float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex64", "complex128")
SHAPES: tuple[tuple[int, ...], ...] = ((), (5,), (6, 7), (4, 1, 3), (0, 2))
HEAD = {"step": 100, "samples_seen": 6400, "world_size": 2, "config_digest": "c0", "score": None}


def program(beginning: str) -> str:
    (found,) = re.findall(rf"```python\n({re.escape(beginning)}.*?)```", VERSION_2, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {
        f"model.{dtype}.{number}": (torch.randn(shape, generator=draws) * 50).to(getattr(torch, dtype))
        for dtype in TYPES
        for number, shape in enumerate(SHAPES)
    }


@pytest.fixture(scope="module")
def saved(tensors, tmp_path_factory):
    """A checkpoint of two ranks, which divide the first dimension."""
    path = tmp_path_factory.mktemp("checkpoints") / "step_00000100"
    path.mkdir()
    parts: list[list[Chunk]] = [[], []]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        cuts = [(0, shape[0] // 2), (shape[0] // 2, shape[0])] if shape else [(0, 0)]
        for rank, (begin, end) in enumerate(cuts):
            region = Region((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])) if shape else Region((), ())
            part = tensor[begin:end] if shape else tensor
            parts[rank].append(Chunk(name=name, shape=shape, region=region, tensor=part))
    written = [write_chunks(path / f"__{rank}_0.distcp", chunks) for rank, chunks in enumerate(parts)]
    places = [place for each in written for place in each.places]
    index = {
        name: IndexedTensor(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tuple(ChunkPlace.from_list(place) for own, place in places if own == name),
        )
        for name, tensor in tensors.items()
    }
    (path / INDEX).write_bytes(encode_index(index))
    paths = {name: ("model", name.removeprefix("model.")) for name in index}
    (path / ".metadata").write_bytes(encode_metadata(index, paths))
    sums = dict.fromkeys(index, (0, 0))
    for chunk in (chunk for own in parts for chunk in own):
        first, second = ((old + new) % MODULUS for old, new in zip(sums[chunk.name], partial_sums(chunk), strict=True))
        sums[chunk.name] = first, second
    digest = combine_sums(
        {name.removeprefix("model."): (one.shape, one.dtype, sums[name]) for name, one in index.items()}
    )
    files = {each.name: {"bytes": each.bytes, "checksum": each.checksum} for each in written}
    write_manifest(path, HEAD, files, version=SHARDED_VERSION, weights_digest=digest, mesh={"replicate": 1, "shard": 2})
    return path


def test_the_documented_program_computes_the_digest(saved):
    found = run(program("import json, hashlib"), saved).strip()
    assert found == json.loads((saved / MANIFEST).read_text())["weights_digest"]


def test_the_documented_program_reads_every_tensor_without_a_pickle(saved, tensors, tmp_path):
    more = "tensors = {name: read(sys.argv[1], name) for name in json.load(open(sys.argv[1] + '/index.json'))}\n"
    run(f"{program('import json, math')}\n{more}torch.save(tensors, sys.argv[2])", saved, tmp_path / "read.pt")
    found = torch.load(tmp_path / "read.pt", weights_only=True)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.nightly
def test_the_documented_lines_read_it_with_plain_torch(saved, tensors, tmp_path):
    names = {name.removeprefix("model."): name for name in tensors}
    torch.save({name: torch.zeros_like(tensors[full]) for name, full in names.items()}, tmp_path / "zeros.pt")
    model = """
import torch
class Model:
    def state_dict(self):
        return torch.load(sys.argv[1], weights_only=True)
    def load_state_dict(self, state):
        torch.save(state, sys.argv[2])
model = Model()
"""
    lines = program("import torch.distributed.checkpoint").replace("step_00000100", str(saved))
    run(model + lines, tmp_path / "zeros.pt", tmp_path / "read.pt")
    found = torch.load(tmp_path / "read.pt", weights_only=True)
    assert all(torch.equal(found[name], tensors[full]) for name, full in names.items())


def test_the_manifest_has_the_documented_fields_in_their_order(saved):
    section = VERSION_2.partition("### manifest.json")[2]
    documented = json.loads(re.findall(r"```json\n(.*?)```", section, re.DOTALL)[0])
    assert list(json.loads((saved / MANIFEST).read_text())) == list(documented)


def test_the_index_has_the_documented_layout(saved):
    documented = json.loads(re.findall(r"```json\n(.*?)```", VERSION_2, re.DOTALL)[0])
    index = json.loads((saved / INDEX).read_text())
    ((_, example),) = documented.items()
    written = index["model.float32.2"]
    assert list(written) == list(example)
    for given, shown in zip(written["chunks"], example["chunks"], strict=True):
        assert [type(each) for each in given] == [type(each) for each in shown]
