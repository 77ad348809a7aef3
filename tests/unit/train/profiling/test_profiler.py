from __future__ import annotations

import itertools
import logging
import sys

import pytest

from hpctrain.config.compose import Composer
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.bottleneck import read_bottleneck
from hpctrain.run.times import Times
from hpctrain.train.profiling.bottleneck import RankReport
from hpctrain.train.profiling.profiler import Profiler, SlowestRankTracker
from hpctrain.train.training import build

TASK = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from hpctrain.data.fetch import TensorBatches
from hpctrain.tasks.task import Task

class Tiny(Task):
    def __init__(self, compiled=False):
        self.compiled = compiled

    def build_model(self):
        model = nn.Linear(8, 10)
        if self.compiled:
            model.compile(backend="eager")
        return model

    def train_dataset(self):
        return TensorBatches(torch.randn(1200, 8), torch.randint(0, 10, (1200,)))

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1])

class Counting(Tiny):
    \"\"\"Has a state that loading and training change.\"\"\"

    def __init__(self, compiled=False):
        super().__init__(compiled)
        self.loaded = self.trained = 0

    def train_dataset(self):
        return torch.utils.data.TensorDataset(torch.randn(120, 8), torch.randint(0, 10, (120,)))

    def collate_fn(self, samples):
        self.loaded += 1
        return tuple(map(torch.stack, zip(*samples)))

    def loss(self, model, batch):
        self.trained += 1
        return super().loss(model, batch)

    def state_dict(self):
        return {"loaded": self.loaded, "trained": self.trained}

    def load_state_dict(self, state):
        self.loaded, self.trained = state["loaded"], state["trained"]
