from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from hpctrain.attempt.rank_python import explain_exit, other_torch, other_version, unable_python
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason
from hpctrain.startup import __version__

OLD = """\
Unknown option: -P
usage: /usr/bin/python3 [option] ... [-c cmd | -m mod | file | -] [arg] ...
Try `python -h' for more information.
"""
"""What Python 3.9 prints."""


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    directory.attempt(1).mkdir()
    return directory


@pytest.mark.parametrize("expected", ["", __version__])
def test_the_launchers_version_is_accepted(expected):
    assert other_version(expected) == ""


def test_another_version_is_refused_with_what_to_type():
    problem = other_version("0.3.0", "0.2.0", "/opt/venv/bin/python")
    assert "/opt/venv/bin/python, has hpctrain 0.2.0, and the run was submitted with hpctrain 0.3.0" in problem
    assert "install the same version there" in problem


@pytest.mark.parametrize(
    ("attempts", "submitter", "who"),
    [
        ([], None, ""),
        ([], "2.12.0", ""),
        ([], "2.11.0", "the Python that submitted the run has torch 2.11.0"),
        ([Attempt(attempt=1, torch="2.12.0")], "2.11.0", ""),
        ([Attempt(attempt=1, torch="2.11.0"), Attempt(attempt=2)], "2.12.0", "attempt 1 had torch 2.11.0"),
        ([Attempt(attempt=1, torch="2.11.0"), Attempt(attempt=2, torch="2.12.0")], "2.11.0", ""),
    ],
)
def test_another_torch_than_before_is_reported(attempts, submitter, who):
    warning = other_torch("2.12.0", attempts, submitter)
    assert (who in warning and "cluster.python to a Python with torch 2.11.0" in warning) if who else warning == ""


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            ["env", "/nosuch/python", "-m", "hpctrain.train"],
            r"can't be started \(env: .*/nosuch/python.*\); set cluster",
        ),
        (["env", "/etc/passwd", "-m", "hpctrain.train"], r"can't be started \(env: .*/etc/passwd.*\); set cluster"),
        (
            [sys.executable, "-I", "-S", "-m", "hpctrain.train"],
            "has no module hpctrain; install hpctrain .* for it, or",
        ),
        ([sys.executable, "-I", "-S", "-c", "import omegaconf"], "has no module omegaconf; install hpctrain"),
        (["sh", "-c", 'printf %s "$OLD" >&2; exit 2'], "is older than 3.11; set cluster.python to a newer one"),
        (["sh", "-c", "echo ValueError: no number >&2; exit 1"], ""),
        (["sh", "-c", "exit 1"], ""),
    ],
    ids=["absent", "not executable", "no hpctrain", "no dependency", "too old", "another error", "silent"],
)
def test_why_a_python_can_not_run_a_rank(directory, command, why, tmp_path):
    environ = {"PATH": os.environ["PATH"], "OLD": OLD, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
    directory.rank_log(1).write_text(f"step 3 of an earlier attempt\n{done.stderr}")
    complaints = ["n1: tasks 0,2: Killed", f"n2: tasks 1,3-5: Exited with exit code {done.returncode}"]
    found = unable_python(directory, 1, complaints, "python3")
    assert re.match(f"the ranks' Python on n2, python3, {why}", found) if why else found == ""


def test_a_rank_that_left_a_record_or_no_log_has_begun_or_stays_unexplained(directory):
    directory.rank_log(0).write_text("python: No module named hpctrain\n")
    ExitRecord(rank=0, host="n1", reason=Reason.FAILED, step=0).write(directory.attempt(1))
    complaints = ["n1: task 0: Exited with exit code 1", "n2: task 1: Exited with exit code 1"]
    assert unable_python(directory, 1, complaints, "python3") == ""


def test_without_a_log_the_exit_code_is_enough():
    assert explain_exit(127, []).startswith("can't be started; set cluster.python")


@pytest.mark.parametrize(
    "line",
    [
        "ch-run[42]: error: can't mkdir: /images/torch/data: Read-only file system (ch_misc.c:409 30)",
        "FATAL:   could not open image /images/torch.sif: no such file or directory",
        "slurmstepd: error: pyxis: failed to import docker image",
        'time="2026-11-25T23:03:15Z" level=error msg="runc run failed: invalid rootfs: stat /images/torch"',
    ],
)
def test_an_engine_that_can_not_start_the_container_is_named(line):
    assert explain_exit(1, ["something before", line]) == (
        f"can't be started in its container ({line}); correct cluster.container"
    )
