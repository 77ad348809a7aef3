"""What the nodes' answers mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.job_record import JobRecord
from hpctrain.doctor.node_findings import batch_script_finding, job_finding, node_findings
from hpctrain.doctor.nodes import NodeAnswer

VERSIONS = {"python": "3.11.7", "hpctrain": "0.1.0", "torch": "2.13.0"}
GOOD = NodeAnswer(
    "n1", clock_ahead_s=(-0.5, 0.5), folder="shared", python="works", versions=VERSIONS, begun="python", ended=True
)


def record(*answers: NodeAnswer, **values: object) -> JobRecord:
    found = {answer.node: answer for answer in answers}
    return JobRecord(nodes=tuple(found), answers=found, **values)  # type: ignore[arg-type]


def findings(*answers: NodeAnswer, **values: object) -> list[Finding]:
    return node_findings(record(*answers, **values), "/runs/doctor/1", "/venv/bin/python", VERSIONS)


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


def test_a_batch_script_without_a_log() -> None:
    found = batch_script_finding("n1", Path("/runs/logs"), None, "/venv/bin/python")
    assert found.nodes == ("n1",)
    assert "couldn't write the log" in found.problem


def test_a_batch_script_without_its_python() -> None:
    lines = ["script: line 19: /venv/bin/python: No such file or directory"]
    found = batch_script_finding("n1", Path("/runs/logs"), lines, "/venv/bin/python")
    assert (found.check, found.nodes) == ("python", ("n1",))
    assert batch_script_finding("n1", Path("/l"), ["module: no"], "/venv/bin/python").check == "batch script"
    assert "its log is empty" in batch_script_finding("n1", Path("/l"), [], "/venv/bin/python").problem


@pytest.mark.parametrize(
    ("state", "stage", "problem"),
    [
        ("CANCELLED", "", "the job ended as CANCELLED before it began"),
        ("PREEMPTED", "ranks", "the job ended as PREEMPTED while ranks measured"),
        ("", "nodes", "the job ended while the nodes were asked"),
    ],
)
def test_a_job_that_ended_before_it_had_answered(state: str, stage: str, problem: str) -> None:
    assert job_finding(state, stage).problem == problem


def test_if_all_clocks_differ_alike_the_first_node_is_named() -> None:
    (found,) = findings(GOOD, *(node(f"n{number}", clock_ahead_s=(-9.0, -8.0)) for number in (2, 3, 4)))
    assert found.nodes == ("n1",)
    assert "at least 8 s ahead of those of the others" in found.problem


def test_the_name_of_a_node_is_a_whole_word() -> None:
    complaints = {"nodes": ["gpun2: task 3: exit", "n2: task 1: killed"]}
    (found,) = findings(GOOD, node("n2", ended=False, begun="python"), complaints=complaints)
    assert "n2: task 1: killed" in found.problem
    assert "gpun2" not in found.problem
