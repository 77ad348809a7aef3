from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset, default_collate

from hpctrain.data.bookmark import Bookmarks
from hpctrain.data.fetch import BatchFetcher, CollatedBatch, TensorBatches
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import MicroBatch, count_samples
from hpctrain.data.order import sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.data.workers import IN_PROCESS, Workers
from hpctrain.errors import TaskError
from hpctrain.tasks import Task
from hpctrain.train.loss_weights import build_loss_weights
from hpctrain.train.trained_module import EmptyPass, zero_of

DATA = TensorDataset(torch.arange(24.0)[:, None])


class Plain(Task):
    def train_dataset(self):
        return DATA

    def loss(self, model, batch):
        return mse_loss(model(batch[0]), batch[0])


class Collating(Plain):
    def collate_fn(self, samples):
        return default_collate(samples)


class Counting(Collating):
    def num_samples(self, batch):
        return torch.tensor(3)


class Weighing(Plain):
    weight: object = 2.5

    def loss_weight(self, batch):
        return self.weight


class Fetching(TensorBatches):
    """A `get_batch` of a user's own."""


@pytest.mark.parametrize(
    ("task", "data", "vary"),
    [
        (Plain(), DATA, False),
        (Collating(), DATA, True),
        (Weighing(), DATA, True),
        (Plain(), TensorBatches(*DATA.tensors), False),
        (Plain(), Fetching(*DATA.tensors), True),
    ],
)
def test_weights_can_vary_where_the_users_code_makes_batches_or_weighs_them(lone_world, task, data, vary):
    assert build_loss_weights(task, data, lone_world).vary is vary


def test_a_number_by_the_name_of_the_method_is_the_tasks_own(lone_world):
    task = Plain()
    task.loss_weight = 0.3
    assert not build_loss_weights(task, DATA, lone_world).vary
    assert task.evaluate(nn.Linear(1, 1), DATA.tensors)["loss"][1] == 24


@pytest.mark.parametrize(
    ("batch", "num_read", "expected"),
    [
        (torch.zeros(8, 2), 8, 8),
        ({"number": 1.0, "x": torch.zeros(5, 2), "boxes": torch.zeros(9, 4)}, 8, 5),
        (torch.zeros(0, 2), 8, 0),
        # more rows than samples: points of clouds; some clouds were None
        (torch.zeros(30, 3), 8, 8),
        (torch.zeros(30, 3), 6, 6),
        # others took the place of those that were None
        (torch.zeros(8, 2), 6, 8),
        (["no tensor"], 7, 7),
        # three channels, or five times, aren't samples
        (([torch.zeros(3, 5, 5)] * 8, [{"boxes": torch.zeros(2, 4)}] * 8), 8, 8),
        (([torch.zeros(3, 5, 5)] * 6, [{"boxes": torch.zeros(2, 4)}] * 6), 8, 6),
        (([torch.zeros(8, 4), torch.zeros(3, 4)], [{"boxes": torch.zeros(8, 4)}] * 2), 8, 2),
        ({"views": [torch.zeros(8, 4), torch.zeros(8, 4)]}, 8, 8),
        ((torch.zeros(5, 8, 2), torch.zeros(8)), 8, 8),
        ([torch.zeros(2, 4), torch.zeros(2)], 2, 2),
        ([torch.zeros(1, 4), torch.zeros(1)], 2, 1),
        ((np.zeros((5, 2)), np.zeros(5)), 8, 5),
        (None, 8, 0),
        (([], []), 8, 0),
    ],
)
def test_the_samples_in_a_batch(batch, num_read, expected):
    assert count_samples(batch, 8, num_read) == expected


def test_the_samples_in_a_list_of_samples():
    samples = [(torch.zeros(3, 5), index) for index in range(8)]
    data = BatchFetcher(samples, 0, lambda chosen: [each for each in chosen if each[1] % 2], counts=True)
    assert data[(0, np.arange(8))].num_samples == 4


