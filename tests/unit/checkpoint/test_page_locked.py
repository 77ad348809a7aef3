from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch

from hpctrain.checkpoint.host_memory import HostCopy
from hpctrain.checkpoint.page_locked import PageLockedMemory, lock, page_locked_bytes

KIB = 1 << 10
MIB = 1 << 20


@pytest.mark.parametrize(
    ("count", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (MIB, MIB), (MIB + 1, 2 * MIB), (3 << 30, 4 << 30)]
)
def test_page_locked_memory_comes_in_powers_of_two(count, taken):
    assert page_locked_bytes(count) == taken


def test_it_is_locked_in_a_thread_and_taken_without_waiting(driver):
    memory = driver.memory()
    memory.lock_ahead([8, 100, 8])
    assert memory.ready_bytes == 0
    driver.allow(3)
    memory.wait_until_locked()
    assert threading.main_thread() not in driver.threads
    assert memory.ready_bytes == 8 + 128 + 8
    waited_s = memory.waited_s
    taken = [memory.take(count) for count in (8, 8, 100)]
    assert [tensor.nbytes for tensor in taken] == [8, 8, 100]
    assert len({tensor.data_ptr() for tensor in taken}) == 3
    assert (memory.waited_s, memory.ready_bytes) == (waited_s, 0)


def test_what_is_missing_is_locked_while_the_caller_waits(driver):
    memory = driver.memory()
    driver.allow(1)
    assert memory.take(24).nbytes == 24
    assert driver.threads == {threading.current_thread()}
    assert memory.waited_s == 2


def test_waiting_for_the_thread_counts_as_waiting(driver):
    memory = driver.memory()
    memory.lock_ahead([8] * 3)
    driver.allow(3)
    memory.wait_until_locked()
    assert 0 < memory.waited_s <= 6
    memory.wait_until_locked()
    assert memory.waited_s <= 6


def test_nothing_is_locked_twice_for_the_same_request(driver):
    memory = driver.memory()
    driver.allow(20)
    memory.lock_ahead([8, 16])
    memory.lock_ahead([8, 16, 16, 32])
    memory.wait_until_locked()
    assert Counter(driver.sizes) == {8: 1, 16: 2, 32: 1}
    memory.take(8)
    memory.lock_ahead([8, 16, 16, 32])
    memory.wait_until_locked()
    assert len(driver.sizes) == 4


def test_training_has_the_driver_half_of_the_time_until_it_waits(driver):
    """The pauses are as long as the allocations: two seconds each, unless a save waits."""
    memory = driver.memory()
    memory.lock_ahead([8] * 10)
    driver.allow(10)
    wait_until(lambda: driver.sizes)
    time.sleep(0.1)
    assert len(driver.sizes) == 1
    memory.lock_ahead([8] * 10 + [16])
    time.sleep(0.1)
    assert len(driver.sizes) == 1
    driver.allow(1)
    begin = time.monotonic()
    memory.wait_until_locked()
    assert driver.sizes == [8] * 10 + [16]
    assert time.monotonic() - begin < 2


def test_after_a_stop_only_what_is_locked_is_taken(driver):
    memory = driver.memory()
    memory.lock_ahead([8, 16, 32])
    driver.allow(1)
    wait_until(lambda: memory.ready_bytes)
    memory.stop()
    driver.allow(10)
    memory.wait_until_locked()
    assert memory.waited_s == 0
    assert memory.take(8) is not None
    wait_until(lambda: page_locking() is None)
    assert (memory.take(32), memory.take(64)) == (None, None)
    memory.lock_ahead([128])
    assert page_locking() is None


def test_what_is_released_cannot_be_taken(driver):
    memory = driver.memory()
    driver.allow(2)
    memory.lock_ahead([8])
    memory.wait_until_locked()
    memory.release()
    assert memory.ready_bytes == 0
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
    memory.lock_ahead([10, 3000, 8])
    memory.wait_until_locked()
    (message,) = caplog.messages
    assert "could not page-lock " in message
    assert "\n" not in message
    assert (str(error).splitlines() or ["MemoryError()"])[0] in message
    assert memory.take(10).nbytes == 10
    assert (memory.take(3000), memory.take(8)) == (None, None)
    assert sizes == [10, 3000]
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


def test_the_size_of_a_copy_is_rounded_up_only_where_it_is_locked(driver):
    memory, other = driver.memory(), PageLockedMemory(driver, device_type="cuda")
    tensor = torch.empty(5, dtype=torch.float32)
    assert (memory.bytes_of(tensor), other.bytes_of(tensor)) == (32, 20)
    memory.stop()
    assert memory.bytes_of(tensor) == 20


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
    if ahead:
        memory.lock_ahead([tensor.nbytes])
        memory.wait_until_locked()
    copy = HostCopy(page_locked=memory)
    made = copy.of(tensor)
    copy.finish()
    assert torch.equal(made, tensor)
    assert (made.dtype, made.stride()) == (tensor.dtype, torch.empty_like(tensor).stride())
    assert made.untyped_storage().nbytes() == tensor.nbytes
    assert driver.sizes == [tensor.nbytes] * bool(ahead or tensor.nbytes)


ENDS = """
import time
import torch
from hpctrain.checkpoint.page_locked import PageLockedMemory

def lock(count):
    time.sleep(0.05)
    print(count, flush=True)
    return torch.empty(count, dtype=torch.uint8)

PageLockedMemory(lock).lock_ahead([8] * 10_000)
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
