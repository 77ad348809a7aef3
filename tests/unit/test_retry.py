from __future__ import annotations

import pytest

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.retry import retry
from hpctrain.scheduler.command import SchedulerSilentError

SILENCE = SchedulerSilentError("Unable to contact slurm controller")


def answers(*found):
    """Gives these in turn, and raises those that are errors."""
    left = iter(found)

    def ask():
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def ask(*found, for_s=60.0, **options):
    return retry(answers(*found), on=SchedulerSilentError, for_s=for_s, problem="no answer", **options)


def test_silence_is_waited_out():
    assert ask(SILENCE, 5, every_s=0.01) == 5


def test_no_longer_than_allowed(caplog):
    with pytest.raises(SchedulerSilentError):
        ask(SILENCE, 5, for_s=0)
    assert caplog.messages == ["no answer: Unable to contact slurm controller"]


def test_a_refusal_is_an_answer():
    with pytest.raises(SchedulerError, match="disabled"):
        ask(SchedulerError("disabled"), 5)


def test_a_command_that_is_not_installed_will_not_come():
    with pytest.raises(SchedulerMissingError):
        ask(SchedulerMissingError("expected SLURM's command"), 5)


def test_the_pause_doubles_up_to_a_bound(monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    assert ask(*[SILENCE] * 5, 5, every_s=0.5, slowing_to_s=3.0) == 5
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    pauses.clear()
    assert ask(*[SILENCE] * 3, 5, every_s=2.0) == 5
    assert pauses == [2.0, 2.0, 2.0]
