from __future__ import annotations

import gc
import io
import os
from collections import defaultdict
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.host_memory import HostCopy, HostMemory, available_memory_bytes
from hpctrain.errors import CheckpointError

KIB = 1 << 10
MIB = 1 << 20


def loadable(tree):
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def host_copy(tree, kept=None):
    copy = HostCopy()
    result = copy.of(tree, kept)
    copy.finish()
    return result


class Level(IntEnum):
    HIGH = 3


def test_a_copy_is_plain_and_loads_with_weights_only():
    tree = {
        "a": [1, 2.5, None, True, "x", b"y", 1j],
        3: (np.float64(0.1), np.int64(4), np.bool_(True), np.str_("z"), Level.HIGH),
        "nested": defaultdict(dict, {"k": torch.Size([1, 2])}),
        "dtype": torch.bfloat16,
    }
    copy = host_copy(tree)
    assert copy == {
        "a": [1, 2.5, None, True, "x", b"y", 1j],
        3: (0.1, 4, True, "z", 3),
        "nested": {"k": (1, 2)},
        "dtype": torch.bfloat16,
    }
    assert [type(item) for item in copy[3]] == [float, int, bool, str, int]
    assert loadable(copy) == copy


@pytest.mark.parametrize(
    ("value", "kind"),
    [(Path("x"), "Path"), (np.zeros(2), "numpy.ndarray"), ({1}, "set"), (lambda: 0, "function"), (object(), "object")],
)
def test_what_has_no_plain_form_is_refused_by_its_place(value, kind):
    with pytest.raises(CheckpointError, match=rf"state\['extra'\]\['a'\]\[1\] is a .*{kind}.*convert it"):
        HostCopy().of({"extra": {"a": [0, value]}}, name="state")


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.empty(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensors_without_plain_bytes_are_refused(tensor):
    with pytest.raises(CheckpointError, match=r"w is a Tensor .* dense tensors"):
        HostCopy().of(tensor, name="w")


def test_keys_that_weights_only_would_misread_are_refused():
    with pytest.raises(CheckpointError, match=r"x has the key \(1, 2\)"):
        HostCopy().of({(1, 2): 0}, name="x")


def test_a_copy_shares_no_memory_with_its_source():
    source = torch.nn.Parameter(torch.ones(3))
    copy = host_copy({"w": source})["w"]
    with torch.no_grad():
        source.fill_(2)
    assert copy.tolist() == [1, 1, 1]
    assert not copy.requires_grad
    assert type(copy) is torch.Tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 5).t(),
        torch.randn(6, 6)[::2, 1:4],
        torch.randn(3).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.tensor([True, False]),
    ],
    ids=["channels_last", "transposed", "view", "bf16", "conj", "neg", "scalar", "empty", "bool"],
)
def test_values_and_dense_strides_are_kept(tensor):
    copy = host_copy(tensor)
    assert copy.dtype == tensor.dtype
    assert torch.equal(copy, tensor)
    assert copy.stride() == torch.empty_like(tensor).stride()
    assert copy.untyped_storage().nbytes() == tensor.nbytes
    again = host_copy(tensor * 1, kept=copy)
    assert torch.equal(again, tensor)


def test_tied_tensors_stay_tied_and_lookalikes_don_t():
    tied = torch.ones(4)
    copy = host_copy({"a": tied, "b": tied.view(4), "c": tied[:2], "d": torch.ones(4)})
    assert copy["a"].data_ptr() == copy["b"].data_ptr()
    assert len({copy[name].data_ptr() for name in "acd"}) == 3


def test_a_view_and_its_conjugate_are_two():
    z = torch.tensor([1 + 2j])
    copy = host_copy([z, z.conj()])
    assert copy[0].item() == 1 + 2j
    assert copy[1].item() == 1 - 2j


def test_kept_buffers_are_written_over():
    first = host_copy({"w": torch.zeros(3), "s": [torch.zeros(2)], "n": 1})
    addresses = first["w"].data_ptr(), first["s"][0].data_ptr()
    second = host_copy({"w": torch.ones(3), "s": [torch.full((2,), 5.0)], "n": 2}, kept=first)
    assert (second["w"].data_ptr(), second["s"][0].data_ptr()) == addresses
    assert second["w"].tolist() == [1, 1, 1]
    assert second["n"] == 2


@pytest.mark.parametrize(
    "other", [torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(3, 1)], ids=["size", "dtype", "rank"]
)
def test_kept_buffers_that_don_t_fit_are_replaced(other):
    first = host_copy({"w": torch.zeros(3)})
    second = host_copy({"w": other}, kept=first)
    assert torch.equal(second["w"], other)
    assert second["w"].dtype == other.dtype
    assert first["w"].tolist() == [0, 0, 0]


