"""A job that trains one run after another, as those of a search do: what happens to one doesn't touch the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.launch.prepare import prepare
from hpctrain.run.job_records import JobRecords
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import COMMON, PROGRAMS, STEPS, SubmittedRuns

SCRIPT = """\
#!/bin/bash
trap '' TERM USR1 USR2
{python} {program} {ends} {words} &
wait $! || wait $!
"""


@pytest.fixture
def prepared(runs: SubmittedRuns):
    """Makes runs of one node that aren't submitted."""

    def make(count: int, *words: str, pace_s: float = 0.1) -> list[FollowedRun]:
        found = [runs.new(pace_s) for _ in range(count)]
        for run in found:
            own = (f"run_dir={run.directory.path}", f"+task.pace={run.pace}", "cluster=slurm", "nodes=1")
            given = [*COMMON, *own, "+task.eval_samples=16", "trainer.eval_every_steps=20", *words]
            prepare(Composer().compose(given), given)
        return found

    return make


@pytest.fixture
def submit(runs: SubmittedRuns, tmp_path: Path):
    """Submits one job for several runs; returns its id, and the file with their ends."""

    def start(*words: str, options: tuple[str, ...] = ()) -> tuple[str, Path]:
        ends, script = tmp_path / "ends", tmp_path / "several.sh"
        typed = {"python": sys.executable, "program": PROGRAMS / "several_runs.py", "ends": ends}
        script.write_text(SCRIPT.format(**typed, words=" ".join(words)))
        asked = ("--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--requeue", "--partition=low", *options)
        command = [
            "sbatch",
            "--parsable",
            f"--output={tmp_path}/several.log",
            "--open-mode=append",
            *asked,
            str(script),
        ]
        done = runs.sandbox.run(command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for run in runs.runs:
            run.job_id = done.stdout.strip()
        return done.stdout.strip(), ends

    return start


def hpctrain(runs: SubmittedRuns, *words: str) -> str:
    done = runs.sandbox.run([sys.executable, "-m", "hpctrain", *words], cwd=runs.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def state(runs: SubmittedRuns, run: FollowedRun) -> str:
    return hpctrain(runs, "status", str(run.directory.path), "--json")


def stints(run: FollowedRun) -> list[tuple[str, int | None]]:
    """Which jobs began to work for a run, with how often they had been requeued, and left it."""
    records = [one for one in JobRecords(run.directory).read() if "job_id" in one]
    return [("left" if one.get("left") else "began", one.get("restarts")) for one in records]


@pytest.mark.nightly
def test_a_preemption_under_the_second_run_leaves_the_first_one_alone(runs, prepared, submit, tmp_path):
    first, second = prepared(2)
    one, two = (str(run.directory.path) for run in (first, second))
    job_id, ends = submit(f"{one}:20", two, f"{one}:40", one)
    second.until_step(3)
    assert first.story == [(0, "paused", 20)]
    assert stints(first) == [("began", 0), ("left", None)]
    # its job trains another run
    assert '"state": "paused"' in state(runs, first)
    assert '"state": "running"' in state(runs, second)
    assert "nothing to cancel: the run is paused" in hpctrain(runs, "cancel", one)
    assert runs.sandbox.job(job_id)["JobState"] == "RUNNING"
    runs.sandbox.requeue(job_id)
    second.until_attempt(2)
    assert '"state": "paused"' in state(runs, first)
    for run in (first, second):
        run.set_pace(0)
    runs.sandbox.wait_job(job_id, "COMPLETED")
    lines = [f"{one}:20 paused 4", f"{two} completed 0", f"{one}:40 paused 4", f"{one} completed 0"]
    assert ends.read_text().splitlines() == lines
    assert first.story == [(0, "paused", 20), (20, "paused", 40), (40, "completed", STEPS)]
    assert second.reasons == ["preempted", "completed"]
    assert second.attempts[1].start_step == second.attempts[0].end_step
    assert stints(second) == [("began", 0), ("left", None)]
    assert stints(first) == [("began", 0), ("left", None), ("began", 1), ("left", None), ("began", 1), ("left", None)]
    words = ("+task.eval_samples=16", "trainer.eval_every_steps=20")
    assert first.digest == second.digest == runs.straight(*words, processes=1)


@pytest.mark.nightly
def test_cancel_under_the_second_run_ends_the_job_and_that_run_alone(runs, prepared, submit):
    first, second = prepared(2)
    one, two = (str(run.directory.path) for run in (first, second))
    job_id, ends = submit(f"{one}:20", two, one)
    second.until_step(3)
    assert f"cancelled job {job_id}" in hpctrain(runs, "cancel", two)
    runs.sandbox.wait_job(job_id, "CANCELLED")
    second.until(lambda: second.reasons == ["cancelled"], "the end")
    assert '"state": "cancelled"' in state(runs, second)
    assert '"state": "paused"' in state(runs, first)
    assert first.story == [(0, "paused", 20)]
    # another job continues it, to its end
    ends.unlink()
    other, _ = submit(two)
    runs.sandbox.wait_job(other, "RUNNING")
    second.set_pace(0)
    second.until(lambda: second.reasons == ["cancelled", "completed"], "the end")
    runs.sandbox.wait_job(other, "COMPLETED")
    assert '"state": "completed"' in state(runs, second)
