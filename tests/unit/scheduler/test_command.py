"""One command of SLURM, as a program: what is passed to it, and what each of its failures means."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler import command
from hpctrain.scheduler.command import SchedulerSilentError, UnknownJobError, run
from hpctrain.scheduler.job import JobState, SlurmJob


def test_its_output_is_returned_and_its_input_is_empty(slurm):
    slurm.script("squeue", "cat; echo $*; echo more >&2")
    assert run(["squeue", "--jobs=7", "--noheader"], slurm.environ, 5) == "--jobs=7 --noheader\n"


def test_output_that_is_not_text_is_no_error(slurm):
    slurm.script("squeue", "printf 'caf\\351'")
    assert run(["squeue"], slurm.environ, 5) == "caf\ufffd"


def test_a_users_settings_are_kept_away_and_the_language_is_fixed(slurm):
    slurm.script("squeue", "env")
    own = {"SQUEUE_STATES": "FAILED", "SCANCEL_INTERACTIVE": "1", "LC_ALL": "de_DE.UTF-8", "SLURM_CONF": "x"}
    printed = run(["squeue"], slurm.environ | own, 5)
    variables = dict(line.split("=", 1) for line in printed.splitlines())
    assert not {"SQUEUE_STATES", "SCANCEL_INTERACTIVE"} & set(variables)
    assert (variables["LC_ALL"], variables["SLURM_TIME_FORMAT"], variables["SLURM_CONF"]) == ("C", "%s", "x")


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("kill -TERM $$", SchedulerSilentError, "ended by SIGTERM, without an answer"),
        ("echo 'Zero Bytes were transmitted or received' >&2; exit 1", SchedulerSilentError, "Zero Bytes were"),
        ("echo 'Requeue request failed: Message receive failure' >&2; exit 1", SchedulerSilentError, "Requeue request"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", SchedulerSilentError, "Slurm accounting storage"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", UnknownJobError, "slurm_load_jobs"),
        ("echo 'Job 7 not found'; exit 1", UnknownJobError, "Job 7 not found"),
        ("echo 'Access/permission\n denied' >&2; exit 1", SchedulerError, "Access/permission denied"),
        ("exit 3", SchedulerError, "exit code 3"),
    ],
)
def test_a_failure_is_silence_an_unknown_job_or_a_refusal(slurm, script, kind, message):
    slurm.script("scontrol", script)
    with pytest.raises(SchedulerError) as caught:
        run(["scontrol", "--oneliner", "show", "job", "7"], slurm.environ, 5)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"scontrol show job 7: {message}")


def test_a_command_that_does_not_end_is_silent(slurm):
    slurm.script("sacct", "exec sleep 60")
    with pytest.raises(SchedulerSilentError, match=r"^sacct --jobs=7: SLURM did not answer within 0\.2 s"):
        run(["sacct", "--parsable2", "--jobs=7"], slurm.environ, 0.2)


def test_a_command_that_is_not_installed_says_what_to_do(tmp_path):
    with pytest.raises(SchedulerMissingError, match=r"squeue in PATH: No such file.*login node") as caught:
        run(["squeue"], {"PATH": str(tmp_path)}, 5)
    assert not isinstance(caught.value, SchedulerSilentError)


CAPTURED = Path(__file__).parent / "captured"


def captured(name: str) -> str:
    return (CAPTURED / name).read_text()


def by_id(records: list[SlurmJob]) -> dict[str, SlurmJob]:
    return {record.job_id: record for record in records}


def test_squeue_tells_every_job_and_every_task_of_an_array() -> None:
    found = by_id(command.squeue(captured("squeue.txt")))
    assert set(found) == {"21_1", "21_2", "21_4", "21_5", "21_6", "22", "23", "24", "25", "26", "3"}
    assert found["21_4"].state is JobState.PENDING
    assert found["21_4"].reason == "JobArrayTaskLimit"
    assert found["21_4"].start_time is None
    assert (found["21_2"].number, found["21_2"].state) == (28, JobState.RUNNING)


def test_squeue_fields() -> None:
    assert by_id(command.squeue(captured("squeue.txt")))["22"] == SlurmJob(
        job_id="22",
        number=22,
        state=JobState.RUNNING,
        restarts=0,
        start_time=1795257042,
        end_time=1795343742,
        requeue=True,
    )


def test_squeue_of_jobs_in_trouble() -> None:
    found = by_id(command.squeue(captured("squeue.txt")))
    assert (found["23"].state, found["23"].reason) == (JobState.FAILED, "NonZeroExitCode")
    assert (found["25"].state, found["25"].restarts) == (JobState.COMPLETING, 1)
    assert (found["24"].start_time, found["24"].requeue) == (1826793044, False)
    assert found["26"].reason == "BeginTime"
    assert (found["3"].preempt_time, found["3"].end_time) == (1795257132, 1795257142)


def test_a_reason_of_several_lines_with_bars() -> None:
    rows = captured("squeue.txt").replace("|Resources|", "|burst_buffer/lua: slurm_bb_setup:\n7|2 failed\r|")
    found = by_id(command.squeue(rows))
    assert len(found) == 11
    assert found["24"].reason == "burst_buffer/lua: slurm_bb_setup:\n7|2 failed"


def test_scontrol_fields() -> None:
    (record,) = command.scontrol(captured("scontrol-names.txt"))
    (same,) = [job for job in command.squeue(captured("squeue.txt")) if job.job_id == "22"]
    assert record == same


def test_scontrol_of_a_job_whose_command_line_looks_like_fields() -> None:
    """SLURM 26.05.5, where a job that can't be preempted has no PreemptTime."""
    (record,) = command.scontrol(captured("scontrol-26.05.txt"))
    assert (record.state, record.restarts, record.preempt_time) == (JobState.RUNNING, 0, None)


