"""The shell script of the nodes, run for real, how its lines are read, and what they mean."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.folder import DoctorFolder, DoctorJobRecord, NodeAnswer, read_job, write_record
from hpctrain.doctor.nodes import MARK, SCRIPT, failed_script, node_findings, read_line, unanswered_job


def answer_of(
    folder: Path, *, token: str = "t", python: str = sys.executable, directory: Path | None = None
) -> NodeAnswer:
    """What a node answers whose shell runs here."""
    answers, begun_at = {"n1": NodeAnswer("n1")}, time.time()
    done = subprocess.run(
        ["sh", "-c", SCRIPT, "sh", str(folder), token, python, str(directory or Path.cwd())],
        env={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1", "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        read_line(answers, line, begun_at, time.time())
    return answers["n1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "token").write_text("t")
    return tmp_path


def test_a_node_that_works(folder: Path) -> None:
    answer = answer_of(folder)
    assert answer.works
    assert answer.ended
    assert answer.directory == ""
    assert answer.versions["torch"].startswith("2.")
    assert (folder / "nodes" / "n1").read_text() == "t\n"
    assert answer.clock_ahead_s is not None
    low, high = answer.clock_ahead_s
    assert low <= 0 <= high


def test_a_folder_that_is_missing_or_another_one(folder: Path) -> None:
    assert answer_of(folder / "absent").folder == "missing"
    assert answer_of(folder, token="another").folder == "other"


def test_a_folder_in_which_nothing_can_be_made(folder: Path) -> None:
    (folder / "nodes").rmdir()
    answer = answer_of(folder)
    assert answer.folder == "refused"
    assert "nonexistent" in answer.folder_problem.lower() or "no such" in answer.folder_problem.lower()
    assert not answer.works


def test_a_python_that_is_missing_or_broken(folder: Path, tmp_path: Path) -> None:
    assert answer_of(folder, python="/nowhere/python").python == "missing"
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho first line >&2\necho libfoo.so is missing >&2\nexit 1\n")
    broken.chmod(0o755)
    answer = answer_of(folder, python=str(broken))
    assert (answer.python, answer.python_problem) == ("broken", "libfoo.so is missing")


def test_another_working_directory(folder: Path) -> None:
    assert answer_of(folder, directory=Path("/nowhere")).directory == str(Path.cwd())


def test_lines_of_others_are_ignored() -> None:
    answers = {"n1": NodeAnswer("n1")}
    for line in ("Welcome to the cluster", f"{MARK} n9 end", f"{MARK}", "", "n1 end"):
        read_line(answers, line, 0.0, 1.0)
    assert answers == {"n1": NodeAnswer("n1")}


def test_a_clock_is_bounded_by_the_beginning_and_the_arrival() -> None:
    answers = {node: NodeAnswer(node) for node in ("n1", "n2", "n3")}
    # the last one is of a date without nanoseconds
    for node, clock in zip(answers, ("1001.5", "1120.5", "1001.N"), strict=True):
        read_line(answers, f"{MARK} {node} clock {clock}", 1000.0, 1003.0)
    assert answers["n1"].clock_ahead_s == (-1.5, 1.5)
    assert answers["n2"].clock_ahead_s == (117.5, 120.5)
    assert answers["n3"].clock_ahead_s == (-2.0, 1.0)


def test_the_record_of_the_job_survives_json(tmp_path: Path) -> None:
    answer = NodeAnswer("n1", clock_ahead_s=[1.0, 2.0], folder="shared", python="works", versions={"torch": "2.1"})
    job = DoctorJobRecord(stage="ranks", nodes=["n1"], answers={"n1": answer}, late=["nodes"], rank_nodes=["n1"])
    folder = DoctorFolder(tmp_path)
    assert read_job(folder) is None
    write_record(folder.job, job)
    assert read_job(folder) == job


VERSIONS = {"python": "3.11.7", "hpctrain": "0.1.0", "torch": "2.13.0"}
GOOD = NodeAnswer(
    "n1", clock_ahead_s=(-0.5, 0.5), folder="shared", python="works", versions=VERSIONS, begun="python", ended=True
)


def record(*answers: NodeAnswer, **values: object) -> DoctorJobRecord:
    found = {answer.node: answer for answer in answers}
    return DoctorJobRecord(nodes=tuple(found), answers=found, **values)  # type: ignore[arg-type]


def findings(*answers: NodeAnswer, **values: object) -> list[Finding]:
    job = record(*answers, **values)
    return list(node_findings(job, folder=Path("/runs/doctor/1"), python="/venv/bin/python", versions=VERSIONS))


def node(name: str, **values: object) -> NodeAnswer:
    return replace(GOOD, node=name, **values)  # type: ignore[arg-type]


def test_nothing_is_found_on_nodes_that_work() -> None:
    assert findings(GOOD, node("n2")) == []


@pytest.mark.parametrize(
    ("values", "check", "severity", "words"),
    [
        ({"folder": "missing"}, "folder", Severity.ERROR, "n2: /runs/doctor/1 isn't there"),
        ({"folder": "other"}, "folder", Severity.ERROR, "another folder"),
        ({"folder": "refused", "folder_problem": "sh: 1: x: Read-only file system"}, "folder", Severity.ERROR, "Read-"),
        ({"folder": "refused", "folder_problem": "x: Disk quota exceeded"}, "room", Severity.ERROR, "quota"),
        ({"folder": "refused", "folder_problem": "x: No space left on device"}, "room", Severity.ERROR, "No space"),
        ({"python": "missing"}, "python", Severity.ERROR, "/venv/bin/python isn't there"),
        ({"python": "broken", "python_problem": "libfoo.so"}, "python", Severity.ERROR, "libfoo.so"),
        (
            {"versions": {**VERSIONS, "torch": "2.12.0"}},
            "versions",
            Severity.WARNING,
            "2.12.0, expected 2.13.0",
        ),
        ({"versions": {**VERSIONS, "torch": ""}}, "versions", Severity.ERROR, "torch is none"),
        ({"versions": {**VERSIONS, "hpctrain": "0.0.9"}}, "versions", Severity.ERROR, "hpctrain is 0.0.9"),
        ({"directory": "/tmp"}, "working directory", Severity.WARNING, "/tmp"),
        ({"clock_ahead_s": (7.5, 8.5)}, "clock", Severity.WARNING, "at least 8 s ahead of"),
        ({"clock_ahead_s": (-130.0, -125.0)}, "clock", Severity.ERROR, "at least 125 s behind"),
        (
            {"ended": False, "begun": "folder"},
            "node",
            Severity.ERROR,
            "n2 stopped answering while it checked the folder",
        ),
    ],
)
def test_a_fault_names_its_node(values: dict[str, object], check: str, severity: Severity, words: str) -> None:
    (found,) = findings(GOOD, node("n2", **values))
    assert (found.check, found.severity, found.nodes) == (check, severity, ("n2",))
    assert words in found.problem


def test_nodes_with_the_same_fault_share_a_finding_and_a_remedy() -> None:
    (found,) = findings(GOOD, node("n2", folder="missing"), node("n3", folder="missing"))
    assert found.nodes == ("n2", "n3")
    assert "cluster.exclude=n2,n3" in found.remedy


def test_a_clock_that_may_be_right_is_not_reported() -> None:
    assert findings(GOOD, node("n2", clock_ahead_s=(-30.0, 1.9))) == []
    assert findings(GOOD, node("n2", clock_ahead_s=(1.9, 30.0))) == []


def test_srun_that_starts_nothing_says_why() -> None:
    silent = NodeAnswer("n1")
    (found,) = findings(silent, complaints={"nodes": ["Invalid account"]})
    assert found.check == "srun"
    assert "Invalid account" in found.problem


def test_the_plugin_that_srun_takes_by_default() -> None:
    (found,) = findings(GOOD, plugin_refused="Invalid MPI type 'pmix'")
    assert "Invalid MPI type 'pmix'" in found.problem
    assert "cluster.srun_args=[--mpi=none]" in found.remedy


def script_finding(lines: list[str] | None) -> Finding:
    return failed_script("n1", Path("/runs/logs"), lines, "/venv/bin/python")


def test_a_batch_script_without_a_log() -> None:
    found = script_finding(None)
    assert found.nodes == ("n1",)
    assert "couldn't write the log" in found.problem


def test_a_batch_script_without_its_python() -> None:
    found = script_finding(["script: line 19: /venv/bin/python: No such file or directory"])
    assert (found.check, found.nodes) == ("python", ("n1",))
    assert script_finding(["module: no"]).check == "batch script"
    assert "see the log in /runs/logs" in script_finding(["module: no"]).remedy
    assert "its log is empty" in script_finding([]).problem


@pytest.mark.parametrize(
    ("state", "stage", "problem"),
    [
        ("CANCELLED", "", "the job ended as CANCELLED before it began"),
        ("PREEMPTED", "ranks", "the job ended as PREEMPTED while ranks measured"),
        ("", "nodes", "the job ended while the nodes were asked"),
    ],
)
def test_a_job_that_ended_before_it_had_answered(state: str, stage: str, problem: str) -> None:
    assert unanswered_job(state, stage).problem == problem


def test_if_all_clocks_differ_alike_the_first_node_is_named() -> None:
    (found,) = findings(GOOD, *(node(f"n{number}", clock_ahead_s=(-9.0, -8.0)) for number in (2, 3, 4)))
    assert found.nodes == ("n1",)
    assert "at least 8 s ahead of those of the others" in found.problem


def test_the_name_of_a_node_is_a_whole_word() -> None:
    complaints = {"nodes": ["gpun2: task 3: exit", "n2: task 1: killed"]}
    (found,) = findings(GOOD, node("n2", ended=False, begun="python"), complaints=complaints)
    assert "n2: task 1: killed" in found.problem
    assert "gpun2" not in found.problem
