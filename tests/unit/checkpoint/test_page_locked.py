from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from hpctrain.checkpoint.host_memory import HostCopy
from hpctrain.checkpoint.page_locked import ALIGNMENT, PageLockedMemory, lock, plan_blocks

KIB = 1 << 10
MIB = 1 << 20
BLOCK = 256 * MIB
"""The memory of a block is ordinary here, and takes no room until something is written to it."""


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([], []),
        ([1], [(MIB, [1])]),
        ([5, 600, 5], [(MIB, [600, 5, 5])]),
        ([MIB], [(MIB, [MIB])]),
        ([MIB, 1], [(MIB, [MIB]), (MIB, [1])]),
        # what is left over of one goes into smaller and smaller ones
        ([MIB] * 7, [(4 * MIB, [MIB] * 4), (2 * MIB, [MIB] * 2), (MIB, [MIB])]),
        ([100 * MIB] * 5, [(BLOCK, [100 * MIB] * 2), (BLOCK, [100 * MIB] * 2), (128 * MIB, [100 * MIB])]),
        # a larger tensor has a larger block, and shares it
        ([300 * MIB, 200 * MIB, 20 * MIB], [(512 * MIB, [300 * MIB, 200 * MIB]), (32 * MIB, [20 * MIB])]),
        ([BLOCK, 1], [(BLOCK, [BLOCK]), (MIB, [1])]),
    ],
)
def test_tensors_share_blocks_of_powers_of_two(sizes, blocks):
    assert [(block.num_bytes, list(block.tensor_bytes)) for block in plan_blocks(sizes)] == blocks


def test_the_copy_of_gpt_2_takes_hardly_more_than_its_tensors():
    """In fp32, with two moments of each weight; one allocation for each took 1.66 times as much."""
    width = 768
    layer = [width] * 6 + [3 * width, 4 * width] + [width * width * part for part in (1, 3, 4, 4)]
    weights = [50257 * width, 1024 * width, *layer * 12, width, width]
    sizes = [4 * count for count in weights for _ in range(3)]
    blocks = plan_blocks(sizes)
    assert sum(weights) == 124_439_808
    assert sorted(count for block in blocks for count in block.tensor_bytes) == sorted(sizes)
    assert sum(block.num_bytes for block in blocks) < 1.01 * sum(sizes)
    assert max(block.num_bytes for block in blocks) == BLOCK


def test_it_is_locked_in_a_thread_and_taken_without_waiting(driver):
    memory = driver.memory()
    memory.lock_ahead([8, 100, BLOCK, 8])
    assert memory.missing_bytes([8, 100, BLOCK, 8]) == BLOCK + MIB
    driver.allow(2)
    memory.wait_until_locked()
    assert threading.main_thread() not in driver.threads
    assert driver.sizes == [BLOCK, MIB]
    assert memory.locked_bytes == BLOCK + MIB
    assert memory.missing_bytes([8, 100, BLOCK, 8]) == 0
    assert memory.missing_bytes([8, 100, BLOCK, BLOCK, 8, 8]) == BLOCK + MIB
    waited_s = memory.waited_s
    taken = [memory.take(count) for count in (8, 8, 100, BLOCK)]
    assert [tensor.untyped_storage().nbytes() for tensor in taken] == [8, 8, 100, BLOCK]
    for number, tensor in enumerate(taken[:3]):
        tensor.fill_(number)
    assert [set(tensor.tolist()) for tensor in taken[:3]] == [{0}, {1}, {2}]
    assert {(tensor.data_ptr() - taken[0].data_ptr()) % ALIGNMENT for tensor in taken[:3]} == {0}
    assert memory.waited_s == waited_s
    assert memory.missing_bytes([8]) == MIB


def test_a_block_lives_as_long_as_its_tensors(driver):
    memory = driver.memory()
    memory.lock_ahead([8, 8])
    driver.allow(1)
    memory.wait_until_locked()
    first, second = memory.take(8).fill_(7), memory.take(8)
    memory.release()
    (block,) = driver.blocks
    del driver.blocks[:], second, memory
    assert block() is not None
    assert first.tolist() == [7] * 8
    del first
    assert block() is None


def test_what_is_missing_is_locked_while_the_caller_waits(driver):
    memory = driver.memory()
    driver.allow(1)
    assert memory.take(24).nbytes == 24
    assert driver.threads == {threading.current_thread()}
    assert memory.waited_s == 2


def test_waiting_for_the_thread_counts_as_waiting(driver):
    memory = driver.memory()
    memory.lock_ahead([BLOCK] * 3)
    driver.allow(3)
    memory.wait_until_locked()
    assert 0 < memory.waited_s <= 6
    memory.wait_until_locked()
    assert memory.waited_s <= 6