def test_scontrol_with_numbers_of_an_unknown_form(caplog: pytest.LogCaptureFixture) -> None:
    text = (
        captured("scontrol-26.05.txt")
        .replace("Restarts=0", "Restarts=none")
        .replace("EndTime=1827241647", "EndTime=soon")
    )
    (record,) = command.scontrol(text.replace("Requeue=1", "Requeue=maybe"))
    assert (record.restarts, record.end_time, record.requeue) == (None, None, None)
    assert "can't parse the number 'none'" in caplog.text


def test_scontrol_of_an_array() -> None:
    found = by_id(command.scontrol(captured("scontrol-array.txt")))
    assert set(found) == {"21_1", "21_2", "21_[4-6%2]"}
    assert found["21_[4-6%2]"].state.is_pending


def test_scontrol_of_an_array_that_was_cancelled_in_the_queue() -> None:
    text = captured("scontrol-array.txt").replace("ArrayTaskId=4-6%2", "ArrayTaskId=4294967294")
    assert command.scontrol(text)[0].job_id == "21"


def test_scontrol_during_a_preemption() -> None:
    (record,) = command.scontrol(captured("scontrol-preempted.txt"))
    assert (record.state, record.preempt_time, record.end_time) == (JobState.RUNNING, 1795257132, 1795257142)


def test_scontrol_with_a_name_of_two_lines() -> None:
    (record,) = command.scontrol(captured("scontrol-lines.txt").replace("two\nlines", "two\n   JobState=RUNNING"))
    assert record.state is JobState.PENDING


def test_scontrol_of_a_failed_job() -> None:
    (record,) = command.scontrol(captured("scontrol-failed.txt"))
    assert (record.state, record.reason) == (JobState.FAILED, "NonZeroExitCode")


def test_sacct() -> None:
    found = by_id(command.sacct(captured("sacct.txt")))
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
    assert command.squeue("") == command.scontrol("") == command.sacct("") == []


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (command.squeue, "JOBID PARTITION\n"),
        (command.squeue, "12|RUNNING|\n"),
        (command.scontrol, "JobId=12\n   JobState=RUNNING\n"),
        (command.scontrol, "JobId=12 JobName=x\n   UserId=ada(1000)\n   JobState=RUNNING\n"),
        (command.sacct, "12|RUNNING\n"),
    ],
)
def test_an_answer_of_another_shape_is_an_error(read, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SchedulerError, match=r"expected .* found"):
        read(text)


