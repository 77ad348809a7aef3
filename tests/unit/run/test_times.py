from __future__ import annotations

import contextlib
import logging

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.times import PhaseTimes, Times, describe_start, read_times


@pytest.fixture
def times(clock):
    return Times(2.0, clock, lambda: clock() + 1e9)


def test_every_second_goes_to_one_place(times, clock):
    clock.advance(1.0)
    times.enter("rendezvous_s")
    clock.advance(0.25)
    times.enter("first_step_s")
    clock.advance(4.0)
    with times.during("eval_s"):
        clock.advance(8.0)
    clock.advance(16.0)
    assert times.training_s() == 20.0
    assert times.spent() == {"import_s": 3.0, "rendezvous_s": 0.25, "first_step_s": 20.0, "eval_s": 8.0}
    assert times.launched == 1e9 + 98
    assert sum(times.spent().values()) == clock() - 98


def test_an_error_inside_goes_back_to_what_was_before(times, clock):
    times.enter("train_s")
    clock.advance(3.0)
    with contextlib.suppress(OSError), times.during("save_s"):
        clock.advance(2.0)
        raise OSError
    clock.advance(1.0)
    assert times.spent() == {"import_s": 2.0, "train_s": 4.0, "save_s": 2.0}


def test_the_first_step_is_logged_and_recorded(times, clock, tmp_path, caplog):
    times.record_in(tmp_path)
    times.enter("first_step_s")
    with times.during("eval_s"):
        clock.advance(1.5)
    clock.advance(0.5)
    with caplog.at_level(logging.INFO, "hpctrain.run"):
        times.first_step_done(141)
    text = "4.0 s after the start: import 2.0, rendezvous 0.0, build 0.0, load 0.0, eval 1.5, first step 0.5"
    assert caplog.messages == [f"the first step came {text}"]
    assert read_times(tmp_path) == {
        "import_s": 2,
        "eval_s": 1.5,
        "first_step_s": 0.5,
        "last_step": 141,
        "seen": 1e9 + 102,
    }
    assert times.doing == "train_s"
    assert describe_start(read_times(tmp_path)) == text


def test_it_is_written_now_and_then_and_when_due(times, clock, tmp_path):
    times.record(1, force=True)
    assert read_times(tmp_path) == {}
    times.record_in(tmp_path)
    steps = []
    for step in range(30):
        times.record(step, force=step == 17)
        steps.append(read_times(tmp_path)["last_step"])
        clock.advance(1.0)
    assert sorted(set(steps)) == [0, 10, 17, 27]


def test_a_file_system_that_refuses_does_not_stop_the_training(times, tmp_path):
    times.record_in(tmp_path / "gone")
    times.record(1, force=True)
    assert read_times(tmp_path / "gone") == {}


@pytest.mark.parametrize("text", ["", "[1]", '{"train_s": "x", "seen": null}'])
def test_what_can_not_be_read_is_nothing(tmp_path, text):
    (tmp_path / "times.json").write_text(text)
    assert read_times(tmp_path) == {}


def test_the_ledger_takes_them_over_at_the_end(times, tmp_path):
    directory = RunDirectory.at(tmp_path)
    directory.create(0o750)
    ledger = Ledger(directory)
    claim = directory.attempt(ledger.claim())
    times.record_in(claim)
    ledger.start(1, None, PhaseTimes(**times.spent()), job_id=None, nodes=[], world_size=1, step=0)
    times.enter("train_s")
    times.record(7, force=True)
    ledger.end(1, reason=Reason.INFRASTRUCTURE, step=0)
    (attempt,) = ledger.attempts()
    assert (attempt.import_s, attempt.last_step, attempt.end_step) == (2.0, 7, 0)