def test_nothing_is_locked_twice_for_the_same_request(driver):
    memory = driver.memory()
    driver.allow(20)
    memory.lock_ahead([BLOCK, 16 * MIB])
    memory.lock_ahead([BLOCK, 16 * MIB, 16 * MIB, 32 * MIB])
    memory.wait_until_locked()
    assert driver.sizes == [BLOCK, 16 * MIB, 32 * MIB, 16 * MIB]
    memory.take(16 * MIB)
    memory.lock_ahead([BLOCK, 16 * MIB, 16 * MIB, 32 * MIB])
    memory.wait_until_locked()
    assert len(driver.sizes) == 4


def test_training_has_the_driver_half_of_the_time_until_it_waits(driver):
    """The pauses are as long as the allocations: two seconds each, unless a save waits."""
    memory = driver.memory()
    memory.lock_ahead([BLOCK] * 10)
    driver.allow(10)
    wait_until(lambda: driver.sizes)
    time.sleep(0.1)
    assert len(driver.sizes) == 1
    memory.lock_ahead([BLOCK] * 10 + [16])
    time.sleep(0.1)
    assert len(driver.sizes) == 1
    driver.allow(1)
    begin = time.monotonic()
    memory.wait_until_locked()
    assert driver.sizes == [BLOCK] * 10 + [MIB]
    assert time.monotonic() - begin < 2


def test_after_a_stop_only_what_is_locked_is_taken(driver):
    memory = driver.memory()
    memory.lock_ahead([8, 8, BLOCK])
    driver.allow(1)
    wait_until(lambda: memory.locked_bytes)
    memory.stop()
    driver.allow(10)
    memory.wait_until_locked()
    assert memory.waited_s == 0
    wait_until(lambda: page_locking() is None)
    assert memory.missing_bytes([8, BLOCK]) == 8
    assert memory.take(BLOCK) is not None
    assert (memory.take(8), memory.take(64)) == (None, None)
    memory.lock_ahead([128])
    assert page_locking() is None


def test_what_is_released_cannot_be_taken(driver):
    memory = driver.memory()
    driver.allow(2)
    memory.lock_ahead([8])
    memory.wait_until_locked()
    memory.release()
    assert memory.locked_bytes == 0
    assert memory.take(8) is None


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: out of memory\nFor debugging consider"), MemoryError()]
)
def test_where_locking_fails_ordinary_memory_has_to_do_and_one_line_says_so(error, caplog):
    sizes = []

    def fail(count):
        sizes.append(count)
        if len(sizes) == 2:
            raise error
        return torch.empty(count, dtype=torch.uint8)

    memory = PageLockedMemory(fail, device_type="cpu")
    memory.lock_ahead([BLOCK, 3000, 8])
    memory.wait_until_locked()
    (message,) = caplog.messages
    assert "could not page-lock " in message
    assert "\n" not in message
    assert (str(error).splitlines() or ["MemoryError()"])[0] in message
    assert memory.take(BLOCK).nbytes == BLOCK
    assert (memory.take(3000), memory.take(8)) == (None, None)
    assert memory.missing_bytes([3000, 8]) == 3008
    assert sizes == [BLOCK, MIB]
    assert len(caplog.messages) == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can lock memory on this machine")
def test_torchs_own_error_is_recognized(caplog):
    with pytest.raises(RuntimeError):
        lock(8)
    memory = PageLockedMemory()
    memory.lock_ahead([8])
    memory.wait_until_locked()
    assert memory.take(8) is None
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 6)[::2, 1:4],
        torch.randn(1024, 1025).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.tensor([True, False, True]),
    ],
    ids=["channels_last", "view", "bf16", "conj", "scalar", "empty", "bool"],
)
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "at_once"])
def test_a_copy_in_it_is_what_torch_would_give(driver, tensor, ahead):
    memory = driver.memory()
    driver.allow(10)
    if ahead and tensor.nbytes:
        memory.lock_ahead([tensor.nbytes])
        memory.wait_until_locked()
    copy = HostCopy(page_locked=memory)
    made = copy.of(tensor)
    copy.finish()
    assert torch.equal(made, tensor)
    assert (made.dtype, made.stride()) == (tensor.dtype, torch.empty_like(tensor).stride())
    assert made.untyped_storage().nbytes() == tensor.nbytes
    locked = 1 << (tensor.nbytes - 1).bit_length()
    assert driver.sizes == [max(MIB, locked) if ahead else locked] * bool(tensor.nbytes)


ENDS = """
import time
import torch
from hpctrain.checkpoint.page_locked import PageLockedMemory

def lock(count):
    time.sleep(0.05)
    print(count, flush=True)
    return torch.empty(count, dtype=torch.uint8)

PageLockedMemory(lock).lock_ahead([256 << 20] * 100)
"""


def test_a_process_that_ends_waits_for_one_allocation():
    done = subprocess.run([sys.executable, "-c", ENDS], check=True, capture_output=True, text=True, timeout=60)
    assert len(done.stdout.split()) <= 3
    assert done.stderr == ""


def page_locking():
    return next((thread for thread in threading.enumerate() if thread.name == "page-locking"), None)


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
