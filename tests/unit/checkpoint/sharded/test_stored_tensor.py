from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.stored_tensor import open_index
from hpctrain.errors import CheckpointError
from hpctrain.run.checkpoint_manifest import Region


@given(st.data())
def test_any_region_of_any_cut(tmp_path_factory, values, cut, write, data):
    shape = data.draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
    tensor = values(shape)
    edges = [sorted(data.draw(st.lists(st.integers(0, size), max_size=2))) for size in shape]
    chunks = cut("w", tensor, *edges)
    path = tmp_path_factory.mktemp("save")
    stored = open_index(path, write(path, chunks[::2], chunks[1::2]))["w"]
    begins = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True))
    region = Region(begins, sizes)
    assert torch.equal(stored.read(), tensor)
    assert torch.equal(stored.read(region), tensor[region.slices()])
    target = torch.empty(sizes, dtype=torch.float64)
    stored.copy_into(target, region)
    assert torch.equal(target, tensor[region.slices()].double())


def test_a_region_inside_one_chunk_is_not_copied(tmp_path, values, cut, write):
    tensor = values((8, 6))
    stored = open_index(tmp_path, write(tmp_path, cut("w", tensor)))["w"]
    inside = stored.read(Region((2, 1), (3, 4)))
    assert torch.equal(inside, tensor[2:5, 1:5])
    assert inside.data_ptr() == stored.read().data_ptr() + 4 * (2 * 6 + 1)


def test_a_change_of_what_was_read_never_reaches_the_file(tmp_path, values, cut, write):
    tensor = values((8, 6))
    index = write(tmp_path, cut("w", tensor))
    open_index(tmp_path, index)["w"].read().zero_()
    assert torch.equal(open_index(tmp_path, index)["w"].read(), tensor)


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2", reason="Linux reserves memory for every mapping"
)
def test_a_file_that_is_larger_than_the_memory_of_the_machine(tmp_path, values, cut, write):
    tensor = values((8, 6))
    index = write(tmp_path, cut("w", tensor))
    # sparse: it takes no space on the disk
    os.truncate(tmp_path / "__0_0.distcp", 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    assert torch.equal(open_index(tmp_path, index)["w"].read(), tensor)


def test_a_target_of_other_sizes_is_never_filled_in_part(tmp_path, values, cut, write):
    stored = open_index(tmp_path, write(tmp_path, cut("w", values((8, 6)))))["w"]
    with pytest.raises(AssertionError, match=r"\(3, 6\) for Region"):
        stored.copy_into(torch.empty(3, 6), Region((0, 0), (2, 6)))


def test_a_region_that_reaches_beyond_the_tensor(tmp_path, values, cut, write):
    stored = open_index(tmp_path, write(tmp_path, cut("w", values((8, 6)))))["w"]
    with pytest.raises(CheckpointError, match="18 of 24 elements of w"):
        stored.read(Region((5, 0), (4, 6)))


def test_a_missing_file(tmp_path, values, cut, write):
    index = write(tmp_path, cut("w", values((8, 6))))
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp can't be read: .*No such file"):
        open_index(tmp_path, index)["w"].read()


def test_a_type_that_this_torch_does_not_know(tmp_path, values, cut, write):
    index = write(tmp_path, cut("w", values((8, 6))))
    with pytest.raises(CheckpointError, match="types that this torch doesn't know: float3"):
        open_index(tmp_path, {"w": replace(index["w"], dtype="float3")})
