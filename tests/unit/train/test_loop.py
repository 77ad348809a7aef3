from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.train.checkpointing import Checkpointing


def evaluated(directory):
    records = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    return [record["step"] for record in records if "eval/loss" in record]


def saved(directory):
    return [info.step for info in list_checkpoints(directory)]


def test_a_signal_before_the_first_step_stops_without_a_step_or_a_save(attempt, directory):
    trainer = attempt()
    assert not trainer.run(lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert (trainer.step, saved(directory)) == (0, [])


def test_a_signal_stops_after_the_step_that_it_came_in_and_saves(attempt, directory):
    trainer = attempt("+task.signal_in=loss", "+task.signal_at=5")
    assert not trainer.run()
    assert (trainer.step, saved(directory)) == (3, [3])


def test_an_evaluation_that_a_stop_interrupts_is_saved_as_due_and_done_first(attempt, directory):
    stopped = attempt("+task.signal_in=evaluate", "+task.signal_at=1", "trainer.sanity_batches=0")
    assert not stopped.run()
    assert (stopped.step, evaluated(directory), saved(directory)) == (4, [], [4])
    assert attempt().run()
    assert evaluated(directory) == [4, 8, 10]


def kept(directory):
    """What the checkpoints at the steps of a straight run's hold beside weights and random states."""
    found = {}
    for info in list_checkpoints(directory):
        extra = torch.load(directory.checkpoint(info.step) / "state.pt", weights_only=True)["extra"]
        del extra["ending"]["trained_s"]
        states = {name: str(extra[name]) for name in ("callbacks", "ending", "best", "meter", "evaluation_due")}
        found[info.step] = info.score, info.weights_digest, states
    return found


@pytest.mark.parametrize("keep_best", [0, 1])
def test_a_run_that_stops_in_each_evaluation_keeps_the_checkpoints_of_a_straight_one(
    attempt, tmp_path, directory, keep_best
):
    words = ("checkpoint.every_steps=2", "checkpoint.keep=9", f"checkpoint.keep_best={keep_best}")
    words += ("checkpoint.asynchronous=false", "trainer.sanity_batches=0")
    words += ("callbacks=[early_stopping]", "callbacks.early_stopping.min_delta=9", "logger.every_steps=10")
    assert attempt(*words).run()
    straight, steps = kept(directory), evaluated(directory)
    assert all(straight[step][0] is not None for step in steps)
    directory.path.rename(tmp_path / "straight")
    directory.create(0o750)
    # the first two in the same evaluation; each has two batches
    for call in (1, 1, 3, 3):
        assert not attempt(*words, "+task.signal_in=evaluate", f"+task.signal_at={call}").run()
    assert attempt(*words).run()
    assert evaluated(directory) == steps
    assert kept(directory) == straight


def test_every_evaluation_among_the_best_is_saved(attempt, directory):
    words = ["checkpoint.keep_best=2", "checkpoint.every_steps=null", "optimizer.lr=0.2", "checkpoint.keep=4"]
    attempt(*words).run()
    scores = {info.step: info.score.value for info in list_checkpoints(directory)}
    assert 4 in scores
    assert set(scores) <= {4, 8, 10}


STOPPING = (
    "callbacks=[early_stopping]",
    "callbacks.early_stopping.min_delta=9",
    "callbacks.early_stopping.patience=1",
)


def paused(trainer):
    """Train; return where the attempt ended, and why."""
    finished = trainer.run()
    return trainer.step, "completed" if finished else str(trainer.context.stopping.reason)


def curve(directory):
    records = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    changing = ("time", "throughput", "memory")
    return [{name: value for name, value in one.items() if not name.startswith(changing)} for one in records]


@pytest.mark.parametrize("words", [(), ("trainer.ema_decay=0.9", "schedule=plateau", "callbacks=[early_stopping]")])
def test_a_run_that_pauses_at_each_evaluation_is_the_straight_one(attempt, tmp_path, directory, words):
    assert attempt(*words).run()
    straight, expected = list_checkpoints(directory)[-1].weights_digest, curve(directory)
    directory.path.rename(tmp_path / "straight")
    directory.create(0o750)
    found = [paused(attempt(*words, f"trainer.pause_at_step={step}")) for step in (1, 5, 9)]
    assert found == [(4, "paused"), (8, "paused"), (10, "completed")]
    assert (list_checkpoints(directory)[-1].weights_digest, curve(directory)) == (straight, expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainer.pause_at_step=5"], (8, "paused")),
        (["trainer.pause_at_step=4", "trainer.eval_every_steps=null", "trainer.max_epochs=2"], (4, "paused")),
        (["trainer.pause_at_step=3", "+task.eval_samples=0", "checkpoint.every_steps=null"], (3, "paused")),
        (["trainer.pause_at_step=9"], (10, "completed")),
        (["trainer.pause_at_step=50"], (10, "completed")),
        (["trainer.pause_at_step=4", "trainer.max_time_min=1e-9"], (1, "completed")),
        (
            ["trainer.pause_at_step=8", *STOPPING],
            (8, "completed"),
        ),
    ],
)
def test_a_run_pauses_after_the_first_evaluation_at_the_step_or_after_it(attempt, directory, words, expected):
    assert paused(attempt(*words)) == expected
    assert saved(directory)[-1] == expected[0]


def test_a_stop_at_the_pause_counts_and_the_next_attempt_pauses_at_once(attempt, directory):
    words = ("trainer.pause_at_step=4", "trainer.sanity_batches=0")
    for _ in range(2):  # in the evaluation, which is due then
        stopped = attempt(*words, "+task.signal_in=evaluate", "+task.signal_at=1")
        assert (*paused(stopped), evaluated(directory)) == (4, "interrupted", [])
    # after the last batch of the evaluation, and before the pause
    assert paused(attempt(*words, "+task.signal_in=evaluate", "+task.signal_at=2")) == (4, "interrupted")
    assert paused(attempt(*words)) == (4, "paused")
    assert (evaluated(directory), saved(directory)) == ([4], [4])
    assert attempt().run()
    assert evaluated(directory) == [4, 8, 10]


def test_a_signal_during_the_save_of_a_pause_counts(attempt, directory, monkeypatch):
    finish = Checkpointing.save

    def save(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        finish(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointing, "save", save)
        assert (*paused(attempt("trainer.pause_at_step=4")), saved(directory)) == (4, "interrupted", [4])
    assert paused(attempt("trainer.pause_at_step=4")) == (4, "paused")
