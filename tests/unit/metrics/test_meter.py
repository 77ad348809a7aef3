from __future__ import annotations

import gc
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hpctrain.metrics.meter import Meter, Throughput
from tests.unit.fakes import Clock

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["sums_on_host", "sums_on_device"])
def sums_on_device(request):
    return request.param


def test_a_mean_is_weighted_by_samples(sums_on_device):
    meter = Meter(CPU, sums_on_device=sums_on_device)
    meter.add_mean("train/loss", torch.tensor(1.0), 30)
    meter.add_mean("train/loss", torch.tensor(4.0), 10)
    assert meter.means() == {"train/loss": 1.75}


def test_sums_count_what_a_mask_left(sums_on_device):
    meter = Meter(CPU, sums_on_device=sums_on_device)
    meter.add_sum("eval/accuracy", torch.tensor(3), 4)
    meter.add_sum("eval/accuracy", torch.tensor(1), 4)
    meter.add_sum("eval/loss", torch.tensor(6.0), torch.tensor(3))
    meter.add_sum("eval/loss", torch.tensor(2.0), torch.tensor(1))
    assert meter.means() == {"eval/accuracy": 0.5, "eval/loss": 2.0}


@pytest.mark.parametrize("empty", [0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("mean", [math.nan, torch.tensor(math.nan)])
def test_a_mean_over_nothing_leaves_the_others_alone(sums_on_device, empty, mean):
    meter = Meter(CPU, sums_on_device=sums_on_device)
    meter.add_value("train/masked", mean, empty)
    assert meter.means() == {}
    meter.add_value("train/masked", torch.tensor(2.0), torch.tensor(3))
    meter.add_value("train/masked", mean, empty)
    meter.add_value("train/masked", 4.0, 1)
    assert meter.means() == {"train/masked": 2.5}
    # with samples, it is that of the task
    meter.add_value("train/masked", mean, 1)
    assert math.isnan(meter.means()["train/masked"])


def test_reset_starts_a_new_window(sums_on_device):
    meter = Meter(CPU, names=["train/loss"], sums_on_device=sums_on_device)
    meter.add_mean("train/loss", torch.tensor(9.0), 1)
    meter.reset()
    meter.add_mean("train/loss", torch.tensor(2.0), 1)
    assert meter.means() == {"train/loss": 2.0}


def test_a_rank_without_samples_takes_part_in_the_reduction(sums_on_device):
    names = ["eval/loss", "eval/accuracy"]
    idle = Meter(CPU, names=names, sums_on_device=sums_on_device)
    contributed: list[torch.Tensor] = []
    Meter(CPU, lambda own: contributed.append(own.clone()) or own, names).means()
    busy = Meter(CPU, lambda own: own + contributed[0], names, sums_on_device=sums_on_device)
    busy.add_sum("eval/accuracy", torch.tensor(7), 8)
    busy.add_mean("eval/loss", torch.tensor(0.5), 8)
    assert busy.means() == {"eval/accuracy": 0.875, "eval/loss": 0.5}
    assert all(math.isnan(mean) for mean in idle.means().values())


def test_a_rank_takes_part_in_what_other_ranks_measured():
    totals = torch.zeros(4, dtype=torch.float64)
    busy, idle = Meter(CPU, totals.add_), Meter(CPU, totals.add_)
    busy.add_sum("eval/loss", torch.tensor(6.0), 3)
    busy.add_sum("eval/accuracy", torch.tensor(3), 4)
    assert (busy.names, idle.names) == (("eval/accuracy", "eval/loss"), ())
    for meter in (busy, idle):
        meter.expect(busy.names + idle.names)
        means = meter.means()
    assert means == {"eval/accuracy": 0.75, "eval/loss": 2.0}
    idle.reset()
    assert idle.names == busy.names


class Ranks:
    """Meters of a world of two, whose collectives run as in lockstep: each call of a rank adds to the next result."""

    def __init__(self):
        self.pool, self.exchanges = ThreadPoolExecutor(2), 0
        self.barrier, self.slots = threading.Barrier(2), [None, None]
        self.meters = [
            Meter(CPU, self._reduce(rank), ["train/loss"], gather_names=self._union(rank)) for rank in (0, 1)
        ]

    def _together(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait(10)
        found = list(self.slots)
        self.barrier.wait(10)
        return found

    def _reduce(self, rank):
        return lambda tensor: torch.stack(self._together(rank, tensor)).sum(0)

    def _union(self, rank):
        def union(names):
            self.exchanges += rank == 0
            return sorted({name for own in self._together(rank, names) for name in own})

        return union

    def call(self, method):
        one, other = (self.pool.submit(method, meter) for meter in self.meters)
        found = one.result(10), other.result(10)
        assert repr(found[0]) == repr(found[1])
        return found[0]


def test_names_may_differ_by_rank_and_come_late_and_are_exchanged_once():
    ranks = Ranks()
    one, other = ranks.meters
    for _ in range(2):
        for meter in ranks.meters:
            meter.reset()
        one.add_value("train/b", 2.0, 3)
        other.add_value("train/a", torch.tensor(1.0), torch.tensor(2))
        other.add_mean("train/loss", torch.tensor(5.0), 1)
        assert ranks.call(Meter.means) == {"train/a": 1.0, "train/b": 2.0, "train/loss": 5.0}
    assert ranks.exchanges == 1
    for meter in ranks.meters:
        meter.reset()
    one.add_value("train/b", 7.0, 1)
    other.add_value("train/late", 3.0, 1)
    means = ranks.call(Meter.means)
    assert (means["train/b"], means["train/late"], "train/a" in means) == (7.0, 3.0, False)
    assert math.isnan(means["train/loss"])
    assert ranks.exchanges == 2


def test_a_resume_in_a_window_gives_the_same_digits_also_of_names_that_a_rank_has_not_seen():
    values = [0.1 * number + 0.7 for number in range(12)]

    def add(ranks, numbers):
        for number in numbers:
            ranks.meters[number % 2].add_value(f"train/{number % 3}", values[number], 3)

    straight, first, second = Ranks(), Ranks(), Ranks()
    add(straight, range(12))
    add(first, range(5))
    own = [meter.own_state() for meter in first.meters]
    state = first.call(Meter.state)
    for rank, meter in enumerate(second.meters):
        meter.load_state(state, rank=rank, own_state=own[rank])
    add(second, range(5, 12))
    assert second.call(Meter.means) | {"train/loss": 0} == straight.call(Meter.means) | {"train/loss": 0}
    assert second.exchanges == 0


def test_ranks_of_unequal_shares_give_the_mean_over_samples():
    totals = torch.zeros(2, dtype=torch.float64)
    for losses in ([1.0, 2.0, 3.0], [10.0]):
        rank = Meter(CPU, totals.add_)
        for loss in losses:
            rank.add_mean("train/loss", torch.tensor(loss), 1)
        means = rank.means()
    assert means == {"train/loss": 4.0}


def test_nan_shows_in_the_mean(sums_on_device):
    meter = Meter(CPU, sums_on_device=sums_on_device)
    meter.add_mean("train/loss", torch.tensor(float("nan")), 4)
    meter.add_mean("train/loss", torch.tensor(1.0), 4)
    assert math.isnan(meter.means()["train/loss"])


def test_an_interrupted_window_ends_as_a_straight_one(sums_on_device):
    losses = torch.rand(100, generator=torch.Generator().manual_seed(3)) * 7
    straight, first, second = (Meter(CPU, sums_on_device=sums_on_device) for _ in range(3))
    for loss in losses:
        straight.add_mean("train/loss", loss, 24)
    for loss in losses[:37]:
        first.add_mean("train/loss", loss, 24)
    second.load_state(first.state(), rank=0)
    for loss in losses[37:]:
        second.add_mean("train/loss", loss, 24)
    assert second.means() == straight.means()


def test_only_rank_zero_takes_the_values_of_a_state():
    other = Meter(CPU)
    other.load_state({"train/loss": (8.0, 4.0)}, rank=1)
    assert other.state() == {"train/loss": (0.0, 0.0)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sums_of_low_precision_losses_lose_nothing(dtype, sums_on_device):
    meter = Meter(CPU, sums_on_device=sums_on_device)
    value = torch.tensor(1.5, dtype=dtype)
    for _ in range(5000):
        meter.add_mean("train/loss", value, 1)
    assert meter.state() == {"train/loss": (7500.0, 5000.0)}


def test_no_graph_is_kept(sums_on_device):
    meter = Meter(CPU, sums_on_device=sums_on_device)
    activation = torch.ones(3, requires_grad=True) * 2
    loss = activation.square().mean()
    gone = weakref.ref(activation)
    meter.add_mean("train/loss", loss, 3)
    del activation, loss
    gc.collect()
    assert gone() is None
    assert meter.means() == {"train/loss": 4.0}


def test_each_window_has_its_own_rate():
    clock = Clock()
    throughput = Throughput(samples_seen=4000, clock=clock)
    clock.now += 10
    assert throughput.rate(6000) == 200.0
    clock.now += 10
    assert throughput.rate(12000) == 600.0


def test_the_rate_is_zero_where_no_time_has_passed():
    assert Throughput(samples_seen=0, clock=Clock()).rate(0) == 0.0
