from __future__ import annotations

import itertools
import signal
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.config.parallel import Parallel
from hpctrain.config.precision import FORMATS
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.metrics.meter import Meter
from hpctrain.metrics.progress import open_bar
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import STOP_SIGNALS, StopRequest
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.times import Times
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task
from hpctrain.train.attempt import train
from hpctrain.train.checkpointing import Checkpointing
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.loop import AttemptContext
from hpctrain.train.step import Loss, TrainStep, Turn
from hpctrain.train.stopping import Stopping
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.trained_module import GradientCheck, TrainedModule
from hpctrain.train.training import build
from hpctrain.train.update import JointUpdate, Update

CPU = torch.device("cpu")
SMALL = (
    "task=custom",
    "task._target_=tests.unit.train.small_task.Small",
    "trainer.global_batch_size=6",
    "trainer.micro_batch_size=3",
    "trainer.max_epochs=null",
    "trainer.max_steps=10",
    "trainer.eval_every_steps=4",
    "logger.every_steps=3",
    "logger.tensorboard=false",
    "logger.measure=false",
    "checkpoint.every_steps=5",
)
"""Four steps per epoch."""


class Sorting(Task):
    """Eight numbers into ten classes."""

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def lone_world():
    return TrainingWorld(rank=0, size=1, local_rank=0, devices=(CPU,))


@pytest.fixture
def step_over(lone_world):
    """Makes a step over a model of eight features and ten classes."""

    def make(model, task=None):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        update = Update(optimizer, LearningRate(optimizer, lambda update: 1.0))
        meter = Meter(CPU, names=("train/loss",))
        log = AttachedLog("Sorting", Position(), total_steps=1, every_steps=1)
        loss = Loss(task or Sorting(), meter, log, precision=FORMATS["fp32"], device=CPU)
        module = TrainedModule(model, [(parameter, 0) for parameter in trained])
        joint = JointUpdate([update], meter)
        gradients = GradientCheck(loss.method, module, joint, Parallel(), lone_world.share)
        step = TrainStep([Turn(loss, module, joint, gradients)], lone_world, None)
        step.build_replicas(0)
        return step

    return make


@pytest.fixture
def supply():
    """Makes micro-batches without end: six samples each, two of them per step."""

    def produce():
        draws = torch.Generator().manual_seed(3)
        for number in itertools.count():
            features, labels = torch.randn(6, 8, generator=draws), torch.randint(0, 10, (6,), generator=draws)
            yield MicroBatch((features, labels), 6, 2.0, number % 2 == 1, labels.numpy())

    return produce


@pytest.fixture(scope="session")
def compose_small():
    """Composes the configuration of a small run, with further overrides."""
    composer = Composer()
    return lambda *words: composer.compose([*SMALL, *words])


class ResumedError(Exception):
    """Ends an attempt before its first step."""


class Attempt:
    """One attempt of a run, in this process."""

    def __init__(self, config, world, context):
        self.config = config
        self.world = world
        self.context = context
        self.running = None

    def run(self, before=lambda running: None):
        """Train; call `before` with the running attempt before the first step."""

        def started(running):
            self.running = running
            before(running)

        return train(self.config, self.world, self.context, started)

    def resume(self):
        """Build and resume, and return the running attempt."""

        def stop(_):
            raise ResumedError

        with pytest.raises(ResumedError):
            self.run(stop)
        return self.running

    @property
    def step(self):
        return self.running.step

    @property
    def why_ended(self):
        return self.running.why_ended

    @property
    def training(self):
        return self.running.training


@pytest.fixture
def attempt(compose_small, directory, lone_world):
    """Makes the next attempt of one run, by overrides of its configuration; signals stop it."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def make(*words, log_stream=None):
        request = StopRequest()
        request.install()
        ledger = Ledger(directory)
        number = ledger.claim()
        config = compose_small(*words)
        environment, pause_at = ClusterEnvironment.from_environment({}), config.trainer.pause_at_step
        context = AttemptContext(
            claim=Claim(ledger, number),
            stopping=Stopping(lone_world, environment, request, pause_at=pause_at),
            times=Times(0.0),
            hosts=None,
            log_stream=log_stream,
            bar=open_bar(config.trainer.progress, sys.stdout, is_log=log_stream is None),
        )
        return Attempt(config, lone_world, context)

    yield make
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def checkpointing_of(compose_small, directory, lone_world, clock):
    """Makes the checkpointing of the next attempt of one run, by overrides, and the training that it saves."""

    def make(*words, resumes=False):
        training = build(compose_small("checkpoint.asynchronous=false", *words), lone_world, resumes=resumes)
        claim = Claim(Ledger(directory), Ledger(directory).claim())
        saver = CheckpointSaver(directory, claim, training.config.checkpoint, StopRequest())
        agreement = Agreement(lone_world, StopRequest())
        return Checkpointing(training, directory, saver, agreement=agreement, claim=claim, clock=clock), training

    return make
