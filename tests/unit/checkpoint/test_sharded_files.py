"""The files of a checkpoint of which each rank wrote a part: what plain torch, and we, read back from any cut."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hpctrain.checkpoint.saved_tensors import DistributedFolder
from hpctrain.checkpoint.sharded.chunk_file import Chunk, WrittenFile, encode_metadata, write_chunks
from hpctrain.checkpoint.sharded.digest import MODULUS, combine_sums, partial_sums
from hpctrain.checkpoint.stored_tensor import StoredTensor, open_index
from hpctrain.errors import CheckpointDamagedError, CheckpointError
from hpctrain.rank.message import decode, encode
from hpctrain.run.checkpoint_manifest import ChunkPlace, IndexedTensor, Region, decode_index, encode_index
from hpctrain.run.checkpoints import file_checksum

TYPES = ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64"]


def values(shape, dtype="float32", seed=0):
    draws = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, generator=draws).to(kind)
    return torch.randint(0, 2 if dtype == "bool" else 100, shape, generator=draws).to(kind)


def cut(name, tensor, *edges):
    """The chunks of a tensor that is cut at these edges, by dimension."""
    spans = [list(itertools.pairwise([0, *own, size])) for own, size in zip(edges, tensor.shape, strict=True)]
    for box in itertools.product(*spans):
        region = Region(tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box))
        yield Chunk(name=name, shape=tuple(tensor.shape), region=region, tensor=tensor[region.slices()])


def store(path, *by_rank):
    """Write the chunks of each rank, the index and DCP's description; returns the tensors as they are read."""
    path.mkdir(exist_ok=True)
    written = [
        WrittenFile(*decode(encode(write_chunks(path / f"__{rank}_0.distcp", chunks))))
        for rank, chunks in enumerate(by_rank)
    ]
    shapes = {
        chunk.name: (chunk.shape, str(chunk.tensor.dtype).removeprefix("torch.")) for chunk in itertools.chain(*by_rank)
    }
    index = {
        name: IndexedTensor(
            *form, tuple(ChunkPlace.from_list(place) for each in written for own, place in each.places if own == name)
        )
        for name, form in shapes.items()
    }
    for each in written:
        assert (path / each.name).stat().st_size == each.bytes
        assert file_checksum(path / each.name) == each.checksum
    # a slash stands for a level of nested dicts, which torch joins by dots
    flat = {name.replace("/", "."): tensor for name, tensor in index.items()}
    paths = {name.replace("/", "."): tuple(name.split("/")) for name in index}
    (path / ".metadata").write_bytes(encode_metadata(flat, paths))
    return open_index(path, decode_index(encode_index(index)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (6,), (40,), (149,), (5, 7), (3, 1, 4)], ids=str)
def test_elements_are_found_in_what_torch_wrote(tmp_path, dtype, shape):
    """Also where as many bytes as the elements have are in another record of torch's file."""
    tensor = values(shape, dtype)
    chunks = [next(cut(name, tensor, *([] for _ in shape))) for name in ("a", "b", "c")]
    for stored in store(tmp_path / "save", chunks).values():
        assert (stored.shape, stored.dtype) == (shape, tensor.dtype)
        assert torch.equal(stored.read(), tensor)


def test_what_one_chunk_has_is_a_view_of_its_file_and_what_several_have_is_put_together(tmp_path):
    tensor = values((8, 6))
    a, b, c, d = cut("model/w", tensor, [3], [2])
    stored = store(tmp_path / "save", [a, d], [b, c])["model/w"]
    inside = Region((4, 3), (2, 2))
    assert torch.equal(stored.read(inside), tensor[4:6, 3:5])
    assert stored.read(inside).data_ptr() != stored.read().data_ptr()
    assert stored.read(inside).untyped_storage().data_ptr() == stored.read(inside).untyped_storage().data_ptr()
    assert torch.equal(stored.read(), tensor)
    target = torch.zeros(3, 6)
    stored.copy_into(target, Region((2, 0), (3, 6)))
    assert torch.equal(target, tensor[2:5])


def test_missing_elements_are_an_error_that_names_the_tensor(tmp_path):
    chunks = list(cut("model/w", values((8, 6)), [3], [2]))
    stored = store(tmp_path / "save", chunks[:3])["model/w"]
    with pytest.raises(CheckpointError, match=r"28 of 48 elements of model/w"):
        stored.read()


def test_a_file_that_is_shorter_than_its_index_says(tmp_path):
    stored = store(tmp_path / "save", list(cut("w", values((100,)), [])))["w"]
    with (tmp_path / "save" / "__0_0.distcp").open("r+b") as file:
        file.truncate(800)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is shorter"):
        stored.read()


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"a":1}', b'{"a":{"shape":[1],"dtype":"float32","chunks":[[[0],[1]]]}}']
)
def test_bytes_that_are_not_an_index(data):
    with pytest.raises(CheckpointDamagedError, match="isn't an index"):
        decode_index(data)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".."])
