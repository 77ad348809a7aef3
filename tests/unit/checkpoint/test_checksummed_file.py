from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.write import ChecksummedFile

BLOCK = 4 << 20


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def at_a_page(data):
    """The same bytes at the beginning of a page of memory, from where they are written without a copy."""
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


SIZES = st.sampled_from([0, 1, 511, 4096, 70_001, BLOCK - 1, BLOCK, BLOCK + 513, 3 * BLOCK])


@settings(deadline=None)
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=5))
def test_every_byte_arrives_whatever_the_pieces(tmp_path_factory, sizes):
    path = tmp_path_factory.getbasetemp() / "stream"
    path.unlink(missing_ok=True)
    pieces = [bytes([number + 1]) * size for number, (size, _) in enumerate(sizes)]
    pieces = [at_a_page(piece) if aligned else piece for piece, (_, aligned) in zip(pieces, sizes, strict=True)]
    file = ChecksummedFile(path)
    for piece in pieces:
        assert file.write(piece) == len(piece)
    file.close()
    whole = b"".join(pieces)
    assert path.read_bytes() == whole
    assert (file.bytes, file.checksum) == (len(whole), xxhash.xxh3_128(whole).hexdigest())


def test_an_existing_file_is_never_written_over(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        ChecksummedFile(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("limit", [0, 5000, BLOCK, BLOCK + 12_345])
def test_a_full_disk_is_raised_at_the_end_and_the_descriptor_closed(tmp_path, file_size_limit, limit, aligned):
    data = at_a_page(b"x" * BLOCK) if aligned else b"x" * BLOCK
    before = open_descriptors()
    with file_size_limit(limit):
        file = ChecksummedFile(tmp_path / "x")
        for _ in range(3):
            assert file.write(data) == BLOCK
        with pytest.raises(OSError, match="File too large"):
            file.close()
    assert open_descriptors() == before
    assert (tmp_path / "x").stat().st_size <= limit


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_file_system_without_direct_io_does_as_well(tmp_path):
    done = subprocess.run(["mount", "-t", "ramfs", "ramfs", tmp_path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no mounting here")
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(tmp_path / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        file = ChecksummedFile(tmp_path / "x")
        file.write(b"abc" * BLOCK)
        file.close()
        assert (tmp_path / "x").read_bytes() == b"abc" * BLOCK
    finally:
        subprocess.run(["umount", tmp_path], check=True)