"""
WORDS = ("task=custom", "task._target_=tiny_task.Tiny", "trainer.max_epochs=null", "trainer.max_steps=50")
BATCH = ("trainer.global_batch_size=12", "trainer.micro_batch_size=6")


class Side:
    """A profiler, and what it measures."""

    def __init__(self, words, world, clock, folder, *, start_step, flops):
        self.training = build(Composer().compose([*WORDS, *BATCH, *words]), world)
        self.times, self.clock = Times(0.0, clock), clock
        self.times.record_in(folder)
        self.times.enter("first_step_s")
        self.step, self.loader = start_step, self.training.data.loader(start_step)
        self.profiler = Profiler(
            self.training,
            self.loader,
            Agreement(world, StopRequest()),
            self.times,
            start_step=start_step,
            flops_per_sample=flops,
            trace=folder / "rank_0.pt.trace.json",
            clock=clock,
        )

    def train(self, end):
        """Do steps as the loop does, one per second; return those that went through the profiler."""
        micro_batches, begin, profiled = iter(self.loader), self.step, []
        for number in range(begin, end):
            if number == self.profiler.next_step:
                self.profiler.do_step(number, micro_batches)
                profiled.append(number)
            else:
                self.training.step(number, micro_batches)
            self.clock.now += 1.0
            if number == begin:
                self.times.enter("train_s")
            self.profiler.metrics(number + 1, 12.0)
        return profiled


@pytest.fixture
def make(lone_world, clock, tmp_path, monkeypatch):
    """Make a profiler by words of the configuration."""
    (tmp_path / "tiny_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda *words, start_step=0, flops=None: Side(
        words, lone_world, clock, tmp_path, start_step=start_step, flops=flops
    )
    sys.modules.pop("tiny_task", None)


def test_flops_are_counted_in_the_first_step_and_later_ones_are_timed(make, tmp_path, caplog):
    side = make()
    with caplog.at_level(logging.INFO, "hpctrain.train"):
        assert side.train(12) == list(range(12))
        side.profiler.finish(12)
    found = read_bottleneck(tmp_path)
    # forward, and the gradients of the weights
    assert found.flops_per_sample == 2 * 2 * 8 * 10
    assert (found.step, found.steps_timed) == (12, 11)
    assert found.samples_per_s_per_device == 12.0
    assert caplog.messages[0].startswith("flops       3.84 kFLOP per step, 320 FLOP per sample")
    assert caplog.messages[-1] == f"bottleneck: {found.text}"


def test_flops_of_an_earlier_attempt_are_taken_over(make, tmp_path):
    side = make(start_step=20, flops=7.0)
    side.train(24)
    side.profiler.finish(24)
    assert read_bottleneck(tmp_path).flops_per_sample == 7.0


def test_flops_of_a_compiled_model_are_counted_before_its_second_step(make, tmp_path):
    side = make("+task.compiled=true")
    side.train(4)
    side.profiler.finish(4)
    assert read_bottleneck(tmp_path).flops_per_sample == 2 * 2 * 8 * 10


def test_a_trial_changes_the_tasks_state_no_more_than_the_batch_does_that_is_trained_on_next(make):
    side = make("task._target_=tiny_task.Counting", "+task.compiled=true", "data.num_workers=0")
    side.train(3)
    assert side.training.task.state_dict() == {"loaded": 6, "trained": 6}


def test_an_evaluation_before_the_first_step_has_no_share(make, tmp_path, clock):
    side = make()
    with side.times.during("eval_s"):
        side.profiler.before_evaluation(0)
        clock.now += 100.0
    side.train(12)
    side.profiler.finish(12)
    assert read_bottleneck(tmp_path).shares["evaluation"] == 0.0


def test_an_attempt_without_a_step_writes_nothing(make, tmp_path):
    make(start_step=50).profiler.finish(50)
    assert read_bottleneck(tmp_path) is None


def test_without_measuring_only_traced_steps_go_through_the_profiler(make, tmp_path):
    side = make("logger.measure=false", "trainer.profile=[3,4]")
    assert side.train(8) == [2, 3]
    side.profiler.finish(8)
    assert read_bottleneck(tmp_path) is None
    assert (tmp_path / "rank_0.pt.trace.json").exists()


def test_metrics_come_once_a_second(make, clock):
    profiler, found = make().profiler, []
    for step in range(1, 41):
        clock.now += 0.1
        if profiler.metrics(step, 100.0):
            found.append(step)
    assert len(found) == 4
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(found))
    clock.now += 1
    assert set(profiler.metrics(41, 100.0)) == {
        "throughput/samples_per_s_per_device",
        "throughput/waiting_for_data",
        "memory/peak_gb",
    }


def reports(*own_s, timed, loaded=0, data=(0.0, 0.0, 0.0)):
    """Three ranks, by the mean of their forward pass and of their wait for data."""
    return [
        RankReport(
            rank=rank,
            host="n1",
            steps_timed=timed,
            steps_loaded=loaded,
            parts={"data": data[rank], "forward": seconds, "optimizer": 9.0},
        )
        for rank, seconds in enumerate(own_s)
    ]


def test_a_stretch_counts_only_its_own_steps():
    slowest = SlowestRankTracker()
    slowest.add(reports(1.0, 1.0, 3.0, timed=10))
    assert slowest.take_metrics() == {"throughput/slowest_rank": 2, "throughput/slowest_ratio": 3.0}
    assert slowest.take_metrics() == {}
    # over all 20 steps rank 2 is still the slowest, but in the last ten it was rank 0
    slowest.add(reports(1.5, 1.0, 2.0, timed=20))
    assert slowest.take_metrics() == {"throughput/slowest_rank": 0, "throughput/slowest_ratio": 2.0}


def test_waiting_for_data_is_counted_over_its_own_number_of_steps():
    slowest = SlowestRankTracker()
    slowest.add(reports(1.0, 1.0, 1.0, timed=4, loaded=100, data=(0.0, 0.0, 0.0)))
    slowest.take_metrics()
    # rank 1 waited 300 s in 100 steps, while 4 were timed
    slowest.add(reports(1.0, 1.0, 1.0, timed=8, loaded=200, data=(0.0, 1.5, 0.0)))
    found = slowest.take_metrics()
    assert found == {"throughput/slowest_rank": 1, "throughput/slowest_ratio": pytest.approx(4.0)}


def test_a_stretch_with_few_steps_is_joined_with_the_next():
    slowest = SlowestRankTracker()
    slowest.add(reports(1.0, 1.0, 1.0, timed=3))
    slowest.take_metrics()
    slowest.add(reports(1.0, 1.0, 2.0, timed=4))
    assert slowest.take_metrics() == {}
    slowest.add(reports(1.0, 1.0, 2.0, timed=6))
    assert slowest.take_metrics() == {"throughput/slowest_rank": 2, "throughput/slowest_ratio": 3.0}


def test_a_finding_waits_for_a_record_and_a_newer_one_replaces_it():
    slowest = SlowestRankTracker()
    slowest.add(reports(1.0, 1.0, 3.0, timed=3))
    slowest.add(reports(1.5, 1.0, 2.0, timed=6))
    assert slowest.take_metrics()["throughput/slowest_rank"] == 0


def test_only_rank_zero_has_the_reports():
    slowest = SlowestRankTracker()
    slowest.add([])
    slowest.add([])
    assert slowest.take_metrics() == {}


def test_one_rank_has_no_others():
    slowest = SlowestRankTracker()
    slowest.add(reports(1.0, timed=10))
    assert slowest.take_metrics() == {}
