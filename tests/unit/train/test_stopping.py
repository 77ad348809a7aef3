from __future__ import annotations

import signal

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.state import JobState
from hpctrain.train.stopping import Departure

NOW = 1_000_000.0


@pytest.fixture
def preempted(lone_world):
    """A departure from a job that SLURM ends in so many seconds."""

    def departure(left_s):
        record = JobRecord(
            job_id="7",
            number=7,
            name="run",
            partition="p",
            state=JobState.RUNNING,
            preempt_time=int(NOW),
            end_time=int(NOW) + left_s,
        )
        environment = ClusterEnvironment.from_environment({"SLURM_JOB_ID": "7"})
        return Departure(lone_world, environment, ask={"7": record}.get, clock=lambda: NOW)

    return departure


@pytest.mark.parametrize(("takes_s", "fits"), [(0.0, True), (39.0, True), (41.0, False)])
def test_a_save_has_to_fit_before_the_kill_with_some_to_spare(preempted, takes_s, fits):
    departure = preempted(60)
    assert departure.begin(signal.SIGTERM, takes_s) == fits
    assert departure.reason is Reason.PREEMPTED