def test_num_samples_of_a_task_counts_and_a_stand_in_has_no_weight(lone_world):
    assert build_loss_weights(Collating(), DATA, lone_world).weigh(torch.zeros(8, 2), 8, 6) == (6, 6)
    assert build_loss_weights(Counting(), DATA, lone_world).weigh(torch.zeros(8, 2), 8, 6) == (3, 3)
    assert build_loss_weights(Counting(), DATA, lone_world).weigh(torch.zeros(8, 2), 0, 1) == (0, 0)


@pytest.mark.parametrize("weight", [2.5, 7, True, torch.tensor([4]), torch.tensor(0.0)])
def test_a_weight_is_a_number_or_a_tensor_with_one(lone_world, weight):
    task = Weighing()
    task.weight = weight
    assert build_loss_weights(task, DATA, lone_world).weigh(torch.zeros(8, 2), 8, 8) == (float(weight), 8)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, None, "3", torch.ones(2), torch.tensor(1j)])
def test_other_weights_are_refused(lone_world, weight):
    task = Weighing()
    task.weight = weight
    with pytest.raises(TaskError, match=r"Weighing.loss_weight must return a finite number of at least 0, .* returned"):
        build_loss_weights(task, DATA, lone_world).weigh(torch.zeros(8, 2), 8, 8)


def of_steps(weights, shares):
    """Micro-batches of steps, each with (planned samples, weight) of its micro-batches."""
    for share in shares:
        total = sum(planned for planned, _ in share)
        for number, (planned, weight) in enumerate(share):
            yield MicroBatch(
                None, planned, total / planned, number == len(share) - 1, None, weight=weight, num_delivered=planned
            )


def test_divisors_and_rescaling_are_those_of_the_weighted_mean(lone_world):
    shares = [[(8, 100.0), (8, 0.0), (4, 7.0)], [(8, 3.0)], [(8, 0.0), (8, 0.0)], [(8, 8.0), (8, 8.0)], [(5, 5.0)]]
    weights = build_loss_weights(Weighing(), DATA, lone_world)
    found = list(weights.of_steps(of_steps(weights, shares)))
    assert weights.samples_seen == 20 + 8 + 16 + 16 + 5
    factors = [1 / each.divisor for each in found]
    assert [each.gradient_factor for each in found] == [1, 1, pytest.approx(20 * 12.5 / 107), 1, 1, 0, 1, 1, 1]
    assert [factor * found[2].gradient_factor for factor in factors[:3]] == pytest.approx([100 / 107, 0, 7 / 107])
    # of a single micro-batch, and of the planned numbers of samples: the plan's own
    assert [each.divisor for each in found[3:]] == [1.0, math.inf, math.inf, 2.0, 2.0, 1.0]


def test_a_run_of_an_earlier_version_keeps_the_plans_weights(lone_world):
    weights = build_loss_weights(Collating(), DATA, lone_world)
    assert weights.state() == {"loss_weights": {"by_contents": True, "samples_seen": 0, "empty_steps": 0}}
    weights.load_state(
        {"loss_weights": {"by_contents": True, "samples_seen": 30, "empty_steps": 2}, "samples_seen": 40}
    )
    assert (weights.vary, weights.samples_seen, weights.empty_steps) == (True, 30, 2)
    weights.load_state({"samples_seen": 40})
    assert not weights.vary
    assert weights.state() == {"loss_weights": {"by_contents": False}}


def test_a_run_that_trained_on_nothing_is_not_completed(lone_world, caplog):
    weights = build_loss_weights(Weighing(), DATA, lone_world)
    assert len(list(weights.of_steps(of_steps(weights, [[(8, 0.0)], [(8, 0.0), (8, 0.0)]])))) == 3
    with pytest.raises(TaskError, match=r"no batch of the run had a weight \(Weighing.loss_weight returned 0 for each"):
        weights.check_end(2)
    weights.check_end(3)
    assert "no batch had a weight in 2 of the 3 steps" in caplog.text


