"""A rank's device from the inside: NCCL with one rank, where things lie, and what is copied without waiting."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.parallel import Parallel
from hpctrain.config.precision import FORMATS
from hpctrain.config.trainer import Trainer
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.metrics.media import capture, encode_png
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.ddp import replicate
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.replica import Replica
from hpctrain.rank.devices import choose_devices
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task
from hpctrain.train.evaluation_results import Gathering
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.step import Loss, TrainStep, Turn
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.trained_module import GradientCheck, TrainedModule
from hpctrain.train.update import Clipping, JointUpdate, Update
from tests.gpu.programs.gpu_tasks import page_locked, spin

pytestmark = pytest.mark.gpu


class Classify(Task):
    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        features, labels = batch
        self.devices = {features.device.type, labels.device.type}
        return cross_entropy(model(features), labels)


def step_over(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    task = Classify()
    clipping = Clipping.configured(Trainer(clip_grad_norm=1.0, clip_grad_value=1.0), optimizer, Replica(model))
    update = Update(optimizer, LearningRate(optimizer, lambda _: 1.0), clipping=clipping)
    meter = Meter(device, names=("train/loss",))
    log = AttachedLog("Task", Position(), total_steps=1, every_steps=1)
    loss = Loss(task, meter, log, precision=FORMATS["bf16"], device=device)
    module = TrainedModule(model, [(parameter, 0) for parameter in model.parameters()])
    joint = JointUpdate([update], meter)
    world = TrainingWorld(rank=0, size=1, local_rank=0, devices=(device,))
    gradients = GradientCheck(loss.method, module, joint, Parallel(), world.share)
    step = TrainStep([Turn(loss, module, joint, gradients)], world, None)
    step.build_replicas(0)
    return task, step


def micro_batch():
    features, labels = page_locked(torch.randn(16, 8)), page_locked(torch.arange(16) % 3)
    return MicroBatch((features, labels), 16, 1, True, labels.numpy())


@pytest.mark.needs_cuda("it counts GPUs")
def test_a_rank_takes_its_share_of_the_visible_gpus():
    environment = ClusterEnvironment.from_environment({})
    visible = torch.cuda.device_count()
    assert choose_devices(environment, 1, use_gpu=True) == (torch.device("cuda", 0),)
    assert len(choose_devices(environment, None, use_gpu=True)) == visible


@pytest.mark.core
def test_the_model_and_the_batch_are_on_the_device_and_a_step_never_waits_for_it(device, no_waits):
    model = nn.Linear(8, 3).to(device)
    task, step = step_over(model, device)
    step(0, iter([micro_batch()]))
    batches = [micro_batch() for _ in range(3)]
    with no_waits():
        for number, batch in enumerate(batches, 1):
            step(number, iter([batch]))
    assert task.devices == {device.type}
    assert step.metrics.keys() == {"train/lr"}


class Halves(nn.Module):
    """On two devices."""

    def __init__(self, devices):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).to(devices[0]), nn.Linear(8, 3).to(devices[1])

    def forward(self, features):
        return self.second(self.first(features).to(self.second.weight.device)).to(features.device)


def learns(model, world, options):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    # as in a world of several, which alone would have a replica
    several = dataclasses.replace(world, size=2)
    replica = replicate(model, several, Parallel(**options))
    _, step = step_over(replica, world.device)
    step(0, iter([micro_batch()]))
    return not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.core
@pytest.mark.needs_cuda("NCCL")
@pytest.mark.parametrize("options", [{}, {"gradient_compression": "bf16"}, {"static_graph": True}], ids=str)
def test_nccl_with_one_rank(joined, device, options):
    world = joined(device)
    assert dist.get_backend() == "nccl"
    assert world.sum_(torch.ones(2, device=device)).tolist() == [1.0, 1.0]
    world.barrier()
    assert learns(nn.Linear(8, 3).to(device), world, options)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_nccl_with_a_model_on_two_devices_of_a_rank(joined):
    devices = torch.device("cuda", 0), torch.device("cuda", 1)
    world = joined(*devices)
    assert dist.get_backend() == "nccl"
    for device in devices:
        tensor = torch.ones(2, device=device)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
    assert learns(Halves(devices), world, {})


@pytest.mark.core
def test_media_are_copied_without_waiting_and_as_they_were_at_the_call(device, no_waits):
    pixels = torch.zeros(3, 64, 64, device=device, dtype=torch.bfloat16)
    with no_waits():
        spin(0.05)
        captured = capture("T.log", "image", pixels, {})
        pixels.fill_(1.0)
    assert captured.encode() == encode_png(np.zeros((3, 64, 64), np.float32))


@pytest.mark.needs_cuda("on the CPU, nothing is copied later")
def test_values_per_sample_come_to_the_host_while_the_next_batch_is_computed(device):
    world = TrainingWorld(rank=0, size=1, local_rank=0, devices=(device,))
    gathering = Gathering("Mine.evaluate", world)
    for turn in range(3):
        values = torch.full((2, 4), float(turn), device=device, dtype=torch.bfloat16)
        gathering.add(turn, 2, {"values": values, "ragged": [torch.arange(turn + 1, device=device)] * 2})
        # one batch is under way
        assert len(gathering._columns["values"].parts) == turn
        assert all(tensor.is_pinned() for _, tensor in gathering._pending)
    found = gathering.gather(interleaved=False)
    assert found["values"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert [each.tolist() for each in found["ragged"][::2]] == [[0], [0, 1], [0, 1, 2]]
    assert not found["values"].is_pinned()
