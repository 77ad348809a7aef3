"""Saves of a GPU's state: page-locked copies, and what they hold while training goes on."""

from __future__ import annotations

import shutil
import time

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.compare_saves import compare_saves
from hpctrain.checkpoint.rng import rng_state
from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.checkpoint.state import Head, LiveState
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim, Ledger
from tests.gpu.programs.gpu_tasks import ON_CPU, is_page_locked, page_locked, synchronize

pytestmark = pytest.mark.gpu
WIDTH, LAYERS, GB = 2048, 2 if ON_CPU else 20, 1e9
"""84 million parameters: with the two moments of Adam, a save has 1 GB. A rehearsal on the CPU has a tenth of them."""
STEPS = 4
ROUNDS = 5
LAUNCH_S = 100e-6
"""Most seconds that a save may spend on each tensor besides its copy; about 50 us are usual."""


class Large:
    """A model whose save has 1 GB.

    Args:
        device: of the model.
        folder: for its runs.
    """

    def __init__(self, device, folder):
        torch.manual_seed(0)
        self.device = device
        self.folder = folder
        # normed, so that each step changes the weights of every layer
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self):
        """Launch a step, without waiting for it."""
        self.model(torch.ones(8, WIDTH, device=self.device)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, step):
        head = Head(step=step, samples_seen=8 * step, world_size=1, config_digest="c")
        return LiveState(self.model, {"": self.optimizer}, head=head, rng=[rng_state([] if ON_CPU else [self.device])])

    def saver(self, name, *, asynchronous):
        directory = RunDirectory.at(self.folder / name)
        directory.create(0o750)
        ledger = Ledger(directory)
        policy = Checkpoint(asynchronous=asynchronous, keep=2 * STEPS)
        saver = CheckpointSaver(directory, Claim(ledger, ledger.claim()), policy, StopRequest())
        return saver, directory


@pytest.fixture
def large(device, tmp_path):
    yield Large(device, tmp_path)
    # pytest keeps the folders of three sessions
    shutil.rmtree(tmp_path)
    if not ON_CPU:
        torch.cuda.empty_cache()


@pytest.mark.core
def test_each_save_in_the_background_has_what_one_has_for_which_training_waits(large):
    """Training changes all weights at once after each copy, while that is written."""
    (behind, run), (waiting, other) = large.saver("a", asynchronous=True), large.saver("b", asynchronous=False)
    behind.lock_ahead(large.state(0))
    large.step()
    overlapped = []
    for step in range(1, STEPS + 1):
        waiting.save(large.state(step), wait=True)
        behind.save(large.state(step), wait=False)
        large.step()
        synchronize()
        overlapped.append(behind.busy)
        large.step()
        behind.finish()
        found = compare_saves(run.checkpoint(step), other.checkpoint(step))
        assert (found.differing, found.numbers, found.unreadable) == ([], [], {})
        assert found.equal == found.tensors[0] == found.tensors[1] > 4 * LAYERS * 4
        saved = torch.load(run.checkpoint(step) / "model.pt", weights_only=True)
        changed = [not torch.equal(saved[name], live.cpu()) for name, live in large.model.state_dict().items()]
        assert all(changed)
        for directory in (run, other):
            shutil.rmtree(directory.checkpoint(step))
    assert any(overlapped)
    size = sum(tensor.nbytes for tensor in copies(behind))
    assert size >= (0.1 if ON_CPU else 1) * GB
    assert all(is_page_locked(tensor) for tensor in copies(behind))
    assert behind._page_locked.locked_bytes < 1.1 * size


@pytest.mark.needs_cuda("it times copies to page-locked memory")
def test_the_second_save_takes_little_longer_than_a_copy_of_its_bytes_and_reuses_its_buffers(large, device):
    saver, directory = large.saver("a", asynchronous=True)
    saver.lock_ahead(large.state(0))
    places, stalls = [], []
    for step in range(1, ROUNDS):
        large.step()
        synchronize()
        saver.save(large.state(step), wait=False)
        stalls.append(saver.stall_s)
        saver.finish()
        shutil.rmtree(directory.checkpoint(step))
        assert all(is_page_locked(tensor) for tensor in copies(saver))
        places.append([tensor.data_ptr() for tensor in copies(saver)])
    assert all(again == places[1] for again in places[2:])
    assert len(set(places[1])) == len(places[1]) > 4 * LAYERS * 3
    size = sum(tensor.nbytes for tensor in copies(saver))
    copy_s = pinned_copy_s(size, device)
    # the host launches a copy for each tensor, and some tensors are so small that this takes longer than the copy
    longest_s = 1.5 * copy_s + LAUNCH_S * len(places[1])
    assert min(stalls[1:]) <= longest_s, f"stalls {stalls} s, {size / GB:.2f} GB at {size / GB / copy_s:.1f} GB/s"


def copies(saver):
    """Those of weights and optimizer, which are on the GPU."""
    kept = saver._buffers
    return list(iterate_tensors((kept.model, kept.optimizer)))


def pinned_copy_s(size, device):
    """The shortest time of a copy of so many bytes into page-locked memory."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = page_locked(torch.empty(size, dtype=torch.uint8))
    times = []
    for _ in range(ROUNDS):
        synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def test_a_run_that_saves_each_step_in_the_background_saves_what_one_does_that_waits(shells, at_once):
    words = (
        "task=custom",
        "task._target_=tests.gpu.programs.gpu_tasks.Pictures",
        "+task.width=64",
        "+task.dropout=0.3",
        "trainer.deterministic=true",
        "trainer.ema_decay=0.9",
        "trainer.max_steps=8",
        "trainer.global_batch_size=16",
        "checkpoint.every_steps=1",
        "checkpoint.keep=100",
    )

    def train(name):
        shell = shells(name)
        # no step begins before the last save is written, or its own would be left out
        shell.train(*words, f"checkpoint.asynchronous={name}", TRIAL_SLEEP="1")
        return shell.run

    behind, waiting = at_once(train, ["true", "false"])
    assert sorted(behind.checkpoint_steps()) == list(range(1, 9))
    for step in range(1, 9):
        found = compare_saves(behind.checkpoint(step), waiting.checkpoint(step))
        assert (found.differing, found.unreadable) == ([], {})
        assert set(found.numbers) <= {"state.pt:extra.ending.trained_s"}
        assert found.equal > 20
