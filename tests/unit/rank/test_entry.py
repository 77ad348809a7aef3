from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from hpctrain.rank.entry import record_early_end
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.reason import Reason
from hpctrain.startup import __version__

RANK_ONE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    directory.attempt(1).mkdir()
    directory.config.write_text("keys: of another version\n")
    return directory


@pytest.mark.parametrize("module", ["hpctrain.train", "hpctrain.program"])
def test_a_rank_with_another_version_than_its_launcher_ends_before_it_reads_the_configuration(directory, module):
    environ = os.environ | RANK_ONE | LauncherFacts(attempt=1, logged=True, version="9.8.7").variables()
    command = [sys.executable, "-m", module, str(directory.path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    record = read_exit_records(directory.attempt(1))[1]
    assert record.reason is Reason.FAILED
    assert f"has hpctrain {__version__}, and the run was submitted with hpctrain 9.8.7" in record.message
    assert done.stderr == f"hpctrain: error: {record.message}\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["WRONG"], "WRONG is not a run directory: no such directory"),
        ([], "expected a run directory, found no argument"),
    ],
)
def test_without_a_run_directory_a_rank_says_so_in_one_line(words, found):
    command = [sys.executable, "-m", "hpctrain.program", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"hpctrain: error: {found}; .*\n", done.stderr)


@pytest.mark.parametrize("reason", [Reason.FAILED, Reason.INFRASTRUCTURE])
def test_a_rank_that_is_refused_says_why_in_its_exit_record(directory, reason):
    """Its launcher would otherwise start it again, as one that was killed."""
    if reason is Reason.INFRASTRUCTURE:
        directory.config.unlink()
        directory.config.symlink_to("/proc/self/mem")  # a read of which fails, as on a file system with errors
    environ = os.environ | RANK_ONE | LauncherFacts(attempt=1, logged=True).variables()
    command = [sys.executable, "-m", "hpctrain.program", str(directory.path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    record = read_exit_records(directory.attempt(1))[1]
    assert record.reason is reason
    assert "config.yaml" in record.message
    assert done.stderr == f"hpctrain: error: {record.message}\n"


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_a_rank_whose_variables_contradict_each_other_leaves_a_record(directory, name):
    environ = {name: "1"} | LauncherFacts(attempt=1, logged=True).variables()
    record_early_end(directory, Reason.FAILED, "no", environ | {"WORLD_SIZE": "2"})
    assert read_exit_records(directory.attempt(1))[1].message == "no"


def test_without_an_attempt_nothing_is_recorded(directory):
    record_early_end(directory, Reason.FAILED, "no", RANK_ONE)
    assert not read_exit_records(directory.attempt(1))