def test_buffers_that_were_tied_part_when_their_sources_do():
    tied = torch.zeros(3)
    first = host_copy({"a": tied, "b": tied})
    second = host_copy({"a": torch.full((3,), 1.0), "b": torch.full((3,), 2.0)}, kept=first)
    assert second["a"].tolist() == [1, 1, 1]
    assert second["b"].tolist() == [2, 2, 2]


def test_an_earlier_copy_of_another_form_is_ignored():
    assert host_copy({"a": [torch.ones(1)]}, kept={"a": {"b": 1}})["a"][0].item() == 1
    assert host_copy([torch.ones(1)] * 2, kept=[torch.zeros(1)])[1].item() == 1


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(3, 512, 1024),
        torch.zeros(1 << 20, dtype=torch.bfloat16),
        torch.zeros(4, 64, 64, 64).to(memory_format=torch.channels_last),
        torch.zeros(1024, 1024).t(),
        torch.zeros(2048, 2048)[::2, 1:],
        torch.zeros(1024, 1024, dtype=torch.complex64),
        torch.zeros(5),
        torch.zeros(0, 7),
        torch.tensor(1.0),
    ],
)
def test_it_is_what_torch_would_give(like):
    expected, found = torch.empty_like(like), HostMemory().empty_like(like)
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert found.untyped_storage().nbytes() == found.nbytes
    assert found.data_ptr() % 64 == 0 or not found.numel()
    assert torch.equal(found.copy_(like), like)
    assert not found.requires_grad


def test_tensors_of_one_chunk_lie_apart_and_are_saved_apart():
    memory = HostMemory()
    tensors = [memory.empty_like(torch.empty(3 * MIB // 4 + 5)).fill_(number) for number in range(40)]
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
    file = io.BytesIO()
    torch.save(tensors[0], file)
    assert file.tell() < tensors[0].nbytes + 4096


def test_a_chunk_goes_back_with_its_last_tensor(own_kib):
    memory = HostMemory()
    gc.collect()
    before = own_kib()
    tensors = [memory.empty_like(torch.empty(8 * MIB)).fill_(1) for _ in range(4)]
    assert own_kib() - before > 120 * 1024
    del memory, tensors
    gc.collect()
    assert own_kib() - before < 40 * 1024


def test_a_forked_process_does_not_have_it():
    """Else each page would be copied at the first write after the fork, and the old ones stay."""
    tensor = HostMemory().empty_like(torch.empty(8 * MIB)).fill_(1)
    start, maps = f"{tensor.data_ptr():x}-", Path("/proc/self/maps")
    child = os.fork()
    if not child:
        os._exit(start in maps.read_text())
    assert start in maps.read_text()
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def machine(tmp_path):
    """Files as the kernel has them: of a machine with 64 KiB free, and a process in the group /slurm/job_1/step_0."""

    def build(membership, files=()):
        proc, groups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text("MemTotal:   100 kB\nMemAvailable:    64 kB\n")
        (proc / "self" / "cgroup").write_text(membership)
        for name, text in dict(files).items():
            path = groups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_memory_bytes(proc, groups)

    return build


def group(path, limit, use, cache=0):
    stat = f"anon {use - cache}\ninactive_file {cache}\nactive_file 0\n"
    return {f"{path}/memory.max": limit, f"{path}/memory.current": str(use), f"{path}/memory.stat": stat}


def test_the_machine_alone(machine):
    assert machine("0::/\n") == 64 * KIB


def test_a_jobs_limit_counts_and_its_page_cache_does_not(machine):
    files = group("slurm/job_1/step_0", "max", 9000) | group("slurm/job_1", "20000", 12000, cache=3000)
    assert machine("0::/slurm/job_1/step_0\n", files) == 20000 - 9000


def test_a_limit_above_what_the_machine_has_left_is_ignored(machine):
    assert machine("0::/slurm\n", group("slurm", str(1 << 40), 100)) == 64 * KIB


def test_version_one_has_other_names(machine):
    folder = "memory/slurm/uid_0/job_1"
    files = {
        f"{folder}/memory.limit_in_bytes": "20000\n",
        f"{folder}/memory.usage_in_bytes": "9000\n",
        f"{folder}/memory.stat": "cache 5\ninactive_file 500\nactive_file 500\n",
    }
    assert machine("5:cpuset:/slurm\n3:memory:/slurm/uid_0/job_1\n0::/\n", files) == 20000 - 8000


def test_what_cannot_be_read_is_unknown(tmp_path):
    assert available_memory_bytes(tmp_path, tmp_path) is None


def test_here():
    assert available_memory_bytes() > 0