class Numbers:
    """Numbers from 0 to 23, with a state, of which those that 3 divides can't be read."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 24:
            self.next += 1
            yield None if self.next % 3 == 1 else torch.tensor(self.next - 1)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_stream_with_a_state_may_yield_samples_that_are_left_out(lone_world):
    def collate(samples):
        return [sample for sample in samples if sample is not None]

    weigh, bookmarks = build_loss_weights(Collating(), DATA, lone_world).weigh, Bookmarks()
    with closing(iter(loader(Numbers(), collate_fn=collate, weigh=weigh, bookmarks=bookmarks))) as batches:
        found = [next(batches) for _ in range(3)]
    assert [list(map(int, each.batch)) for each in found] == [[1, 2, 4, 5], [7, 8, 10, 11], [13, 14, 16, 17]]
    assert [each.weight for each in found] == [4, 4, 4]
    assert bookmarks.of(0) is not None


class Gaps(TensorDataset):
    def __getitems__(self, indices):
        return [self[index] for index in indices if index % 3]


def loader(data, weigh=None, workers=IN_PROCESS, **options):
    plan = BatchPlan(num_samples=24, global_batch_size=6, micro_batch_size=6, world_size=1, drop_last=False)
    fetcher = BatchFetcher(data, 0, **{"counts": weigh is not None, **options})
    return TrainLoader(fetcher, sequential, plan, rank=0, weigh=weigh, workers=workers)


def test_fewer_samples_than_indices_are_refused_without_a_collate_function(lone_world):
    with pytest.raises(TaskError, match=r"Gaps.__getitems__ returned 4 samples for 6 indices: return one for each"):
        next(iter(loader(Gaps(*DATA.tensors), counts=True)))
    weigh = build_loss_weights(Collating(), DATA, lone_world).weigh
    first = next(iter(loader(Gaps(*DATA.tensors), collate_fn=default_collate, weigh=weigh)))
    assert (first.num_samples, first.weight, first.num_delivered) == (6, 4, 4)


class Through:
    """A transfer to the same device."""

    allows_prefetch = True

    def begin(self, batch):
        assert not isinstance(batch, CollatedBatch)
        return batch

    def finish(self, begun):
        return begun


@pytest.mark.parametrize("num_workers", [0, 1])
def test_weights_are_those_of_their_batches_where_these_are_copied_in_advance(lone_world, num_workers):
    weigh = build_loss_weights(Collating(), DATA, lone_world).weigh
    data = Gaps(*DATA.tensors)
    batches = loader(data, collate_fn=only_even, weigh=weigh, workers=Workers(num_workers)).micro_batches(Through())
    with closing(batches):
        found = [next(batches) for _ in range(8)]
    assert [each.weight for each in found] == [len(each.batch[0]) for each in found]
    assert len({each.weight for each in found}) > 1


def only_even(samples):
    """Leaves out numbers that are odd, and of every other batch the first sample."""
    numbers = [sample[0] for sample in samples if not sample[0] % 2]
    return (torch.stack(numbers[int(numbers[0]) % 4 // 2 :]),)


def test_an_empty_pass_has_gradients_of_zero_whatever_the_loss_is():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    empty = EmptyPass(shares_statistics=False)
    with empty.forward(model):
        loss = model(torch.zeros(1, 2) / 0).mean() / 0
    with empty.backward():
        (loss / math.inf).backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].training
    # the hooks are gone
    model(torch.ones(2, 2)).sum().backward()
    assert model[2].bias.grad == 2


def test_zero_depends_on_each_parameter_even_if_it_is_not_finite():
    model = nn.Linear(2, 1)
    model.weight.data.fill_(math.nan)
    loss = zero_of(model)
    loss.backward()
    assert loss == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


class Masked(Plain):
    def loss_weight(self, batch):
        return (batch[0] >= 8).sum()

    def loss(self, model, batch):
        return {"loss": batch[0][batch[0] >= 8].mean(), "other": 1.0}


def test_the_default_evaluation_weighs_as_the_training_does():
    sums = [Masked().evaluate(None, (torch.arange(begin, begin + 6.0),)) for begin in (0, 6, 12)]
    assert [float(each["loss"][1]) for each in sums] == [0, 4, 6]
    assert [float(each["loss"][0]) for each in sums] == [0, 38, 87]
    assert [float(each["other"][0]) for each in sums] == [0, 4, 6]
