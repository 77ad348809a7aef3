import os
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.page_locked import PageLockedMemory
from hpctrain.checkpoint.saver import WRITER_NICENESS, CheckpointSaver
from hpctrain.checkpoint.state import Head, LiveState
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import CheckpointDamagedError, CheckpointError, SupersededError
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory

MIB = 1 << 20


class Watched(LiveState):
    """Records the addresses of the weights in each snapshot."""

    addresses: ClassVar = []

    def capture(self, *arguments, **keywords):
        made = super().capture(*arguments, **keywords)
        self.addresses.append(made.model["weight"].data_ptr())
        return made


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory.at(tmp_path / "R")
    directory.create(0o750)
    return directory


@pytest.fixture
def training():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()

    def state(step):
        head = Head(step=step, samples_seen=step, world_size=1, config_digest="")
        return Watched(model, {"": optimizer}, head=head)

    return model, state


@pytest.fixture
def stop():
    return StopRequest()


@pytest.fixture
def make(run, stop):
    """Build a saver; ``ownership`` is called in place of the check of its claim."""

    def saver(ownership=lambda: None, *, clock=time.monotonic, free_bytes=lambda: None, page_locked=None, **policy):
        claim, policy = SimpleNamespace(require_ownership=ownership, attempt=1), Checkpoint(**policy)
        return CheckpointSaver(run, claim, policy, stop, clock=clock, free_bytes=free_bytes, page_locked=page_locked)

    return saver


def test_training_changes_the_weights_while_they_are_written(run, make, training):
    model, snapshot = training
    may_write = threading.Event()
    saver = make(lambda: None if may_write.wait(10) else pytest.fail("the test did not let it write"))
    before = model.weight.detach().clone()
    saver.save(snapshot(1), wait=False)
    assert saver.busy
    with torch.no_grad():
        model.weight.add_(1.0)
    may_write.set()
    saver.finish()
    saved = torch.load(run.checkpoint(1) / "model.pt", weights_only=True)
    assert torch.equal(saved["weight"], before)
    assert not saver.busy


def test_the_buffers_are_kept_from_save_to_save(make, training):
    model, snapshot = training
    moments = [snapshot(step) for step in (1, 2, 3)]
    saver = make()
    Watched.addresses.clear()
    for moment in moments:
        saver.save(moment, wait=True)
    assert len(set(Watched.addresses)) == 1
    assert model.weight.data_ptr() not in Watched.addresses


def test_a_second_save_waits_for_the_first(run, make, training):
    _, snapshot = training
    saver = make(lambda: time.sleep(0.05))
    saver.save(snapshot(1), wait=False)
    saver.save(snapshot(2), wait=True)
    assert [info.step for info in list_checkpoints(run) if info.intact] == [1, 2]


@pytest.fixture
def no_folder(run):
    """The folder of checkpoints is gone until the fixture's value is called."""
    run.checkpoints.rmdir()
    run.checkpoints.write_text("no folder any more")

    def mend():
        run.checkpoints.unlink()
        run.checkpoints.mkdir()

    return mend


def test_a_failed_write_stops_the_ranks_at_once_and_is_raised_at_the_next_call(run, make, stop, training, no_folder):
    _, snapshot = training
    saver = make()
    saver.save(snapshot(1), wait=False)
    wait_until(lambda: stop.error is not None)
    with pytest.raises(CheckpointError, match="step 1") as caught:
        saver.finish()
    assert caught.value is stop.error
    no_folder()
    saver.save(snapshot(2), wait=True)
    assert run.checkpoint_steps() == [2]


def test_a_failure_that_is_tolerated_hinders_no_later_save(run, make, stop, training, no_folder, caplog):
    _, snapshot = training
    saver = make(on_error="warn")
    saver.save(snapshot(1), wait=False)
    wait_until(lambda: "training continues" in caplog.text)
    no_folder()
    saver.save(snapshot(2), wait=False)
    saver.finish()
    assert run.checkpoint_steps() == [2]
    assert stop.error is None


@pytest.mark.parametrize("on_error", ["fail", "warn"])
def test_a_failed_write_that_is_waited_for_is_the_callers(make, stop, training, no_folder, on_error):
    _, snapshot = training
    with pytest.raises(CheckpointError, match="step 1"):
        make(on_error=on_error).save(snapshot(1), wait=True)
    assert stop.error is None


