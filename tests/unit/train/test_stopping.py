from __future__ import annotations

import re
import signal
import time

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import CheckpointError
from hpctrain.rank.stop_request import Stop, StopKind, StopRequest
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from hpctrain.train.stopping import Stopping
from tests.unit.supervising import STOPS


@pytest.fixture
def preempted(slurm, lone_world):
    """Makes the stop of a job that SLURM ends in so many seconds."""

    def stopping(left_s):
        slurm.job(re.sub(r" EndTime=\d+", f" EndTime={int(time.time()) + left_s}", STOPS["preempted"]))
        environment = ClusterEnvironment.from_environment(slurm.environ)
        return Stopping(lone_world, environment, StopRequest(), slurm=Slurm(slurm.environ, run=slurm.run))

    return stopping


@pytest.mark.parametrize(("takes_s", "fits"), [(0.0, True), (30.0, True), (41.0, False)])
def test_a_save_has_to_fit_before_the_kill_with_some_to_spare(preempted, takes_s, fits):
    stopping = preempted(60)
    assert stopping.begin(Stop(StopKind.SIGNAL, signal.SIGTERM), takes_s) == fits
    assert stopping.reason is Reason.PREEMPTED


def test_a_stop_for_an_error_raises_it_on_its_rank_and_names_it_on_the_others(lone_world):
    request = StopRequest()
    stopping = Stopping(lone_world, ClusterEnvironment.from_environment({}), request)
    with pytest.raises(CheckpointError, match="rank zero could not write a checkpoint"):
        stopping.begin(Stop(StopKind.ERROR), 0.0)
    request.fail(CheckpointError("no space"))
    with pytest.raises(CheckpointError, match="no space"):
        stopping.begin(Stop(StopKind.ERROR), 0.0)


def test_a_stop_outside_of_slurm_is_an_interruption(lone_world):
    stopping = Stopping(lone_world, ClusterEnvironment.from_environment({}), StopRequest())
    assert stopping.begin(Stop(StopKind.SIGNAL, signal.SIGINT), 1e9)
    assert stopping.reason is Reason.INTERRUPTED


def test_a_stop_of_a_cancelled_attempt_is_a_cancellation(lone_world, directory):
    ledger = Ledger(directory)
    claim = Claim(ledger, ledger.claim())
    stopping = Stopping(lone_world, ClusterEnvironment.from_environment({}), StopRequest(), claim=claim)
    directory.stop_file(claim.attempt).touch()
    assert stopping.begin(Stop(StopKind.SIGNAL, signal.SIGTERM), 1e9)
    assert stopping.reason is Reason.CANCELLED
