from __future__ import annotations

import io
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.sharded.chunk_file import ALIGNMENT, Chunk, WrittenFile, write_chunks
from hpctrain.rank.message import decode, encode
from hpctrain.run.checkpoint_manifest import ChunkPlace, Region
from hpctrain.run.checkpoints import file_checksum

TYPES = ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64"]


def assert_found(path, written, tensors):
    """Each place has what torch.load reads, and at its `data_offset` the elements alone."""
    data = path.read_bytes()
    assert (len(data), file_checksum(path)) == (written.bytes, written.checksum)
    assert [name for name, _ in written.places] == [name for name, tensor in tensors.items() if tensor.numel()]
    for name, listed in written.places:
        place = ChunkPlace.from_list(listed)
        tensor = tensors[name]
        blob = io.BytesIO(data[place.offset : place.offset + place.bytes])
        assert torch.equal(torch.load(blob, weights_only=True), tensor)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[place.data_offset : place.data_offset + len(raw)] == raw
        assert place.offset % ALIGNMENT == place.data_offset % ALIGNMENT == 0


def write_whole(path, tensors, cut):
    return write_chunks(path, [chunk for name, tensor in tensors.items() for chunk in cut(name, tensor)])


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(TYPES)), max_size=5), st.data())
def test_elements_are_where_the_places_say(tmp_path_factory, values, cut, forms, data):
    tensors = {f"t{number}": values(tuple(shape), dtype, number) for number, (shape, dtype) in enumerate(forms)}
    for name, tensor in tensors.items():
        tensors[name] = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
    path = tmp_path_factory.mktemp("files") / "__0_0.distcp"
    assert_found(path, write_whole(path, tensors, cut), tensors)


def test_elements_that_look_like_the_zip_format(tmp_path, cut):
    header = b"PK\x03\x04" + bytes(22) + struct.pack("<HH", 14, 30)
    looks = [header, header * 1000, header + b"archive/data/0", b"archive/data/0", b"PK\x07\x08" + bytes(20), bytes(30)]
    tensors = {f"t{n}": torch.frombuffer(bytearray(each), dtype=torch.uint8) for n, each in enumerate(looks)}
    path = tmp_path / "__0_0.distcp"
    assert_found(path, write_whole(path, tensors, cut), tensors)


def test_a_part_of_a_tensor_is_written_without_the_rest(tmp_path, values, cut):
    whole = values((1000, 100))
    part = cut("w", whole, [10], [])[0]
    assert write_chunks(tmp_path / "part", [part]).bytes < 4 * part.tensor.numel() + 4096


def test_lazily_conjugated_and_negated_values_are_written_as_they_are(tmp_path, values, cut):
    tensors = {"conjugated": values((4, 3), "complex64").conj(), "negated": values((4, 3), "complex64").conj().imag}
    assert tensors["conjugated"].is_conj()
    assert tensors["negated"].is_neg()
    path = tmp_path / "__0_0.distcp"
    written = write_whole(path, tensors, cut)
    assert_found(path, written, {name: tensor.resolve_conj().resolve_neg() for name, tensor in tensors.items()})


def test_another_rank_gets_the_same_description(tmp_path, values, cut):
    written = write_chunks(tmp_path / "__0_0.distcp", cut("w", values((4, 3)), [1], [2]))
    assert decode(encode(written)) == decode(encode(WrittenFile(*decode(encode(written)))))


def test_parts_without_elements_are_left_out(tmp_path, values, cut):
    written = write_chunks(tmp_path / "__0_0.distcp", cut("w", values((4, 0))))
    assert (written.bytes, written.places) == (0, [])
    assert (tmp_path / "__0_0.distcp").stat().st_size == 0


def test_a_tensor_of_other_sizes_than_its_region_is_never_written(tmp_path):
    wrong = Chunk(name="w", shape=(4,), region=Region((0,), (3,)), tensor=torch.zeros(2))
    with pytest.raises(AssertionError, match=r"\(2,\) for Region"):
        write_chunks(tmp_path / "__0_0.distcp", [wrong])
