from __future__ import annotations

import json
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from hpctrain.data.fetch import BatchFetcher, TensorBatches
from hpctrain.data.loader import TrainLoader
from hpctrain.data.order import sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.data.workers import Workers
from hpctrain.files import read_json_lines
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.train.checkpointing import StartPoint
from hpctrain.train.training import build
from hpctrain.train.training_log import TrainingLog, cut_sample_logs, log_samples
from tests.support.full_disk import full_disk

PLAN = BatchPlan(num_samples=9, global_batch_size=4, micro_batch_size=1, world_size=2, drop_last=False)
"""Steps of four, four and one; two micro-batches per rank and full step."""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_was_handed_out_is_written_down_step_by_step(tmp_path, num_workers):
    data = TensorBatches(torch.arange(9))
    expected = {0: [[0, 2], [4, 6], [8], [0, 2]], 1: [[1, 3], [5, 7], [], [1, 3]]}
    for rank in (0, 1):
        loader = TrainLoader(BatchFetcher(data, 0), sequential, PLAN, rank=rank, workers=Workers(num_workers))
        micro_batches = log_samples(iter(loader), tmp_path / str(rank), 0)
        taken = [micro_batch.batch[0].tolist() for micro_batch in islice(micro_batches, 7)]
        micro_batches.close()
        found = lines(tmp_path / str(rank))
        assert [line["step"] for line in found] == [1, 2, 3, 4]
        assert [line["samples"] for line in found] == expected[rank]
        trained = [taken[0] + taken[1], taken[2] + taken[3], taken[4] if rank == 0 else [], taken[5] + taken[6]]
        assert [line["samples"] for line in found] == trained


def test_a_later_attempt_goes_on_where_it_begins(tmp_path):
    def attempt(start_step, steps):
        data = TensorBatches(torch.arange(9))
        loader = TrainLoader(BatchFetcher(data, 0), sequential, PLAN, rank=0, start_step=start_step)
        micro_batches = log_samples(iter(loader), tmp_path / "log", start_step)
        for micro_batch in micro_batches:
            steps -= micro_batch.is_last
            if not steps:
                break
        micro_batches.close()

    attempt(0, 2)
    with full_disk((tmp_path / "log").stat().st_size):
        attempt(2, 1)  # the training continues; that the line is lost is a warning
    with (tmp_path / "log").open("a") as file:
        file.write('{"step": 3, "sam')  # a crash
    attempt(2, 1)
    attempt(1, 1)
    found = list(read_json_lines(tmp_path / "log"))
    assert [line["step"] for line in found] == [1, 2, 3, 2]
    assert found[-1] == found[1]


def test_ranks_that_are_gone_keep_no_lines_of_steps_that_others_repeat(directory):
    directory.logs.mkdir(exist_ok=True)
    text = "".join(f'{{"step": {step}, "samples": [{step}]}}\n' for step in range(1, 9))
    for rank in range(4):
        directory.sample_log(rank).write_text(text + '{"step": 9, "sam' * (rank == 3))
    directory.sample_log(12).write_text(text[: text.index("\n") + 1])
    early = directory.sample_log(12).stat()
    cut_sample_logs(directory, range(0, 4, 2), 5)
    assert [lines(directory.sample_log(rank))[-1]["step"] for rank in range(4)] == [8, 5, 8, 5]
    assert directory.sample_log(12).stat() == early


def test_opening_the_sinks_does_not_count_for_the_throughput(compose_small, lone_world, directory, monkeypatch):
    class Slow(JsonLinesSink):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            clock.training_s += 100.0

    class Idle:
        logging_s = 0.0

        def metrics(self, *_):
            return {}

    clock = SimpleNamespace(training_s=0.0)
    monkeypatch.setattr("hpctrain.train.training_log.JsonLinesSink", Slow)
    training = build(compose_small(), lone_world)
    times = SimpleNamespace(training_s=lambda: clock.training_s, record=lambda step: None)
    log = TrainingLog(training, StartPoint(), Idle(), times)
    with log.opened(directory, None, None):
        clock.training_s += 2.0
        values = log.training(3)
    assert values["throughput/samples_per_s"] == 3 * 6 / 2.0
