"""The scheduler's commands, asked about real jobs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler.job import JobState, SlurmJob, explain_held
from hpctrain.scheduler.slurm import Slurm

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox


def until(ask: Callable[[], SlurmJob | None], ready: Callable[[SlurmJob], bool], timeout: float = 120) -> SlurmJob:
    deadline = time.monotonic() + timeout
    while True:
        record = None
        with suppress(SchedulerMissingError):  # a busy machine lets the controller answer late
            record = ask()
        if record is not None and ready(record):
            return record
        assert time.monotonic() < deadline, record
        time.sleep(0.1)


def one(slurm: Slurm, job_id: str) -> Callable[[], SlurmJob | None]:
    return lambda: slurm.find([job_id])[job_id]


def test_from_the_queue_to_the_end(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    slurm, name = Slurm(sandbox.environ), "lr=1e-3, a b|c JobState=FAILED"
    wrap = f"--wrap=until [ -e {tmp_path}/go ]; do sleep 0.1; done; exit 3"
    job = sandbox.submit(f"--job-name={name}", "--time=7", "-N2", f"--output={tmp_path}/out", wrap)
    running = until(one(slurm, job), lambda record: record.state is JobState.RUNNING)
    assert (running.job_id, running.number, running.restarts) == (job, int(job), 0)
    assert (running.requeue, running.preempt_time) == (True, None)
    assert running.start_time is not None
    assert running.end_time == running.start_time + 420
    assert slurm.show(job) == running
    (tmp_path / "go").touch()
    ended = until(one(slurm, job), lambda record: record.state.is_finished)
    assert (ended.state, ended.reason) == (JobState.FAILED, "NonZeroExitCode")
    assert slurm.show(job) == ended


def test_a_held_job_starts_once_it_is_released(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    slurm = Slurm(sandbox.environ)
    array = sandbox.submit("--hold", "--array=3-4", f"--output={tmp_path}/out_%a", "--wrap=true")
    record = until(one(slurm, f"{array}_3"), lambda record: record.state.is_pending)
    text = explain_held(record)
    assert text == f"its user holds it; type `scontrol release {array}_3` (JobHeldUser)"
    sandbox.ask("scontrol", "release", f"{array}_3")
    until(one(slurm, f"{array}_3"), lambda record: record.state is JobState.COMPLETED)
    other = slurm.find([f"{array}_4"])[f"{array}_4"]
    assert other is not None
    assert explain_held(other) is not None
    slurm.cancel(array)


def test_unknown_jobs_are_none_and_no_error(sandbox: SlurmSandbox) -> None:
    slurm = Slurm(sandbox.environ)
    assert slurm.find(["999999", "999998_3"]) == {"999999": None, "999998_3": None}
    assert slurm.show("999999") is None
    assert slurm.show("999998_3") is None
    slurm.cancel("999999")
    with pytest.raises(SchedulerError, match="Invalid job id"):
        slurm.requeue("999999")


def test_without_accounting(sandbox: SlurmSandbox) -> None:
    with pytest.raises(SchedulerMissingError, match="accounting"):
        Slurm(sandbox.environ).accounting(["1"])


def test_arrays_are_reported_by_their_tasks(sandbox: SlurmSandbox) -> None:
    slurm = Slurm(sandbox.environ)
    array = sandbox.submit("--array=1-4%1", "--wrap=sleep 60")
    tasks = [f"{array}_{task}" for task in (1, 2, 3, 4)]
    until(one(slurm, tasks[0]), lambda record: record.state is JobState.RUNNING)
    found = slurm.find(tasks)
    assert [record.state.is_pending for record in found.values() if record] == [False, True, True, True]
    assert found[tasks[1]].reason == "JobArrayTaskLimit"  # type: ignore[union-attr]
    assert set(slurm.queue([array])) == set(tasks)
    shown = slurm.show(tasks[2])
    assert shown is not None
    assert (shown.job_id, shown.state) == (tasks[2], JobState.PENDING)
    slurm.cancel(tasks[1])
    assert slurm.find(tasks[1:3])[tasks[2]] is not None
    slurm.cancel(array)
    until(one(slurm, tasks[0]), lambda record: record.state is JobState.CANCELLED)
    until(one(slurm, tasks[3]), lambda record: record.state is JobState.CANCELLED)


def test_why_a_job_waits_and_when_it_may_start(sandbox: SlurmSandbox) -> None:
    slurm = Slurm(sandbox.environ)
    first = sandbox.submit("-N4", "--exclusive", "--time=10", "--wrap=sleep 60")
    until(one(slurm, first), lambda record: record.state is JobState.RUNNING)
    second = sandbox.submit("-N4", "--time=10", "--wrap=true")
    later = sandbox.submit("--begin=now+1hour", "--wrap=true")
    assert until(one(slurm, second), lambda record: record.reason == "Resources").state is JobState.PENDING
    assert until(one(slurm, later), lambda record: record.reason == "BeginTime").state is JobState.PENDING
    expected = until(one(slurm, second), lambda record: record.start_time is not None)
    running = slurm.show(first)
    assert running is not None
    assert expected.start_time == running.end_time


def test_a_requeued_job(sandbox: SlurmSandbox) -> None:
    slurm = Slurm(sandbox.environ)
    job = sandbox.submit("--requeue", "--wrap=sleep 60")
    until(one(slurm, job), lambda record: record.state is JobState.RUNNING)
    slurm.requeue(job)
    waiting = until(one(slurm, job), lambda record: record.state.is_pending)
    assert waiting.restarts == 1
    slurm.cancel(job)
    cancelled = until(one(slurm, job), lambda record: record.state.is_finished)
    assert cancelled.state is JobState.CANCELLED
    slurm.cancel(job)


def test_a_preemption_shows_its_deadline(sandbox: SlurmSandbox) -> None:
    slurm = Slurm(sandbox.environ)
    job = sandbox.submit("-N4", "--time=10", "--wrap=trap '' TERM; sleep 60")
    until(one(slurm, job), lambda record: record.state is JobState.RUNNING)
    sandbox.preempt(seconds=1)
    preempted = until(one(slurm, job), lambda record: record.preempt_time is not None)
    assert preempted.preempt_time is not None
    assert preempted.end_time is not None
    assert preempted.state in {JobState.RUNNING, JobState.SIGNALING}
    assert 5 <= preempted.end_time - preempted.preempt_time <= 15
    shown = slurm.show(job)
    assert shown is not None
    assert (shown.preempt_time, shown.end_time) == (preempted.preempt_time, preempted.end_time)


def test_with_squeue_alone(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    (tmp_path / "squeue").symlink_to(str(shutil.which("squeue")))
    slurm = Slurm({**sandbox.environ, "PATH": str(tmp_path)})
    job = sandbox.submit("--wrap=sleep 60")
    record = slurm.find([job, "999999"])[job]
    assert record is not None
    assert not record.state.is_finished


def test_with_none_of_the_commands(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    with pytest.raises(SchedulerMissingError):
        Slurm({**sandbox.environ, "PATH": str(tmp_path)}).find(["1"])


@pytest.mark.sandbox("--accounting")
def test_accounting(sandbox: SlurmSandbox) -> None:
    slurm = Slurm(sandbox.environ)
    job = sandbox.submit("--job-name=two\nlines", "--time=7", "--wrap=exit 3")
    array = sandbox.submit("--array=1-3%1", "--hold", "--wrap=true")
    until(lambda: slurm.show(job), lambda record: record.state is JobState.FAILED)
    ended = until(lambda: slurm.accounting([job]).get(job), lambda record: record.state.is_finished)
    assert (ended.state, ended.number) == (JobState.FAILED, int(job))
    tasks = {f"{array}_{task}" for task in (1, 2, 3)}
    for task in tasks:
        until(lambda task=task: slurm.accounting([array]).get(task), lambda record: record.state is JobState.PENDING)
    waiting = slurm.accounting([array])
    assert set(waiting) == tasks
    assert all(record.state is JobState.PENDING for record in waiting.values())
    assert slurm.accounting(["999999"]) == {}
    slurm.cancel(array)
    until(one(slurm, f"{array}_2"), lambda record: record.state is JobState.CANCELLED)
