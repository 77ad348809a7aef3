from __future__ import annotations

import gc
import io
import subprocess
import sys

import pytest
import torch

from hpctrain.checkpoint.host_memory import HostMemory, pinned_bytes

MIB = 1 << 20


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


FORKS = """
import os
from pathlib import Path
import torch
from hpctrain.checkpoint.host_memory import HostMemory

tensor = HostMemory().empty_like(torch.empty(8 << 20)).fill_(1)
start = f"{tensor.data_ptr():x}-"
child = os.fork()
if not child:
    os._exit(start in Path("/proc/self/maps").read_text())
assert start in Path("/proc/self/maps").read_text()
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_does_not_have_it():
    """Else each page would be copied at the first write after the fork, and the old ones stay."""
    subprocess.run([sys.executable, "-c", FORKS], check=True)


@pytest.mark.parametrize(
    ("count", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (MIB, MIB), (MIB + 1, 2 * MIB), (3 << 30, 4 << 30)]
)
def test_page_locked_memory_comes_in_powers_of_two(count, taken):
    assert pinned_bytes(count) == taken
