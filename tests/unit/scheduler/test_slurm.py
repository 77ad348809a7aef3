"""Our half of the conversation, with programs named squeue, scontrol, sacct and scancel that answer as SLURM did."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler.job import JobState
from hpctrain.scheduler.slurm import MOST_DEPENDENCIES, Slurm, dependency_on

CAPTURED = Path(__file__).parent / "captured"
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


class Scripts:
    """Shell scripts in the place of SLURM's commands, and what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": str(folder), "SQUEUE_STATES": "FAILED", "SCANCEL_INTERACTIVE": "1", "SLURM_CONF": "x"}

    def answer(self, command: str, script: str) -> None:
        path = self.folder / command
        path.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin\necho "{command} $*" >> {self.folder}/calls\n{script}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def answer_file(self, command: str, name: str) -> None:
        self.answer(command, f"cat {CAPTURED / name}")

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return [line.split()[0] for line in path.read_text().split("\n") if line] if path.exists() else []

    @property
    def slurm(self) -> Slurm:
        return Slurm(self.environ, timeout_s=5)


@pytest.fixture
def fake(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def test_many_jobs_are_one_question(fake: Scripts) -> None:
    fake.answer_file("squeue", "squeue.txt")
    fake.answer("sacct", NO_ACCOUNTING)
    found = fake.slurm.find(["21_4", "22", "23"])
    assert [record and record.state for record in found.values()] == [
        JobState.PENDING,
        JobState.RUNNING,
        JobState.FAILED,
    ]
    assert fake.calls == ["squeue"]
    assert "--jobs=21_4,22,23" in (fake.folder / "calls").read_text()


def test_thousands_of_tasks_are_one_question_about_their_arrays(fake: Scripts) -> None:
    fake.answer_file("squeue", "squeue.txt")
    fake.answer("sacct", NO_ACCOUNTING)
    wanted = ["22", *(f"21_{task}" for task in range(30_000))]
    found = fake.slurm.queue(wanted)
    assert found["21_4"].state is JobState.PENDING
    assert fake.calls == ["squeue"]
    assert "--jobs=22,21\n" in (fake.folder / "calls").read_text()


def test_thousands_of_jobs_are_as_few_questions_as_a_command_line_allows(fake: Scripts) -> None:
    fake.answer("squeue", UNKNOWN)
    fake.answer("sacct", NO_ACCOUNTING)
    wanted = [str(job) for job in range(1_000_000, 1_030_000)]
    assert set(fake.slurm.find(wanted).values()) == {None}
    assert fake.calls == ["squeue"] * 6 + ["sacct"]
    asked = [line.partition("--jobs=")[2] for line in (fake.folder / "calls").read_text().splitlines()]
    assert ",".join(asked[:6]).split(",") == wanted


def test_no_jobs_ask_nothing(fake: Scripts) -> None:
    assert fake.slurm.find([]) == fake.slurm.queue([]) == fake.slurm.accounting([]) == {}
    assert fake.calls == []


def test_what_the_controller_forgot_is_in_the_accounting(fake: Scripts) -> None:
    fake.answer("squeue", UNKNOWN)
    fake.answer_file("sacct", "sacct.txt")
    found = fake.slurm.find(["2", "3_3", "77"])
    assert found["2"] is not None
    assert found["2"].state is JobState.CANCELLED
    assert found["3_3"] is not None
    assert (found["3_3"].job_id, found["3_3"].state) == ("3_3", JobState.PENDING)
    assert found["77"] is None


def test_without_accounting_a_forgotten_job_is_none(fake: Scripts) -> None:
    fake.answer("squeue", UNKNOWN)
    fake.answer("sacct", NO_ACCOUNTING)
    assert fake.slurm.find(["2"]) == {"2": None}


def test_a_controller_that_is_silent_is_not_asked_twice(fake: Scripts) -> None:
    fake.answer("squeue", SILENT)
    fake.answer("scontrol", SILENT)
    fake.answer_file("sacct", "sacct.txt")
    assert fake.slurm.find(["2"])["2"] is not None
    assert fake.calls == ["squeue", "sacct"]


@pytest.mark.parametrize("squeue", [SILENT, "exec sleep 60", None])
def test_when_nothing_answers_it_is_an_error_not_an_absent_job(fake: Scripts, squeue: str | None) -> None:
    if squeue:
        fake.answer("squeue", squeue)
    fake.answer("sacct", NO_ACCOUNTING)
    with pytest.raises(SchedulerMissingError):
        Slurm(fake.environ, timeout_s=0.5).find(["2"])


def test_a_job_is_not_gone_because_the_accounting_has_not_heard_of_it_yet(fake: Scripts) -> None:
    fake.answer("squeue", SILENT)
    fake.answer_file("sacct", "sacct.txt")
    with pytest.raises(SchedulerMissingError, match="Unable to contact slurm controller"):
        fake.slurm.find(["2", "77"])


def test_a_pending_task_that_was_cancelled_with_its_array(fake: Scripts) -> None:
    row = (CAPTURED / "squeue.txt").read_text().splitlines()[1]
    array = row.replace("23|23", "9|9", 1).replace("FAILED", "CANCELLED").replace("NonZeroExitCode", "None") + "\n"
    (fake.folder / "array").write_text(array)
    fake.answer("squeue", f'case "$*" in *--jobs=8,9) cat {fake.folder}/array;; *) {UNKNOWN};; esac')
    fake.answer("sacct", NO_ACCOUNTING)
    found = fake.slurm.find(["9_3", "8_1"])
    assert found["9_3"] is not None
    assert (found["9_3"].job_id, found["9_3"].state) == ("9_3", JobState.CANCELLED)
    assert found["8_1"] is None


def test_show(fake: Scripts) -> None:
    fake.answer_file("scontrol", "scontrol-array.txt")
    assert [getattr(fake.slurm.show(job_id), "job_id", None) for job_id in ("21_2", "21")] == ["21_2", "21_[4-6%2]"]
    fake.answer("scontrol", UNKNOWN)
    assert fake.slurm.show("21") is None
    fake.answer("scontrol", "echo 'Job 21_9 not found'; exit 1")
    assert fake.slurm.show("21_9") is None


def test_cancel_and_requeue(fake: Scripts) -> None:
    fake.answer("scancel", "exit 0")
    fake.answer("scontrol", "exit 0")
    fake.slurm.cancel("12_3")
    fake.slurm.requeue("12_3")
    assert (fake.folder / "calls").read_text().splitlines() == ["scancel 12_3", "scontrol requeue 12_3"]


def test_of_many_jobs_those_that_slurm_refuses_are_named(fake: Scripts) -> None:
    refusal = "scancel: error: Kill job error on job id $id: Access/permission denied"
    fake.answer("scancel", f'for id in "$@"; do [ $id = 13 ] && {{ echo "{refusal}" >&2; exit 1; }}; done; exit 0')
    refused = fake.slurm.cancel_all(["12", "13", "14"])
    assert list(refused) == ["13"]
    assert "permission denied" in str(refused["13"])
    calls = (fake.folder / "calls").read_text().splitlines()
    assert calls == ["scancel 12 13 14", "scancel 12", "scancel 13", "scancel 14"]


def test_a_silent_controller_is_not_asked_for_each_job(fake: Scripts) -> None:
    fake.answer("scancel", SILENT)
    refused = fake.slurm.cancel_all(["12", "13", "14"])
    assert list(refused) == ["12", "13", "14"]
    assert fake.calls == ["scancel"]


def test_a_refusal_is_an_error_with_slurms_words(fake: Scripts) -> None:
    fake.answer("scontrol", "echo 'Requested operation is presently disabled for job 12' >&2; exit 1")
    with pytest.raises(SchedulerError, match="scontrol requeue 12: Requested operation is presently disabled"):
        fake.slurm.requeue("12")


@pytest.mark.parametrize("job_id", ["", "x", "12_", "12_[1-3]", "--user=ada", "12;ls", "12,13", "1\n"])
def test_only_job_ids_reach_a_command(fake: Scripts, job_id: str) -> None:
    slurm = fake.slurm
    for ask in (slurm.show, slurm.cancel, slurm.requeue):
        with pytest.raises(SchedulerError, match="expected a job id"):
            ask(job_id)
    for ask_many in (slurm.queue, slurm.accounting, slurm.find):
        with pytest.raises(SchedulerError, match="expected a job id"):
            ask_many([job_id])
    assert fake.calls == []


def test_the_environment_is_this_processs_by_default(fake: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.answer_file("squeue", "squeue.txt")
    monkeypatch.setenv("PATH", f"{fake.folder}{os.pathsep}{os.environ['PATH']}")
    assert Slurm().queue(["22"])["22"].state is JobState.RUNNING


def test_a_dependency_names_jobs_and_many_by_their_arrays():
    assert dependency_on(["12", "13_4"]) == "afterany:12:13_4"
    assert dependency_on([f"12_{task}" for task in range(MOST_DEPENDENCIES + 1)] + ["13"]) == "afterany:12:13"
    with pytest.raises(SchedulerError, match="expected a job id"):
        dependency_on(["12; rm"])
