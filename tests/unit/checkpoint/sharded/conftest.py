from __future__ import annotations

import itertools

import pytest
import torch

from hpctrain.checkpoint.sharded.chunk_file import Chunk, write_chunks
from hpctrain.run.checkpoint_manifest import ChunkPlace, IndexedTensor, Region


def _values(shape, dtype="float32", seed=0):
    draws = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, generator=draws).to(kind)
    return torch.randint(0, 2 if dtype == "bool" else 100, shape, generator=draws).to(kind)


def _cut(name, tensor, *edges):
    edges = edges or ([],) * tensor.dim()
    spans = [list(itertools.pairwise([0, *own, size])) for own, size in zip(edges, tensor.shape, strict=True)]
    chunks = []
    for box in itertools.product(*spans):
        region = Region(tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box))
        chunks.append(Chunk(name=name, shape=tuple(tensor.shape), region=region, tensor=tensor[region.slices()]))
    return chunks


def _indexed(written, chunks):
    forms = {chunk.name: (chunk.shape, str(chunk.tensor.dtype).removeprefix("torch.")) for chunk in chunks}
    return {
        name: IndexedTensor(
            *form, tuple(ChunkPlace.from_list(place) for each in written for own, place in each.places if own == name)
        )
        for name, form in forms.items()
    }


@pytest.fixture(scope="session")
def values():
    """Draw a tensor of a shape and a dtype."""
    return _values


@pytest.fixture(scope="session")
def cut():
    """The chunks of a tensor that is cut at these edges, by dimension; without edges, one chunk."""
    return _cut


@pytest.fixture(scope="session")
def write():
    """Write the chunks of each rank into a folder; returns the index."""

    def write_files(path, *by_rank):
        path.mkdir(exist_ok=True)
        written = [write_chunks(path / f"__{rank}_0.distcp", chunks) for rank, chunks in enumerate(by_rank)]
        return _indexed(written, list(itertools.chain(*by_rank)))

    return write_files