def test_a_superseded_attempt_stops_whatever_is_tolerated(make, stop, training):
    _, snapshot = training

    def superseded():
        raise SupersededError("attempt 2 owns the run")

    saver = make(superseded, on_error="warn")
    saver.save(snapshot(1), wait=False)
    with pytest.raises(SupersededError):
        saver.finish()
    assert isinstance(stop.error, SupersededError)


def test_a_superseded_attempt_publishes_nothing(run, make, training):
    _, snapshot = training

    def superseded():
        raise SupersededError("attempt 2 owns the run")

    saver = make(superseded)
    with pytest.raises(SupersededError):
        saver.save(snapshot(1), wait=True)
    assert run.checkpoint_steps() == []


def test_without_a_background_it_is_written_when_save_returns(run, make, training):
    _, snapshot = training
    saver = make(asynchronous=False)
    saver.save(snapshot(1), wait=False)
    assert run.checkpoint_steps() == [1]
    assert saver.stall_s > 0


class Disk:
    """Takes ten seconds for each write, once it may; a clock."""

    def __init__(self):
        self.now, self.may_write = 0.0, threading.Event()

    def __call__(self):
        return self.now

    def own(self):
        """Asked before a write and after it."""
        assert self.may_write.wait(20)
        self.now += 5


def test_a_save_takes_as_long_as_its_write_and_not_as_its_copy(make, training):
    _, snapshot = training
    disk = Disk()
    saver = make(disk.own, clock=disk)
    assert saver.estimated_save_s == 0
    saver.save(snapshot(1), wait=False)
    disk.now += 2
    assert saver.estimated_save_s == 2  # none has ended yet: no less than this one so far
    disk.may_write.set()
    saver.finish()
    assert (saver.stall_s, saver.estimated_save_s) == (0, 12)
    disk.may_write.clear()
    saver.save(snapshot(2), wait=False)
    disk.now += 2
    assert saver.estimated_save_s == 10 + 12  # the rest of the one in flight goes first
    disk.may_write.set()
    saver.finish()
    assert saver.estimated_save_s == 12


def test_reading_back_finds_what_the_disk_did(run, make, training):
    _, snapshot = training

    def flip_a_bit():
        for path in run.checkpoints.glob(".*/model.pt"):
            content = bytearray(path.read_bytes())
            content[200] ^= 1
            path.write_bytes(content)

    with pytest.raises(CheckpointDamagedError, match="just written and is not intact"):
        make(flip_a_bit, verify="after_save").save(snapshot(1), wait=True)


