from __future__ import annotations

import json
import os
import signal

from hpctrain.run.checkpoints import list_checkpoints


def evaluated(directory):
    records = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    return [record["step"] for record in records if "eval/loss" in record]


def saved(directory):
    return [info.step for info in list_checkpoints(directory)]


def test_a_signal_before_the_first_step_stops_without_a_step_or_a_save(attempt, directory):
    trainer = attempt()
    os.kill(os.getpid(), signal.SIGTERM)
    assert not trainer.run()
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


def test_every_evaluation_among_the_best_is_saved(attempt, directory):
    words = ["checkpoint.keep_best=2", "checkpoint.every_steps=null", "optimizer.lr=0.2", "checkpoint.keep=4"]
    attempt(*words).run()
    scores = {info.step: info.score.value for info in list_checkpoints(directory)}
    assert 4 in scores
    assert set(scores) <= {4, 8, 10}
