from __future__ import annotations

import pytest

from hpctrain.errors import SchedulerError
from hpctrain.scheduler.job import JobState, SlurmJob, explain_held, explain_pending


@pytest.mark.parametrize("state", JobState)
def test_every_state_is_exactly_one_of_pending_running_and_finished(state: JobState) -> None:
    assert [state.is_pending, state.is_running, state.is_finished].count(True) == 1


def test_what_holds_nodes_is_running() -> None:
    running = {state.name for state in JobState if state.is_running}
    assert running == {
        *("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"),
        *("CONFIGURING", "POWER_UP_NODE", "COMPLETING", "STAGE_OUT", "UNKNOWN"),
    }


def test_a_requeued_job_is_pending_and_a_preempted_one_is_not() -> None:
    assert JobState.REQUEUED.is_pending
    assert JobState.PREEMPTED.is_finished


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", JobState.RUNNING),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("COMPLETED+", JobState.COMPLETED),
        (" OUT_OF_MEMORY ", JobState.OUT_OF_MEMORY),
    ],
)
def test_parses_what_the_commands_print(text: str, state: JobState) -> None:
    assert JobState.parse(text) is state


def test_an_unknown_state_is_logged_and_counts_as_running(caplog: pytest.LogCaptureFixture) -> None:
    state = JobState.parse("DREAMING")
    assert (state, state.is_running) == (JobState.UNKNOWN, True)
    assert "state DREAMING, which this hpctrain doesn't know; treating the job as running" in caplog.text


@pytest.mark.parametrize("text", ["", " ", "+", "running", "12"])
def test_what_is_not_a_state_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        JobState.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "nodes to become free"),
        ("(Resources)", "nodes to become free"),
        ("Priority", "higher priority"),
        ("Dependency", "another job"),
        ("BeginTime", "two minutes"),
        ("JobArrayTaskLimit", "cluster.max_parallel_runs"),
        ("PartitionTimeLimit", "cluster.time_limit_min"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "UnavailableNodes:n[1-2]"),
        ("ReqNodeNotAvail,_UnavailableNodes:n[1-2]", "drained"),
        ("QOSMaxJobsPerUserLimit", "your jobs have as many running jobs as its quality of service allows"),
        ("QOSGrpNodeLimit", "all users together have as many nodes"),
        ("QOSMaxGRESPerUser", "as many GPUs"),
        ("QOSMinGRES", "fewer GPUs"),
        ("QOSMaxWallDurationPerJobLimit", "more time than its quality of service allows to one job"),
        ("QOSMaxCpuMinutesPerJobLimit", "more CPU cores times time than"),
        ("QOSJobLimit", "running jobs"),
        ("AssocGrpCPUMinutesLimit", "its account has used up its budget of CPU cores times time"),
        ("AssocGrpCPURunMinutesLimit", "remaining time of the running jobs"),
        ("AssocGrpMemLimit", "as much memory as its account allows"),
        ("AssocMaxSubmitJobLimit", "many submitted jobs"),
        ("AssociationJobLimit", "running jobs"),
        ("None", "hasn't considered"),
        ("", "hasn't considered"),
        ("SomethingNew", "SLURM gives the reason SomethingNew"),
    ],
)
def test_plain_words(reason: str, words: str) -> None:
    text = explain_pending(reason)
    assert words in text
    assert "\n" not in text


def test_slurms_own_word_is_kept_for_a_search() -> None:
    assert explain_pending("AssocGrpGRES").endswith("(AssocGrpGRES)")
    assert explain_pending("Resources").endswith("(Resources)")


def pending(reason: str = "", job_id: str = "12", state: str = "PENDING", *, held: bool = False) -> SlurmJob:
    return SlurmJob(job_id=job_id, number=12, state=JobState(state), reason=reason, is_held=held)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (pending("JobHeldUser"), "its user holds it; type `scontrol release 12` (JobHeldUser)"),
        (pending("JobHeldAdmin", "12_3"), "an administrator holds it, and may have to release it; type `scontrol "),
        (pending("launch failed requeued held"), "SLURM couldn't start it and holds it; look at its log; type `scont"),
        (pending("launch_failed_requeued_held"), "SLURM couldn't start it and holds it; look at its log; type `scont"),
        (pending("Dependency", held=True), "SLURM holds it; type `scontrol release 12` (Dependency)"),
        (pending(state="REQUEUE_HOLD"), "SLURM holds it; type `scontrol release 12`"),
    ],
)
def test_a_held_job_and_what_releases_it(record: SlurmJob, text: str) -> None:
    found = explain_held(record)
    assert found is not None
    assert found.startswith(text)
    assert f"`scontrol release {record.job_id}`" in found


def test_jobs_that_are_not_held() -> None:
    assert explain_held(pending("Resources")) is None
    assert explain_held(pending("JobHeldUser", state="RUNNING", held=True)) is None
