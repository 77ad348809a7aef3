from __future__ import annotations

import dataclasses

import pytest

from hpctrain.config.cluster import Requeue
from hpctrain.errors import ExitCode
from hpctrain.run.reason import MEANINGS, Reason


def having(**fields):
    """The reasons whose meaning has these values."""
    return {
        reason for reason in Reason if all(getattr(reason.meaning, name) == value for name, value in fields.items())
    }


def test_every_reason_has_a_meaning():
    assert MEANINGS.keys() == set(Reason)


def test_exit_codes():
    interrupted = {Reason.INTERRUPTED, Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.NODE_FAILURE, Reason.PAUSED}
    assert having(exit_code=ExitCode.FINISHED) == {Reason.COMPLETED}
    assert having(exit_code=ExitCode.CANCELLED) == {Reason.CANCELLED}
    assert having(exit_code=ExitCode.INTERRUPTED) == having(resumable=True) == interrupted
    assert having(exit_code=ExitCode.FAILED) == set(Reason) - interrupted - {Reason.COMPLETED, Reason.CANCELLED}


def test_what_each_reason_means():
    slurms = {Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.NODE_FAILURE, Reason.CANCELLED}
    machines = {Reason.HANG, Reason.INFRASTRUCTURE, Reason.OUT_OF_MEMORY}
    final = {Reason.COMPLETED, Reason.FAILED, Reason.CANCELLED, Reason.STALLED, Reason.PAUSED}
    stopped = {Reason.INTERRUPTED, Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.CANCELLED, Reason.PAUSED}
    assert having(by_slurm=True) == slurms
    assert having(machine_failure=True) == machines
    assert having(budget="max_failures") == machines | {Reason.INTERRUPTED}
    assert having(may_stall=False) == {Reason.PREEMPTED, Reason.NODE_FAILURE, Reason.INTERRUPTED, Reason.PAUSED}
    assert having(stays_in_allocation=True) == {Reason.INTERRUPTED}
    assert having(requeued=False) == final
    assert having(orderly=True) == stopped | {Reason.COMPLETED}


@pytest.mark.parametrize("reason", Reason)
def test_a_budget_is_a_key_under_cluster_requeue(reason):
    keys = {field.name for field in dataclasses.fields(Requeue)}
    assert reason.meaning.budget is None or reason.meaning.budget in keys
