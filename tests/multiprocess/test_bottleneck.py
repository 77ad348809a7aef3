"""A run's bottleneck is reported at its end, and by `status`, which needs no torch."""

from __future__ import annotations

import json
import re
import socket

import pytest

from hpctrain.cli.status import main as status
from hpctrain.run.bottleneck import PARTS, read_bottleneck

TASK = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.slowed.Slowed",
    "trainer.max_epochs=null",
    "logger.tensorboard=false",
)


@pytest.fixture
def measured(train):
    """Trains; returns the bottleneck, the run and the output."""

    def run(name, *words, **options):
        code, run, output = train(name, *TASK, *words, **options)
        assert code == 0, output
        return run.directory.newest(read_bottleneck), run, output

    return run


@pytest.mark.nightly
def test_slow_data(measured, capsys):
    words = ("trainer.max_steps=40", "trainer.global_batch_size=16", "logger.every_steps=4", "data.num_workers=0")
    found, run, output = measured("data", *words, "cluster.cpus_per_process=6", BOTTLENECK="data")
    assert re.fullmatch(r"waiting for data \d+% of the time: data\.num_workers 0 -> \d.*", found.text)
    assert found.shares["data"] > 0.5 * (1 - found.shares["saving"])
    assert tuple(found.shares) == PARTS
    assert sum(found.shares.values()) == pytest.approx(1, abs=0.01)
    assert f"bottleneck: {found.text}" in output
    assert status([str(run.directory.path)]) == 0
    assert f"bottleneck  {found.text}\n" in capsys.readouterr().out


def test_a_slow_rank(measured):
    words = ("trainer.max_steps=20", "trainer.global_batch_size=16", "logger.every_steps=4")
    found, run, _ = measured("rank", *words, world_size=2, BOTTLENECK="rank")
    assert found.text.startswith(f"rank 1 on {socket.gethostname()} takes ")
    assert (found.slowest_rank, found.slowest_host) == (1, socket.gethostname())
    assert found.slowest_ratio > 1.5
    records = [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]
    slowest = [record for record in records if "throughput/slowest_rank" in record]
    assert slowest
    assert {record["throughput/slowest_rank"] for record in slowest} == {1}
    assert all(record["throughput/slowest_ratio"] > 1.5 for record in slowest)
    # the mean over the ranks: one waits, the other doesn't
    assert found.shares["gradient_sync"] > 0.1


def test_memory_that_grows_with_each_step(measured):
    words = ("trainer.max_steps=40", "trainer.global_batch_size=16", "logger.every_steps=1")
    found, _, _ = measured("memory", *words, BOTTLENECK="memory")
    assert re.match(r"memory grows by [\d.]+ MB with each step: something keeps each step's graph", found.text)


def test_without_measuring_only_the_loss_the_learning_rate_and_the_epoch_are_logged(measured):
    words = ("trainer.max_steps=6", "trainer.global_batch_size=16", "logger.every_steps=2", "logger.measure=false")
    found, run, output = measured("off", *words)
    assert found is None
    assert "bottleneck" not in output
    names = {name for record in run.metrics for name in record}
    assert names == {"step", "train/loss", "train/lr", "train/epoch"}


def test_the_log_starts_with_one_table_and_flops_are_counted_once(measured, train):
    words = ("trainer.max_steps=8", "trainer.global_batch_size=16", "trainer.micro_batch_size=4")
    found, run, output = measured("table", *words, world_size=2)
    rows = dict(line.split(maxsplit=1) for line in output.splitlines()[:11])
    assert list(rows) == [
        *("run", "task", "model", "where", "batch", "memory", "precision", "data", "checkpoints", "disk", "flops"),
    ]
    assert rows["memory"] == (
        "300.2 KiB per rank: weights 75.0 KiB, gradients 75.0 KiB, optimizer 150.1 KiB; activations come on top"
    )
    assert rows["run"] == f"{run.directory.path}, attempt 1, steps 0 to 8"
    assert rows["batch"] == "16 samples per step = 4 per forward x 2 accumulated x 2 ranks"
    assert rows["model"] == "torch.nn.modules.container.Sequential: 19,210 parameters, 19,210 of them trained"
    # forward; the gradients of all weights, and of the second layer's inputs
    flops = 2 * (64 * 256 + 256 * 10) * 2 + 2 * 256 * 10
    assert found.flops_per_sample == flops
    code, _, output = train("table", *TASK, *words, "trainer.max_steps=10", world_size=2)
    assert code == 0
    assert f"flops       {flops * 16 / 1e6:.3g} MFLOP per step" in output.partition("the first step")[0]


def test_a_trace_of_the_requested_steps(measured):
    words = ("trainer.max_steps=6", "trainer.global_batch_size=16", "trainer.profile=[3,4]")
    found, run, output = measured("trace", *words)
    trace = json.loads(run.directory.trace(0).read_bytes())
    assert "a trace of steps 3 to 4: " in output
    updates = [event for event in trace["traceEvents"] if event.get("name", "").startswith("Optimizer.step")]
    assert len(updates) == 2
    assert found.steps_timed == 3
