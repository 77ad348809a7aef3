"""Real answers of SLURM 22.05.8, captured with times in seconds since the epoch."""

from pathlib import Path

import pytest

from hpctrain.errors import SchedulerError
from hpctrain.scheduler import answers
from hpctrain.scheduler.job import JobState, SlurmJob

CAPTURED = Path(__file__).parent / "captured"


def captured(name: str) -> str:
    return (CAPTURED / name).read_text()


def by_id(records: list[SlurmJob]) -> dict[str, SlurmJob]:
    return {record.job_id: record for record in records}


def test_squeue_tells_every_job_and_every_task_of_an_array() -> None:
    found = by_id(answers.squeue(captured("squeue.txt")))
    assert set(found) == {"21_1", "21_2", "21_4", "21_5", "21_6", "22", "23", "24", "25", "26", "3"}
    assert found["21_4"].state is JobState.PENDING
    assert found["21_4"].reason == "JobArrayTaskLimit"
    assert found["21_4"].start_time is None
    assert (found["21_2"].number, found["21_2"].state) == (28, JobState.RUNNING)


def test_squeue_fields() -> None:
    assert by_id(answers.squeue(captured("squeue.txt")))["22"] == SlurmJob(
        job_id="22",
        number=22,
        state=JobState.RUNNING,
        restarts=0,
        start_time=1795257042,
        end_time=1795343742,
        requeue=True,
    )


def test_squeue_of_jobs_in_trouble() -> None:
    found = by_id(answers.squeue(captured("squeue.txt")))
    assert (found["23"].state, found["23"].reason) == (JobState.FAILED, "NonZeroExitCode")
    assert (found["25"].state, found["25"].restarts) == (JobState.COMPLETING, 1)
    assert (found["24"].start_time, found["24"].requeue) == (1826793044, False)
    assert found["26"].reason == "BeginTime"
    assert (found["3"].preempt_time, found["3"].end_time) == (1795257132, 1795257142)


def test_a_reason_of_several_lines_with_bars() -> None:
    rows = captured("squeue.txt").replace("|Resources|", "|burst_buffer/lua: slurm_bb_setup:\n7|2 failed\r|")
    found = by_id(answers.squeue(rows))
    assert len(found) == 11
    assert found["24"].reason == "burst_buffer/lua: slurm_bb_setup:\n7|2 failed"


def test_scontrol_fields() -> None:
    (record,) = answers.scontrol(captured("scontrol-names.txt"))
    (same,) = [job for job in answers.squeue(captured("squeue.txt")) if job.job_id == "22"]
    assert record == same


def test_scontrol_of_a_job_whose_command_line_looks_like_fields() -> None:
    """SLURM 26.05.5, where a job that can't be preempted has no PreemptTime."""
    (record,) = answers.scontrol(captured("scontrol-26.05.txt"))
    assert (record.state, record.restarts, record.preempt_time) == (JobState.RUNNING, 0, None)


def test_scontrol_with_numbers_of_an_unknown_form(caplog: pytest.LogCaptureFixture) -> None:
    text = (
        captured("scontrol-26.05.txt")
        .replace("Restarts=0", "Restarts=none")
        .replace("EndTime=1827241647", "EndTime=soon")
    )
    (record,) = answers.scontrol(text.replace("Requeue=1", "Requeue=maybe"))
    assert (record.restarts, record.end_time, record.requeue) == (None, None, None)
    assert "can't parse the number 'none'" in caplog.text


def test_scontrol_of_an_array() -> None:
    found = by_id(answers.scontrol(captured("scontrol-array.txt")))
    assert set(found) == {"21_1", "21_2", "21_[4-6%2]"}
    assert found["21_[4-6%2]"].state.is_pending


def test_scontrol_of_an_array_that_was_cancelled_in_the_queue() -> None:
    text = captured("scontrol-array.txt").replace("ArrayTaskId=4-6%2", "ArrayTaskId=4294967294")
    assert answers.scontrol(text)[0].job_id == "21"


def test_scontrol_during_a_preemption() -> None:
    (record,) = answers.scontrol(captured("scontrol-preempted.txt"))
    assert (record.state, record.preempt_time, record.end_time) == (JobState.RUNNING, 1795257132, 1795257142)


