"""What a step waits for: nothing, by torch's sync debug mode; in fp16, once for whether the gradients overflowed."""

from __future__ import annotations

import dataclasses
from itertools import islice

import pytest
import torch

from hpctrain.data.micro_batch import CopyInBackground, MoveOnDemand
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.train.profiling.sampler import SYNC_WARNING
from hpctrain.train.training import build
from tests.gpu.programs.gpu_tasks import ON_CPU, is_page_locked

pytestmark = pytest.mark.gpu
WARM_UP, STEPS, ACCUMULATION = 12, 6, 3
"""DDP times its first ten steps, and waits for its clocks in the following ones."""
WORDS = (
    "task=custom",
    "task._target_=tests.gpu.programs.gpu_tasks.Pictures",
    "+task.num_samples=400",
    "+task.noise=true",
    "+task.dropout=0.1",
    "trainer.global_batch_size=24",
    "trainer.micro_batch_size=8",
    "trainer.ema_decay=0.9",
    "trainer.clip_grad_norm=1.0",
    "trainer.clip_grad_value=0.5",
    "trainer.max_steps=100",
    "trainer.max_epochs=null",
    "cluster.gpus_per_node=null",
    "parallel.gradient_as_bucket_view=true",
)
"""Accumulation of 3: two micro-batches of a step are in DDP's `no_sync`."""
CASES = {
    "fp32": [],
    "loading processes": ["data.num_workers=2"],
    "bf16, fused AdamW": ["precision=bf16", "optimizer.fused=true"],
    "fused SGD, loading processes": ["optimizer=sgd", "optimizer.fused=true", "data.num_workers=2"],
    "bf16_pure, channels last": ["precision=bf16_pure", "trainer.channels_last=true"],
    "norm logged": ["trainer.clip_grad_norm=null", "trainer.log_grad_norm=true", "schedule=cosine"],
}
SCALED = {
    "fp16": ["precision=fp16"],
    "fp16, fused": ["precision=fp16", "optimizer.fused=true"],
    "fp16_master": ["precision=fp16_master"],
    "fp16_master, fused, loading processes": ["precision=fp16_master", "optimizer.fused=true", "data.num_workers=2"],
}


class Steps:
    """The steps of a training in this process, and its batches on their way to the GPU."""

    def __init__(self, config, world):
        self.training = build(config, world)
        self.training.step.prepare(0)
        assert self.training.ema is not None
        kind = MoveOnDemand if ON_CPU else CopyInBackground
        self.micro_batches = self.training.data.loader(0).micro_batches(kind(self._move, world.device))
        self.done = 0
        self.were_pinned = []

    def _move(self, batch, device):
        self.were_pinned += [is_page_locked(tensor) for tensor in batch]
        return self.training.task.to_device(batch, device)

    def steps(self, count):
        for _ in range(count):
            self.training.step(self.done, self.micro_batches)
            self.done += 1


@pytest.fixture
def training(composer, device):
    """A training after some steps, by the words that choose it, perhaps of a rank among others."""
    made = []

    def make(words, world=None):
        world = world or TrainingWorld(rank=0, size=1, local_rank=0, devices=(device,))
        built = Steps(composer.compose([*WORDS, *words], world_size=1), world)
        made.append(built)
        built.steps(WARM_UP)
        return built

    yield make
    for built in made:
        built.micro_batches.close()


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_no_step_waits_for_the_gpu(training, no_waits, name):
    steps = training(CASES[name])
    with no_waits():
        steps.steps(STEPS)
    means = steps.training.meter.means()
    assert means["train/loss"] > 0


@pytest.mark.core
@pytest.mark.needs_cuda("NCCL")
@pytest.mark.parametrize("name", ["fp32", "bf16, fused AdamW", "loading processes"])
def test_no_step_waits_for_the_gpu_with_ddp_over_nccl(training, joined, device, no_waits, name):
    world = joined(device)
    assert world.backend == "nccl"
    # as in a world of several, which alone would have a replica; its control group must not be asked for a second rank
    several = dataclasses.replace(world, size=2, control=None)
    steps = training([*CASES[name], "trainer.global_batch_size=48"], several)
    (turn,) = steps.training.step.turns
    assert turn.module.ddp is not None
    assert steps.training.data.plan.micro_batches(48) == ACCUMULATION
    with no_waits():
        steps.steps(STEPS)


@pytest.mark.parametrize("name", SCALED)
def test_a_step_under_a_loss_scale_waits_at_most_once(training, counted_waits, name):
    steps = training(SCALED[name])
    with counted_waits() as found:
        steps.steps(STEPS)
    waits = [str(warning.message) for warning in found if str(warning.message).startswith(SYNC_WARNING)]
    assert len(waits) <= STEPS
    assert steps.training.step.metrics["train/loss_scale"] > 0


@pytest.mark.needs_cuda("nothing waits for the CPU")
def test_a_wait_is_counted_and_refused(device, counted_waits, no_waits):
    value = torch.ones(1, device=device)
    with counted_waits() as found:
        value.item()
        value.tolist()
    assert [str(warning.message).startswith(SYNC_WARNING) for warning in found] == [True, True]
    with no_waits(), pytest.raises(RuntimeError, match=SYNC_WARNING):
        value.item()


@pytest.mark.parametrize("name", ["fp32", "loading processes"])
def test_the_batches_of_a_training_are_on_the_gpu_and_were_page_locked(training, device, name):
    steps = training(CASES[name])
    for micro_batch in islice(steps.micro_batches, 3):
        assert micro_batch.on_device
        assert {tensor.device.type for tensor in micro_batch.batch} == {device.type}
    assert len(steps.were_pinned) >= 3 * (WARM_UP * ACCUMULATION + 3)
    assert all(steps.were_pinned)


def test_logged_scalars_stay_on_the_device(device, no_waits):
    meter = Meter(device)
    value, count = torch.tensor(2.0, device=device), torch.tensor(3, device=device)
    with no_waits():
        for _ in range(2):
            meter.add_value("train/a", value, 5)
            meter.add_value("train/b", value, count)
            meter.add_value("train/c", 1.5, 2)
            meter.add_value("train/d", torch.tensor(0.5), 2)
    assert meter.means() == {"train/a": 2.0, "train/b": 2.0, "train/c": 1.5, "train/d": 0.5}
