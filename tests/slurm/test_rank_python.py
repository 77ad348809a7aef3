"""Ranks in another Python than the one that submits, and lines of cluster.setup that fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hpctrain
from hpctrain.startup import __version__
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import SubmittedRuns

PACKAGE = Path(hpctrain.__file__).parent
ONE_STEP = "trainer.max_steps=1"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a virtual environment of another path, which has what this one has."""
    folder = tmp_path_factory.mktemp("nodes") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (places,) = folder.glob("lib/python3*/site-packages")
    shared = [str(PACKAGE.parent), *(place for place in sys.path if place.endswith("-packages"))]
    (places / "shared.pth").write_text("\n".join(shared))
    return folder / "bin" / "python"


def wrapper(path: Path, line: str) -> Path:
    """A program that executes a line of a shell, in the place of a Python."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def status(runs: SubmittedRuns, run: FollowedRun) -> dict[str, Any]:
    command = [sys.executable, "-m", "hpctrain", "status", str(run.directory.path), "--json"]
    found: dict[str, Any] = json.loads(runs.sandbox.run(command).stdout)
    return found


def assert_failed(runs: SubmittedRuns, run: FollowedRun, *words: str) -> None:
    """The run has failed, once and with these words, in `status` and in the batch script's log."""
    assert run.until_ended() == "FAILED", run
    assert (run.record["Restarts"], run.record["ExitCode"]) == ("0", "1:0"), run
    found = status(runs, run)
    assert found["state"] == "failed", found
    for word in words:
        assert word in found["note"], found
        assert word in run.batch_log, run


def test_what_can_not_work_ends_the_run_at_once(runs: SubmittedRuns) -> None:
    absent = "cluster.python=/nosuch/python"
    setup = runs.train("cluster.setup=['echo before','ls /nosuch','echo after']", nodes=1)
    training = runs.train(absent, nodes=1)
    program = runs.new()
    runs.launch(program, ["true"], absent, nodes=1)
    assert_failed(
        runs, setup, "a line of cluster.setup failed: ls /nosuch (exit code 2); correct it, or append || true"
    )
    assert "before" in setup.batch_log
    assert "after" not in setup.batch_log
    assert not setup.attempts, "nothing was started"
    for run in (training, program):
        assert_failed(runs, run, "/nosuch/python, can't be started (", "set cluster.python to one that all nodes have")
        (attempt,) = run.attempts
        assert attempt.detail.startswith(f"the ranks' Python on {attempt.nodes[0]}, /nosuch/python")


@pytest.mark.nightly
def test_a_line_of_the_setup_that_fails_after_a_requeue_ends_the_run(runs: SubmittedRuns) -> None:
    gone = runs.folder / "gone"
    run = runs.train(f"cluster.setup=['[ ! -e {gone} ]']", nodes=1)
    run.until_step(3)
    gone.touch()
    run.preempt()
    run.until(lambda: run.record["JobState"] == "FAILED", "the end")
    assert run.reasons == ["preempted"], run
    assert run.record["Restarts"] in {"1", "2"}, "SLURM 24.05 requeues a preempted job once more, however it ends"
    found = status(runs, run)
    line = f"a line of cluster.setup failed: [ ! -e {gone} ] (exit code 1)"
    assert found["state"] == "failed"
    assert found["note"].startswith(f"job {run.job_id} ended before an attempt began; {line}"), found


@pytest.mark.nightly
def test_ranks_in_another_environment_end_as_an_uninterrupted_run(runs: SubmittedRuns, venv: Path) -> None:
    run = runs.train(f"cluster.python={venv}")
    run.until_step(5)
    for pid in run.ranks():
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"{venv}\0".encode())
    assert Path(f"/proc/{run.supervisor}/cmdline").read_bytes().startswith(f"{sys.executable}\0".encode())
    run.preempt()
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED", run
    assert run.reasons == ["preempted", "completed"], run
    assert run.digest == runs.straight()
    assert len({one.torch for one in run.attempts}) == 1


@pytest.mark.nightly
def test_a_name_is_looked_up_after_the_setup(runs: SubmittedRuns, venv: Path) -> None:
    own = runs.folder / "bin"
    own.mkdir()
    wrapper(own / "python_of_ranks", f'echo "begun by a name"; exec {venv} "$@"')
    words = (f"cluster.setup=['export PATH={own}:$PATH']", "cluster.python=python_of_ranks")
    run = runs.train(*words, ONE_STEP, nodes=1)
    assert run.until_ended() == "COMPLETED", run
    assert "begun by a name" in run.directory.rank_log(0).read_text()


@pytest.mark.nightly
def test_a_python_without_hpctrain_or_with_another_version_is_refused(runs: SubmittedRuns, venv: Path) -> None:
    """The second rank of two may have begun by then, and waits for the first."""
    bare = wrapper(
        runs.folder / "bare", f'[ "$SLURM_PROCID" = 0 ] || exec {venv} "$@"; exec {sys.executable} -I -S "$@"'
    )
    other = runs.folder / "other"
    shutil.copytree(PACKAGE, other / "hpctrain", ignore=shutil.ignore_patterns("__pycache__"))
    startup = other / "hpctrain" / "startup.py"
    startup.write_text(startup.read_text().replace(__version__, "9.8.7"))
    newer = wrapper(runs.folder / "newer", f'PYTHONPATH={other}:$PYTHONPATH exec {venv} "$@"')
    without = runs.train(f"cluster.python={bare}")
    different = runs.train(f"cluster.python={newer}")
    program = runs.new()
    runs.launch(program, ["true"], f"cluster.python={newer}", nodes=1)
    assert_failed(
        runs, without, f"{bare}, has no module hpctrain; install hpctrain {__version__} for it, or set cluster."
    )
    for run in (different, program):
        assert_failed(
            runs,
            run,
            "has hpctrain 9.8.7, and the run was submitted with hpctrain",
            f"with hpctrain {__version__}; install the same version there",
        )
        assert run.reasons == ["failed"], run
