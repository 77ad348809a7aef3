"""On a real SLURM: the command of notify.command learns of a requeue and of the end, and holds neither up."""

from __future__ import annotations

import json
import time

import pytest

from hpctrain.attempt.notification import KILLED_S, SOON_S
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import STEPS, SubmittedRuns


def keeps(runs: SubmittedRuns, then: str = "true") -> str:
    """A command that keeps what it gets."""
    seen = runs.folder / "seen"
    seen.mkdir()
    return f"notify.command='cat > {seen}/$(date +%s%N); {then}'"


def seen(runs: SubmittedRuns) -> list[tuple[str, int, int, str]]:
    """Event, attempt, step and message of each notification, in order."""
    found = [json.loads(path.read_text()) for path in (runs.folder / "seen").iterdir()]
    found.sort(key=lambda one: one["time"])
    return [(one["event"], one["attempt"], one["step"], one["message"]) for one in found]


def preempt_once(run: FollowedRun) -> None:
    run.until_step(3)
    run.preempt()
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"


@pytest.mark.nightly
def test_a_command_learns_of_a_preemption_and_of_the_end(runs: SubmittedRuns) -> None:
    """Though SLURM sends SIGTERM to all processes of a job that is requeued."""
    run = runs.train(keeps(runs), nodes=1)
    preempt_once(run)
    (_, _, stopped), _ = run.story
    first, second = (one.nodes[0] for one in run.attempts)
    assert seen(runs) == [
        ("started", 1, 0, f"attempt 1 starts on {first}"),
        ("interrupted", 1, stopped, f"preempted after step {stopped}; job {run.job_id} is requeued"),
        ("started", 2, stopped, f"attempt 2 starts on {second} after step {stopped}; attempt 1 ended as preempted"),
        ("completed", 2, STEPS, f"completed after step {STEPS}"),
    ]
    assert run.digest == runs.straight(processes=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.sandbox("--grace-time=30"), id="grace time"),
        pytest.param(marks=pytest.mark.sandbox("--grace-time=0"), id="without grace time"),
    ],
)
def test_a_command_that_hangs_costs_a_requeue_seconds(runs: SubmittedRuns) -> None:
    run = runs.train(keeps(runs, "sleep 600"), "notify.timeout_s=600", nodes=1)
    run.until_step(3)
    run.preempt()
    run.until(lambda: run.attempts and run.attempts[0].reason, "the end of the attempt")
    run.until(lambda: "is requeued" in run.batch_log, "the requeue")
    requeued = time.monotonic()
    run.until(lambda: run.supervisor is None, "the end of the batch script")
    assert time.monotonic() - requeued < SOON_S + KILLED_S + 5
    run.until_attempt(2)
    run.set_pace(0)
    run.until(lambda: run.reasons[-1] == "completed", "the last step")
    runs.sandbox.ask("scancel", run.job_id)  # the end waits for notify.timeout_s
    run.until_ended()
    assert run.reasons == ["preempted", "completed"]
    assert run.digest == runs.straight(processes=1)


@pytest.mark.nightly
def test_a_command_that_hangs_delays_the_end_by_its_timeout(runs: SubmittedRuns) -> None:
    run = runs.train(keeps(runs, "sleep 600"), "notify.timeout_s=3", pace_s=0, nodes=1)
    assert run.until_ended() == "COMPLETED"
    assert [one[0] for one in seen(runs)] == ["started", "completed"]
    assert run.batch_log.count("notify.command took more than 3 s") == 2


@pytest.mark.nightly
def test_a_command_learns_of_a_program_whose_job_is_cancelled(runs: SubmittedRuns) -> None:
    run = runs.new()
    runs.launch(run, ["sleep", "600"], keeps(runs), nodes=1)
    run.until(lambda: "attempt 1 on" in run.batch_log, "the first attempt")
    runs.sandbox.ask("scancel", run.job_id)
    run.until_ended()
    assert [one[0] for one in seen(runs)] == ["started", "cancelled"]
