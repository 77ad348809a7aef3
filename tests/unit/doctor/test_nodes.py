"""The shell script of the nodes, run for real, and how its lines are read."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.doctor.nodes import MARK, SCRIPT, NodeAnswer, NodeAnswers


def answer_of(
    folder: Path, *, token: str = "t", python: str = sys.executable, directory: Path | None = None
) -> NodeAnswer:
    """What a node answers whose shell runs here."""
    answers = NodeAnswers(["n1"], time.time())
    done = subprocess.run(
        ["sh", "-c", SCRIPT, "sh", str(folder), token, python, str(directory or Path.cwd())],
        env={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1", "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        answers.read(line, time.time())
    return answers.by_node["n1"]


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
    answers = NodeAnswers(["n1"], 0.0)
    for line in ("Welcome to the cluster", f"{MARK} n9 end", f"{MARK}", "", "n1 end"):
        answers.read(line, 1.0)
    assert not answers.by_node["n1"].ended
    assert not answers.are_complete


def test_a_clock_is_bounded_by_the_beginning_and_the_arrival() -> None:
    answers = NodeAnswers(["n1", "n2", "n3"], begun_at=1000.0)
    answers.read(f"{MARK} n1 clock 1001.5", 1003.0)
    answers.read(f"{MARK} n2 clock 1120.5", 1003.0)
    answers.read(f"{MARK} n3 clock 1001.N", 1003.0)  # of a date without nanoseconds
    assert answers.by_node["n1"].clock_ahead_s == (-1.5, 1.5)
    assert answers.by_node["n2"].clock_ahead_s == (117.5, 120.5)
    assert answers.by_node["n3"].clock_ahead_s == (-2.0, 1.0)


def test_an_answer_survives_json() -> None:
    answer = NodeAnswer("n1", clock_ahead_s=(1.0, 2.0), folder="shared", python="works", versions={"torch": "2.1"})
    assert NodeAnswer.from_record(answer.as_record()) == answer
