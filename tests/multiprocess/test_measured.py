"""Metrics over all samples are the same after interruptions, also of the evaluation itself."""

from __future__ import annotations

import pytest

WORDS = (
    *(
        "task=custom",
        "task._target_=tests.multiprocess.programs.measured.Measured",
        "logger.tensorboard=false",
        "+task.num_samples=36",
    ),
    *("+task.eval_samples=23", "+task.dropout=0.3", "trainer.micro_batch_size=2", "trainer.global_batch_size=12"),
    *("trainer.max_steps=8", "trainer.eval_every_steps=3", "optimizer.lr=0.01", "trainer.ema_decay=0.9"),
    *("checkpoint.keep_best=1", "checkpoint.every_steps=1", "checkpoint.asynchronous=false"),
)


def outcome(run):
    return run.digest, run.metrics


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("cuts", "with_torchmetrics"), [((1, 4, 6), False), ((2, 3, 7), False), ((0, 5, 6), False), ((2, 4, 5), True)]
)
def test_killed_at_three_steps_it_measures_as_straight(train, world_size, cuts, with_torchmetrics):
    if with_torchmetrics:
        pytest.importorskip("torchmetrics")
    words = [*WORDS, f"+task.with_torchmetrics={with_torchmetrics}"]
    code, straight, output = train("straight", *words, world_size=world_size)
    assert code == 0, output
    per_step, start = 12 // 2 // world_size, 0
    for cut in (*cuts, None):
        calls = 0 if cut is None else per_step * (cut - start) + 1
        acts = "" if cut is None else ",".join(f"{rank}:{calls}:SIGKILL" for rank in range(world_size))
        code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=acts)
        assert code == (-9 if acts else 0), output
        start = cut
    assert [attempt[0] for attempt in run.attempts] == [0, *cuts]
    assert outcome(run) == outcome(straight)
    evaluations = [record for record in run.metrics if "eval/loss" in record]
    assert [record["step"] for record in evaluations] == [3, 6, 8]
    expected = {"eval/confusion/recall/0", "eval/confusion/margin", "eval/median", "eval/tail"}
    assert all(expected <= record.keys() for record in evaluations)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_that_was_interrupted_begins_again(train, world_size):
    code, straight, output = train("straight", *WORDS, world_size=world_size)
    assert code == 0, output
    per_evaluation = 12 // world_size
    for call in (2 + per_evaluation // 2, per_evaluation // 2, 0):
        code, run, output = train("run", *WORDS, world_size=world_size, MEASURED_STOP=str(call))
        assert (code == 0) is (not call), output
    if world_size == 1:
        # several ranks may agree on a stop only after the last batch
        assert [attempt[0] for attempt in run.attempts] == [0, 3, 3]
    assert outcome(run) == outcome(straight)