def test_an_index_names_no_file_outside_of_its_checkpoint(tmp_path, name):
    elsewhere = IndexedTensor((4,), "float32", (ChunkPlace(Region((0,), (4,)), name, 0, 0, 0),))
    with pytest.raises(CheckpointError, match="isn't a file of the checkpoint"):
        open_index(tmp_path / "save", {"w": elsewhere})["w"].read()


@pytest.fixture
def saved(tmp_path):
    """A model, an average and the state of an optimizer, cut in all ways, and written by three ranks."""
    whole = {
        "model/layers.0.weight": values((7, 5), seed=1),
        "model/layers.0.bias": values((7,), "bfloat16", seed=2),
        "model/steps": values((), "int64", seed=3),
        "ema/layers.0.weight": values((7, 5), "float64", seed=4),
        "optimizer/state/layers.0.weight/exp_avg": values((7, 5), seed=5),
    }
    ranks = [[], [], []]
    for name, tensor in whole.items():
        edges = {0: (), 1: ([2],), 2: ([3], [4])}[tensor.dim()]
        for number, chunk in enumerate(cut(name, tensor, *edges)):
            ranks[number % 3].append(chunk)
    store(tmp_path / "save", *ranks)
    return tmp_path / "save", whole


def nested(whole):
    found = {}
    for name, tensor in whole.items():
        *above, last = name.split("/")
        place = found
        for key in above:
            place = place.setdefault(key, {})
        place[last] = tensor
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as in any script that loads in one process
def test_plain_torch_reads_them(saved, tmp_path):
    path, whole = saved
    state = nested({name: torch.zeros_like(tensor) for name, tensor in whole.items()})
    dcp.load(state, checkpoint_id=path, no_dist=True)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    again = torch.load(tmp_path / "whole.pt", weights_only=True)
    for found in (state, again):
        for name, tensor in whole.items():
            place = found
            for key in name.split("/"):
                place = place[key]
            assert torch.equal(place, tensor), name


def test_the_comparison_of_saves_reads_them(saved):
    path, whole = saved
    folder = DistributedFolder(path)
    assert len(folder.tensors) == len(whole)
    assert all(torch.equal(folder.tensor(name.replace("/", ".")), tensor) for name, tensor in whole.items())


def sums(chunks):
    return tuple(sum(lane) % MODULUS for lane in zip(*map(partial_sums, chunks), strict=True))


@given(st.data())
def test_any_cut_has_the_same_sums(data):
    shape = data.draw(st.lists(st.integers(1, 12), max_size=4).map(tuple))
    tensor = values(shape, data.draw(st.sampled_from(TYPES)))
    edges = [data.draw(st.lists(st.integers(0, size), max_size=3).map(sorted)) for size in shape]
    assert sums(cut("w", tensor, *edges)) == sums(cut("w", tensor, *([] for _ in shape)))


def test_sums_of_large_tensors_are_those_of_their_halves():
    for shape in [(300_000,), (1000, 700), (3, 400_000)]:
        tensor = values(shape)
        halves = cut("w", tensor, *([size // 2] for size in shape))
        assert sums(halves) == sums(cut("w", tensor, *([] for _ in shape)))


def test_a_change_of_any_kind_changes_the_digest():
    tensor = values((40, 30))
    flipped = tensor.clone().view(torch.int32)
    flipped[7, 9] ^= 1
    rows, columns, elements = tensor.clone(), tensor.clone(), tensor.clone()
    rows[[3, 4]] = tensor[[4, 3]]
    columns[:, [3, 4]] = tensor[:, [4, 3]]
    elements[0, 0], elements[1, 1] = tensor[1, 1], tensor[0, 0]
    changed = [flipped.view(torch.float32), rows, columns, elements, -tensor, tensor.T.contiguous(), tensor.double()]

    def digest(tensor, name="w"):
        lanes = sums(cut(name, tensor, *([] for _ in tensor.shape)))
        return combine_sums({name: (tuple(tensor.shape), str(tensor.dtype), lanes)})

    found = [digest(tensor), digest(tensor, "v"), *map(digest, changed)]
    assert len(set(found)) == len(found)
    assert all(one.startswith("sum128:") for one in found)


def test_a_tensor_in_memory_is_read_like_a_stored_one():
    tensor = values((5, 6))
    stored = StoredTensor.of(tensor)
    assert stored.read().data_ptr() == tensor.data_ptr()
    assert torch.equal(stored.read(Region((1, 2), (2, 3))), tensor[1:3, 2:5])
