"""Data of every kind: an interrupted run sees the samples of a straight one, at any world size."""

from __future__ import annotations

import random

import pytest
import torch

from tests.multiprocess.programs.reading import SAMPLES, STREAMS, write_documents

BATCH, MICRO, STEPS, PER_EPOCH = 8, 2, 12, 6
WORDS = (
    *(
        "task=custom",
        "task._target_=tests.multiprocess.programs.reading.Reading",
        "+task.dropout=0.2",
        "logger.tensorboard=false",
    ),
    *(f"trainer.global_batch_size={BATCH}", f"trainer.micro_batch_size={MICRO}", f"trainer.max_steps={STEPS}"),
    *("checkpoint.every_steps=1", "checkpoint.asynchronous=false", "optimizer.lr=0.01", "logger.every_steps=2"),
)
STATEFUL = ("stateful", "sharded", "hf_stream", "hf_sharded")
KINDS = ("plain", "tar", "buckets", "hf_map", "hf_buffer", *STATEFUL)


class Watched:
    """Trains in several attempts, and knows the samples of each step of the run."""

    def __init__(self, train, folder, kind):
        self.train = train
        self.folder = folder
        self.kind = kind
        self.samples = {}

    def attempt(self, name, start, end, *, world_size, workers=0):
        """Train from a step on; the ranks are killed amid step ``end``, unless it is the run's last."""
        records = self.folder / f"{name}_{start}"
        records.mkdir()
        turns = BATCH // MICRO // world_size
        call = (end - start) * turns + min(2, turns)
        acts = [] if end == STEPS else [f"{rank}:{call}:SIGKILL" for rank in range(world_size)]
        words = (*WORDS, f"+task.kind={self.kind}", f"+task.folder={self.folder}/data")
        code, run, output = self.train(
            name,
            *words,
            f"data.num_workers={workers}",
            "resume.allow_config_change=true",
            world_size=world_size,
            TRIAL_ACT=",".join(acts),
            TRIAL_RECORD=str(records),
        )
        assert code == (-9 if acts else 0), output
        for step in range(start, end):
            self.samples[step] = []
        for file in records.iterdir():
            for number, line in enumerate(file.read_text().splitlines()):
                if start + number // turns < end:
                    self.samples[start + number // turns] += map(int, line.split())
        return run

    def steps(self):
        return [sorted(self.samples[step]) for step in range(STEPS)]


def saved_streams(run):
    state = torch.load(run.directory.checkpoint(run.steps[-1]) / "state.pt", weights_only=True)
    streams = state["extra"]["streams"]
    return [] if streams is None else streams["bookmarks"]


def test_streams_that_ranks_share_continue_with_fewer_ranks(train, tmp_path):
    watched = Watched(train, tmp_path, "sharded")
    run = watched.attempt("run", 0, 7, world_size=2)
    assert {mark["stream"] for mark in saved_streams(run)} == set(range(STREAMS))
    watched.attempt("run", 7, STEPS, world_size=1)
    steps = watched.steps()
    # a quarter of each step from each stream, and each sample once per pass
    assert all([number % STREAMS for number in step].count(2) == 2 for step in steps)
    for first in (0, PER_EPOCH):
        assert sorted(number for step in steps[first : first + PER_EPOCH] for number in step) == list(range(SAMPLES))


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_three_random_steps(train, tmp_path, kind, world_size, workers):
    if kind.startswith("hf"):
        pytest.importorskip("datasets")
    straight, cut = Watched(train, tmp_path, kind), Watched(train, tmp_path, kind)
    expected = straight.attempt("straight", 0, STEPS, world_size=world_size, workers=workers)
    cuts = sorted(random.Random(f"{kind} {world_size} {workers}").sample(range(1, STEPS), 3))
    for start, end in zip([0, *cuts], [*cuts, STEPS], strict=True):
        run = cut.attempt("cut", start, end, world_size=world_size, workers=workers)
        # a bookmark comes with the second batch of a loading process
        assert bool(saved_streams(run)) is (kind in STATEFUL) or end < 3
    assert (run.digest, run.metrics) == (expected.digest, expected.metrics)
    assert cut.steps() == straight.steps()
    for first in (0, PER_EPOCH):
        epoch = straight.steps()[first : first + PER_EPOCH]
        assert sorted(number for step in epoch for number in step) == list(range(SAMPLES))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_of_ranks_see_the_same_samples(train, tmp_path, kind):
    if kind.startswith("hf"):
        pytest.importorskip("datasets")
    straight, cut = Watched(train, tmp_path, kind), Watched(train, tmp_path, kind)
    straight.attempt("straight", 0, STEPS, world_size=1)
    for start, end, world_size, workers in ((0, 4, 2, 2), (4, 7, 1, 0), (7, STEPS, 2, 0)):
        cut.attempt("cut", start, end, world_size=world_size, workers=workers)
    assert cut.steps() == straight.steps()


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_packed_documents_killed_at_three_random_steps(train, tmp_path, world_size):
    write_documents(tmp_path / "tokens")
    words = (
        *(
            "task=custom",
            "task._target_=tests.multiprocess.programs.reading.Packing",
            f"+task.data={tmp_path}/tokens",
            "trainer.max_steps=12",
        ),
        *("trainer.global_batch_size=8", "trainer.micro_batch_size=2", "logger.tensorboard=false"),
        *("checkpoint.every_steps=1", "checkpoint.asynchronous=false", "logger.every_steps=2"),
    )
    code, straight, output = train("straight", *words, world_size=world_size)
    assert code == 0, output
    assert "documents packed into" in output
    start = 0
    for cut in (2, 5, 9, None):
        turns = 4 // world_size
        acts = [] if cut is None else [f"{rank}:{(cut - start) * turns + 1}:SIGKILL" for rank in range(world_size)]
        code, run, output = train("cut", *words, world_size=world_size, TRIAL_ACT=",".join(acts))
        assert code == (-9 if acts else 0), output
        start = cut
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)
