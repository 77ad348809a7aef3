"""Ranks that evaluate."""

from __future__ import annotations

import itertools
import os
import signal

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.parallel import Parallel
from hpctrain.config.precision import FORMATS
from hpctrain.data.loader import EvalLoader
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError
from hpctrain.parallel.ddp import build_whole_replica
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import StopRequest
from hpctrain.tasks import Task
from hpctrain.tasks.position import Position
from hpctrain.train.evaluation import Evaluation, EvaluationPass
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.task_metrics import build_metrics
from hpctrain.train.task_state import TaskState
from tests.multiprocess.programs.gloo_world import joined


class Numbers(Dataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    """The same numbers, without a length."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return (torch.tensor([float(index)]) for index in range(self.num_samples))


class Split(Stream):
    """Splits itself by rank, as a stream must not do: rank r has r samples more than rank zero."""

    def __iter__(self):
        rank = ClusterEnvironment.from_environment(os.environ).rank
        return (torch.tensor([float(index)]) for index in range(self.num_samples + rank))


class Endless(Stream):
    """Ends on rank zero alone."""

    def __iter__(self):
        rank = ClusterEnvironment.from_environment(os.environ).rank
        return (torch.tensor([0.0]) for _ in (itertools.count() if rank else range(self.num_samples)))


class SplitWithLength(Split):
    def __len__(self):
        return self.num_samples + ClusterEnvironment.from_environment(os.environ).rank


DATASETS = {kind.__name__: kind for kind in (Numbers, Stream, Split, Endless, SplitWithLength)}


class Count(Task):
    """Evaluates to numbers that show which samples were seen, and what the batch norm's buffers were."""

    def __init__(self, signal_at=0):
        self.seen, self.modes, self.signal_at = [], set(), signal_at

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError

    def evaluate(self, model, batch):
        self.seen += batch.flatten().tolist()
        self.modes.add((model.training, torch.is_grad_enabled()))
        torch.rand(1)
        if self.signal_at == len(self.seen):
            os.kill(os.getpid(), signal.SIGUSR2)
        return {
            "power": (sum(2.0**number for number in batch.flatten().tolist()), len(batch)),
            "normed": (model(batch).double().sum(), len(batch)),
        }


def pass_of(task, model, world):
    """Return the pass of a task that no training has built."""
    log = AttachedLog(type(task).__name__, Position(), total_steps=1, every_steps=1)
    replica = build_whole_replica(model, world, Parallel())
    return EvaluationPass(task, TaskState(task, world), log, build_metrics(task, world), replica, world)


def loader_of(dataset, micro_batch_size, world, workers):
    return EvalLoader(dataset, micro_batch_size, rank=world.rank, world_size=world.size, workers=workers)


def be_rank(num_samples, micro_batch_size, num_workers, signal_at, kind, tried):
    world = joined()
    rank = world.rank
    model = nn.BatchNorm1d(1)
    model.running_mean.fill_(float(rank))  # as if every rank had trained on samples of its own
    stop = StopRequest()
    stop.install()
    task = Count(signal_at[rank])
    loader = loader_of(DATASETS[kind](num_samples), micro_batch_size, world, Workers(num_workers))
    evaluation = Evaluation(pass_of(task, model, world), loader, precision=FORMATS["fp32"])
    before = torch.get_rng_state()
    agreement = Agreement(world, stop)
    agreement.agree_and_calibrate()
    try:
        found = evaluation.try_out(agreement, tried) if tried else evaluation(agreement)
    except TaskError as error:
        return {"error": str(error)}
    result = {
        "means": found.means,
        "stop": None if found.stop is None else [found.stop.kind, found.stop.signal],
        "seen": task.seen,
        "modes": sorted(task.modes),
        "training": model.training,
        "mean": model.running_mean.item(),
        "same_random_state": torch.equal(before, torch.get_rng_state()),
        "num_batches": evaluation.num_batches,
    }
    world.close()
    return result
