from __future__ import annotations

import pytest

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler.patience import patiently

SILENCE = SchedulerMissingError("Unable to contact slurm controller")


def answers(*found):
    """Gives these in turn, and raises those that are errors."""
    left = iter(found)

    def ask():
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def test_silence_is_waited_out():
    assert patiently(answers(SILENCE, 5)) == 5


def test_no_longer_than_allowed():
    with pytest.raises(SchedulerMissingError):
        patiently(answers(SILENCE, 5), patience_s=0)


def test_a_refusal_is_an_answer():
    with pytest.raises(SchedulerError, match="disabled"):
        patiently(answers(SchedulerError("disabled"), 5))


def test_a_command_that_is_not_installed_will_not_come():
    missing = SchedulerMissingError("expected SLURM's command")
    missing.__cause__ = FileNotFoundError()
    with pytest.raises(SchedulerMissingError):
        patiently(answers(missing, 5))