def test_the_writing_thread_yields_to_training(make, training):
    _, snapshot = training
    before, niceness = os.getpriority(os.PRIO_PROCESS, 0), []
    saver = make(lambda: niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    saver.save(snapshot(1), wait=True)
    assert set(niceness) == {max(before, WRITER_NICENESS)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_copy_that_does_not_fit_into_memory_is_not_made(run, make, training, caplog):
    model, snapshot = training
    needed = snapshot(1).missing_bytes(PageLockedMemory())
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert 3 * weights <= needed < 3 * weights + 100
    saver = make(free_bytes=lambda: needed)
    Watched.addresses.clear()
    saver.save(snapshot(1), wait=False)
    assert Watched.addresses == [model.weight.data_ptr()]
    assert run.checkpoint_steps() == [1]
    assert "training waits for each save" in caplog.text
    make(free_bytes=lambda: 2 * needed).save(snapshot(2), wait=True)
    assert model.weight.data_ptr() not in Watched.addresses[1:]


def test_an_old_one_stays_until_the_new_one_was_read_back(run, make, training):
    """What the disk makes of the bytes is known only then."""
    _, snapshot = training

    def spoil():
        # asked for the second time, all is written and nothing is published
        for path in run.checkpoints.glob(".tmp-step_00000003-*/model.pt"):
            path.write_bytes(path.read_bytes()[:-1] + b"!")

    saver = make(spoil, verify="after_save")
    for step in (1, 2):
        saver.save(snapshot(step), wait=True)
    with pytest.raises(CheckpointDamagedError):
        saver.save(snapshot(3), wait=True)
    assert [info.step for info in list_checkpoints(run) if info.intact] == [1, 2]


def test_a_hurried_save_leaves_the_old_ones_to_the_next_attempt(run, make, training):
    _, snapshot = training
    saver = make()
    for step in (1, 2, 3):
        saver.save(snapshot(step), wait=True, retain=False)
    assert run.checkpoint_steps() == [1, 2, 3]
    make().retain_in_background(3)
    wait_until(lambda: run.checkpoint_steps() == [2, 3])


def test_memory_is_locked_before_the_first_save_and_not_in_it(make, untrained, driver):
    model, optimizer, state = untrained
    memory = driver.memory()
    saver = make(clock=driver.clock, page_locked=memory)
    saver.lock_ahead(state(0))
    assert driver.sizes == []
    driver.allow(100)
    step(model, optimizer)
    memory.wait_until_locked()
    assert driver.sizes == [MIB]
    assert threading.current_thread() not in driver.threads
    saver.save(state(1), wait=False)
    num_tensors = len(list(tensors_of(model.state_dict(), optimizer.state_dict())))
    assert memory.missing_bytes(state(1).page_locked_sizes(memory)) == MIB, "all of it is taken"
    places = [tensor.data_ptr() for tensor in tensors_of(saver._buffers.model, saver._buffers.optimizer)]
    assert len(set(places)) == num_tensors
    assert max(places) - min(places) < MIB
    step(model, optimizer)
    saver.save(state(2), wait=False)
    saver.finish()
    assert [tensor.data_ptr() for tensor in tensors_of(saver._buffers.model, saver._buffers.optimizer)] == places
    assert driver.sizes == [MIB]


@pytest.fixture
def slow_locking(driver):
    """A clock that writes and allocations advance, and memory by this clock."""
    disk = Disk()

    def lock(count):
        memory = driver(count)
        disk.now += 1000
        return memory

    return disk, PageLockedMemory(lock, device_type="cpu", clock=disk)


def test_a_save_that_waits_for_the_locking_does_not_count_it(make, untrained, driver, slow_locking):
    """Its duration is what a stop compares with the grace time, and its stall is what decides the next interval."""
    model, optimizer, state = untrained
    disk, memory = slow_locking
    saver = make(disk.own, clock=disk, page_locked=memory)
    saver.lock_ahead(state(0))
    step(model, optimizer)
    threading.Timer(0.2, driver.allow, args=(100,)).start()
    saver.save(state(1), wait=False)
    assert disk.now == 1000 * len(driver.sizes) > 0
    disk.may_write.set()
    saver.finish()
    assert (saver.estimated_save_s, saver.stall_s) == (10, 0)


def test_a_save_before_which_nothing_was_locked_does_not_count_the_locking(make, training, driver, slow_locking):
    _, snapshot = training
    disk, memory = slow_locking
    driver.allow(100)
    saver = make(disk.own, clock=disk, page_locked=memory)
    saver.save(snapshot(1), wait=False)
    assert driver.sizes == [MIB], "of all tensors together"
    assert disk.now == 1000
    disk.may_write.set()
    saver.finish()
    assert (saver.estimated_save_s, saver.stall_s) == (10, 0)


def test_the_save_at_the_end_of_an_attempt_takes_what_is_locked_and_locks_no_more(
    run, make, untrained, driver, small_blocks
):
    model, optimizer, state = untrained
    memory = driver.memory()
    saver = make(page_locked=memory)
    saver.lock_ahead(state(0))
    step(model, optimizer)
    driver.allow(1)
    wait_until(lambda: memory.locked_bytes)
    saver.save(state(1), wait=True)
    assert (driver.sizes, memory.waited_s) == ([small_blocks], 0)
    driver.allow(100)
    saved = torch.load(run.checkpoint(1) / "model.pt", weights_only=True)
    assert torch.equal(saved["weight"], model.weight)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_locked", [0, 2])
def test_where_locking_fails_saves_go_on_in_ordinary_memory(run, make, untrained, caplog, num_locked):
    model, optimizer, state = untrained
    sizes = []

    def lock(count):
        sizes.append(count)
        if len(sizes) > num_locked:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return torch.empty(count, dtype=torch.uint8)

    saver = make(page_locked=PageLockedMemory(lock, device_type="cpu"))
    saver.lock_ahead(state(0))
    for number in (1, 2):
        step(model, optimizer)
        saver.save(state(number), wait=False)
        saver.finish()
        saved = torch.load(run.checkpoint(number) / "model.pt", weights_only=True)
        assert torch.equal(saved["weight"], model.weight)
    assert len(sizes) == num_locked + 1
    assert [message for message in caplog.messages if "page-lock" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_nothing_is_locked_ahead_if_the_copy_does_not_fit(make, untrained, driver, caplog):
    model, optimizer, state = untrained
    memory = driver.memory()
    driver.allow(100)
    saver = make(page_locked=memory, free_bytes=lambda: 100)
    saver.lock_ahead(state(0))
    step(model, optimizer)
    saver.save(state(1), wait=False)
    assert (driver.sizes, memory.locked_bytes) == ([], 0)
    assert "training waits for each save" in caplog.text


def test_what_is_locked_already_need_not_be_free_any_more(make, untrained, driver, caplog):
    model, optimizer, state = untrained
    memory = driver.memory()
    driver.allow(100)
    step(model, optimizer)
    needed = state(1).missing_bytes(memory)
    free = iter([2 * needed, 0, 0])
    saver = make(page_locked=memory, free_bytes=lambda: next(free))
    saver.lock_ahead(state(1))
    step(model, optimizer)
    memory.wait_until_locked()
    assert memory.locked_bytes == needed == MIB
    saver.save(state(2), wait=False)
    saver.finish()
    assert caplog.messages == []


@pytest.mark.usefixtures("small_blocks")
def test_each_optimizer_has_its_state_locked_after_its_own_first_step(make, driver):
    model = nn.Linear(3, 5)
    optimizers = {"w": torch.optim.AdamW([model.weight]), "b": torch.optim.AdamW([model.bias])}
    state = LiveState(model, optimizers, head=Head(step=0, samples_seen=0, world_size=1, config_digest=""))
    memory = driver.memory()
    driver.allow(100)
    saver = make(page_locked=memory)
    saver.lock_ahead(state)
    counts = []
    for name in ("b", "b", "w"):
        step(model, optimizers[name])
        memory.wait_until_locked()
        counts.append(len(driver.sizes))
    assert counts == [2 + 3, 2 + 3, 2 + 3 + 3]


def test_tied_weights_are_locked_once(make, driver):
    model = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)])
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters())
    state = LiveState(model, {"": optimizer}, head=Head(step=0, samples_seen=0, world_size=1, config_digest=""))
    memory = driver.memory()
    driver.allow(100)
    make(page_locked=memory).lock_ahead(state)
    step(model[0], optimizer)
    memory.wait_until_locked()
    assert memory.missing_bytes([60]) == 0
    assert memory.missing_bytes([60, 60]) > 0