NODES = captured("scontrol-nodes.txt")
"""n4 is dead and n3 well; slurmd began on all of them at 1795258447, and again on n4 at 1795261959."""


def test_dead_nodes_and_those_that_started_again_have_failed():
    assert command.failed_nodes(NODES, since=1795261960) == ("n4",)
    assert command.failed_nodes(NODES.replace("State=DOWN+NOT_RESPONDING", "State=IDLE"), since=1795261960) == ()
    assert command.failed_nodes(NODES.replace("State=DOWN+NOT_RESPONDING", "State=IDLE"), since=1795260000) == ("n4",)
    assert command.failed_nodes(NODES, since=0) == ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    "state", ["DOWN", "DOWN*", "DOWN*+DRAIN", "MIXED*+CLOUD", "IDLE*", "ALLOCATED+NOT_RESPONDING", "FAIL", "DOWN+DRAIN"]
)
def test_states_of_nodes_that_are_gone(state):
    assert command.failed_nodes(f"NodeName=n1 State={state} SlurmdStartTime=5", since=10) == ("n1",)


@pytest.mark.parametrize("state", ["IDLE", "ALLOCATED", "MIXED+DRAIN", "IDLE+COMPLETING", "RESERVED"])
def test_states_of_nodes_that_are_there(state):
    assert command.failed_nodes(f"NodeName=n1 State={state} SlurmdStartTime=5", since=10) == ()


def test_a_node_that_never_started_and_an_empty_answer():
    assert command.failed_nodes("NodeName=n1 State=IDLE SlurmdStartTime=None", since=10) == ()
    assert command.failed_nodes("", since=10) == ()


@pytest.mark.parametrize(
    ("lines", "largest"),
    [
        ("MaxArraySize            = 1001\nMaxDBDMsgs = 20012\n", 1001),
        ("MaxArraySize            = 0\n", 1),
        ("MaxArraySize = 100001\nSchedulerParameters     = bf_interval=2,max_array_tasks=1000,defer\n", 1000),
    ],
)
def test_how_many_tasks_an_array_may_have(lines: str, largest: int) -> None:
    assert command.largest_array(f"Configuration data as of 1795257042\n{lines}") == largest


def test_a_configuration_without_a_bound_on_arrays_is_an_error() -> None:
    with pytest.raises(SchedulerError, match="MaxArraySize"):
        command.largest_array("Slurmctld(primary) at controller is DOWN\n")


NOTHING = ["", "(null)", "None", "N/A", "n/a", "Unknown", "NONE"]


@pytest.mark.parametrize("value", NOTHING)
def test_slurms_ways_to_say_nothing(value: str) -> None:
    assert command.parse_text(value) == ""
    assert command.parse_time(value) is None


def test_moment() -> None:
    assert command.parse_time("1795257041") == 1795257041
    assert command.parse_time("0") is None


def test_a_number_of_a_newer_slurm_is_none_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert command.parse_optional_number("12") == 12
    assert (command.parse_optional_number("many"), command.parse_time("tomorrow")) == (None, None)
    for value in ("many", "tomorrow"):
        assert f"can't parse the number '{value}' in SLURM's answer; treating it as unknown" in caplog.text


@pytest.mark.parametrize(
    ("job_id", "ids"),
    [
        ("12", "12"),
        ("12_3", "12_3"),
        ("12_[4-6%2]", "12_4 12_5 12_6"),
        ("12_[1,3,5-9:2]", "12_1 12_3 12_5 12_7 12_9"),
    ],
)
def test_array_tasks(job_id: str, ids: str) -> None:
    assert command.array_tasks(job_id) == ids.split()


def test_what_cannot_be_read_is_an_error_that_shows_it() -> None:
    for read, value in [
        (command.parse_number, "many"),
        (command.array_tasks, "12_[a]"),
        (command.array_tasks, "12_[1-99999999]"),
    ]:
        with pytest.raises(SchedulerError) as caught:
            read(value)
        assert repr(value) in str(caught.value) or value.split(":")[-1] in str(caught.value)
