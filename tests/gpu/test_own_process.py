"""A program that trains in its own process on a GPU, and goes on computing there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.apart]


@pytest.fixture
def program(shell):
    """Runs a program of `programs` in the shell's folder; returns what it printed."""

    def run(name, *words):
        (path,) = [folder / name for folder in shell.programs if (folder / name).exists()]
        command = [sys.executable, str(path), *words]
        process = subprocess.Popen(
            command, cwd=shell.folder, env=shell.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return shell.wait(process)[0]

    return run


@pytest.mark.core
def test_a_program_computes_on_the_gpu_before_between_and_after_its_trainings(program):
    report = json.loads(program("trains_on_gpu.py", "runs").splitlines()[-1])
    assert len(set(report["digests"])) == 1
    assert report["attempts"] == ["paused", "completed"]
    assert report["stopped at"] == 3
    assert report["settings kept"]
    assert report["same product"]
    assert report["finite"]


def test_a_program_is_interrupted_and_resumes_exactly(program, shell):
    program("own_program.py", "home", "7")
    report = json.loads((shell.folder / "home" / "report.json").read_text())
    straight, interrupted = report["straight"], report["interrupted"]
    assert interrupted["attempts"] == [["interrupted", 7], ["completed", 40]]
    assert (interrupted["digest"], interrupted["records"]) == (straight["digest"], straight["records"])