def test_scontrol_with_a_name_of_two_lines() -> None:
    (record,) = answers.scontrol(captured("scontrol-lines.txt").replace("two\nlines", "two\n   JobState=RUNNING"))
    assert record.state is JobState.PENDING


def test_scontrol_of_a_failed_job() -> None:
    (record,) = answers.scontrol(captured("scontrol-failed.txt"))
    assert (record.state, record.reason) == (JobState.FAILED, "NonZeroExitCode")


def test_sacct() -> None:
    found = by_id(answers.sacct(captured("sacct.txt")))
    assert set(found) == {"1_1", "1_[3-4%1]", "2", "3_1", "3_[2-3%1]", "4"}
    assert found["2"] == SlurmJob(
        job_id="2",
        number=2,
        state=JobState.CANCELLED,
        start_time=1795256517,
        end_time=1795256519,
    )
    assert (found["1_1"].state, found["1_1"].number) == (JobState.FAILED, 5)
    assert (found["4"].reason, found["4"].start_time) == ("Dependency", None)


def test_no_jobs() -> None:
    assert answers.squeue("") == answers.scontrol("") == answers.sacct("") == []


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (answers.squeue, "JOBID PARTITION\n"),
        (answers.squeue, "12|RUNNING|\n"),
        (answers.scontrol, "JobId=12\n   JobState=RUNNING\n"),
        (answers.scontrol, "JobId=12 JobName=x\n   UserId=ada(1000)\n   JobState=RUNNING\n"),
        (answers.sacct, "12|RUNNING\n"),
    ],
)
def test_an_answer_of_another_shape_is_an_error(read, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SchedulerError, match=r"expected .* found"):
        read(text)


NODES = captured("scontrol-nodes.txt")
"""n4 is dead and n3 well; slurmd began on all of them at 1795258447, and again on n4 at 1795261959."""


def test_dead_nodes_and_those_that_started_again_have_failed():
    assert answers.failed_nodes(NODES, since=1795261960) == ("n4",)
    assert answers.failed_nodes(NODES.replace("State=DOWN+NOT_RESPONDING", "State=IDLE"), since=1795261960) == ()
    assert answers.failed_nodes(NODES.replace("State=DOWN+NOT_RESPONDING", "State=IDLE"), since=1795260000) == ("n4",)
    assert answers.failed_nodes(NODES, since=0) == ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize("state", ["DOWN", "DOWN*", "IDLE*", "ALLOCATED+NOT_RESPONDING", "FAIL", "DOWN+DRAIN"])
def test_states_of_nodes_that_are_gone(state):
    assert answers.failed_nodes(f"NodeName=n1 State={state} SlurmdStartTime=5", since=10) == ("n1",)


@pytest.mark.parametrize("state", ["IDLE", "ALLOCATED", "MIXED+DRAIN", "IDLE+COMPLETING", "RESERVED"])
def test_states_of_nodes_that_are_there(state):
    assert answers.failed_nodes(f"NodeName=n1 State={state} SlurmdStartTime=5", since=10) == ()


def test_a_node_that_never_started_and_an_empty_answer():
    assert answers.failed_nodes("NodeName=n1 State=IDLE SlurmdStartTime=None", since=10) == ()
    assert answers.failed_nodes("", since=10) == ()


@pytest.mark.parametrize(
    ("lines", "largest"),
    [
        ("MaxArraySize            = 1001\nMaxDBDMsgs = 20012\n", 1001),
        ("MaxArraySize            = 0\n", 1),
        ("MaxArraySize = 100001\nSchedulerParameters     = bf_interval=2,max_array_tasks=1000,defer\n", 1000),
    ],
)
def test_how_many_tasks_an_array_may_have(lines: str, largest: int) -> None:
    assert answers.largest_array(f"Configuration data as of 1795257042\n{lines}") == largest


def test_a_configuration_without_a_bound_on_arrays_is_an_error() -> None:
    with pytest.raises(SchedulerError, match="MaxArraySize"):
        answers.largest_array("Slurmctld(primary) at controller is DOWN\n")