def test_without_a_gpu_nothing_is_locked_and_optimizers_have_no_hook(make, untrained, driver):
    _, optimizer, state = untrained
    make(page_locked=PageLockedMemory(driver)).lock_ahead(state(0))
    assert not optimizer._optimizer_step_post_hooks


def test_optimizers_lose_the_hook_with_the_first_save(make, untrained, driver):
    model, optimizer, state = untrained
    driver.allow(100)
    saver = make(page_locked=driver.memory())
    saver.lock_ahead(state(0))
    step(model, optimizer)
    assert optimizer._optimizer_step_post_hooks
    saver.save(state(1), wait=False)
    saver.finish()
    assert not optimizer._optimizer_step_post_hooks


@pytest.fixture
def untrained():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def state(step):
        head = Head(step=step, samples_seen=step, world_size=1, config_digest="")
        return LiveState(model, {"": optimizer}, head=head)

    return model, optimizer, state


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def tensors_of(*trees):
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            yield tree
        elif isinstance(tree, dict):
            yield from tensors_of(*tree.values())
        elif isinstance(tree, list | tuple):
            yield from tensors_of(*tree)


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_shortage_of_room_is_a_warning_before_the_first_save(make, run, training, caplog, asynchronous):
    _, state = training
    saver = make(asynchronous=asynchronous, keep=10**15)
    for step in (1, 2):
        saver.save(state(step), wait=True)
    (warning,) = [message for message in caplog.messages if "are needed: " in message]
    assert warning.startswith(f"{run.checkpoints}: ")
    assert (
        "(checkpoint.keep=1000000000000000 and one while it is written); the checkpoint of step 1 still fits; "
        in warning
    )
    assert run.checkpoint_steps() == [1, 2]


def test_where_there_is_room_the_first_save_logs_nothing(make, training, caplog):
    _, state = training
    make().save(state(1), wait=True)
    assert not caplog.messages
