from __future__ import annotations

import os
import time

import pytest

from hpctrain.drill.launched_run import LaunchedRun
from hpctrain.errors import RunFailedError
from hpctrain.files import write_json
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.ledger import EndFacts, Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.times import FILE_NAME


class Scripted(LaunchedRun):
    """A run whose attempts end after so many looks."""

    poll_s = 0.0
    settle_s = 0.3

    def __init__(self, directory, looks=0):
        super().__init__(directory, [])
        self.looks = looks

    def launch(self):
        pass

    def has_ended(self, attempt):
        self.looks -= 1
        return self.looks < 0

    def interrupt(self, signal_number):
        return "scripted"

    def resume(self):
        pass

    def stop(self):
        pass


def begin(directory, step=0):
    ledger = Ledger(directory)
    number = ledger.claim()
    ledger.start(number, job_id=None, nodes=["n1"], world_size=1, step=step)
    return number


def log(directory, *steps):
    sink = JsonLinesSink(directory.metrics, 10**9)
    for step in steps:
        sink.log(step, {"train/loss": 1.0})
    sink.close()


def steps(run, looks):
    run.looks = looks
    return [progress.step for progress in run.progress(1)]


def test_steps_are_those_of_the_attempt(directory):
    log(directory, 1, 2)
    run = Scripted(directory)
    assert steps(run, looks=3) == []  # it has not begun
    begin(directory, step=2)
    assert steps(run, looks=2) == [None, None]  # what is logged was done before it
    log(directory, 3)
    assert steps(run, looks=2) == [3, 3]


def test_steps_of_an_earlier_attempt_that_were_not_saved_do_not_count(directory):
    log(directory, 1, 2, 3)
    time.sleep(0.01)
    begin(directory, step=1)
    run = Scripted(directory)
    assert steps(run, looks=1) == [None]
    write_json(directory.attempt(1) / FILE_NAME, {"last_step": 2})  # a program that reports no metrics
    assert steps(run, looks=1) == [2]


def test_the_time_of_an_attempt_begins_with_its_start(directory):
    begin(directory)
    run = Scripted(directory, looks=2)
    run.poll_s = 0.02
    first, second = (progress.running_s for progress in run.progress(1))
    assert first == 0.0
    assert second >= 0.02


def test_the_first_save_of_an_attempt_is_noticed(directory):
    directory.checkpoints.mkdir(exist_ok=True)
    saved = directory.checkpoints / "last.pt"
    saved.touch()
    os.utime(saved, (1, 1))  # by an earlier attempt
    begin(directory)
    run = Scripted(directory, looks=3)
    found = []
    for progress in run.progress(1):
        found.append(progress.first_save_s)
        saved.touch()
    assert found[0] is None
    assert found[1] == found[2] == run.latest.first_save_s


@pytest.mark.parametrize("reason", [Reason.COMPLETED, Reason.INTERRUPTED, Reason.PREEMPTED, Reason.INFRASTRUCTURE])
def test_the_end_of_an_attempt(directory, reason):
    number = begin(directory)
    Ledger(directory).end(number, reason=reason, step=7)
    entry = Scripted(directory).end_of(number)
    assert (entry.reason, entry.end_step) == (reason, 7)


def test_an_attempt_that_the_supervisor_restarts_is_no_failure(directory):
    number = begin(directory)
    Ledger(directory).end(number, EndFacts(next="restart"), reason=Reason.HANG, step=7)
    assert Scripted(directory).end_of(number).reason is Reason.HANG


def test_a_failure_ends_the_drill_with_what_the_training_printed(directory):
    number = begin(directory)
    Ledger(directory).end(number, reason=Reason.FAILED, step=7)
    directory.path.with_name(f"{directory.path.name}.log").write_text("ValueError: no good\n")
    with pytest.raises(RunFailedError, match=rf"attempt {number} of .*: failed; the end of (.|\n)*no good"):
        Scripted(directory).end_of(number)


def test_an_attempt_without_a_recorded_end_is_a_failure(directory):
    with pytest.raises(RunFailedError, match=r"attempt 1 of .* recorded no end"):
        Scripted(directory).end_of(begin(directory))
