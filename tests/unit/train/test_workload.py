from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.config.root import Config
from hpctrain.errors import ClusterEnvironmentError, ConfigError, ExitCode, TaskError
from hpctrain.launch.local import rank_variables
from hpctrain.rank import rank as rank_module
from hpctrain.rank.entry import run_rank
from hpctrain.rank.rank import Member, Rank
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.process import end_with_parent
from hpctrain.run.times import Times
from hpctrain.train import workload
from hpctrain.train.workload import TrainingWorkload, close_log_files, log_to_console


@pytest.fixture(autouse=True)
def logger():
    logger = logging.getLogger("hpctrain")
    before = (list(logger.handlers), logger.propagate, logger.level)
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def test_rank_zero_logs_its_progress_to_standard_output(capsys):
    log_to_console(0)
    logging.getLogger("hpctrain.train").info("step 7")
    assert capsys.readouterr() == ("step 7\n", "")


def test_other_ranks_log_their_warnings_alone(capsys):
    log_to_console(3)
    logging.getLogger("hpctrain.train").info("step 7")
    logging.getLogger("hpctrain.train").warning("a peer is lost")
    assert capsys.readouterr() == ("", "rank 3: a peer is lost\n")


def test_log_files_are_closed_and_the_console_stays(logger, tmp_path):
    log_to_console(0)
    file = logging.FileHandler(tmp_path / "rank_0.log")
    logger.addHandler(file)
    close_log_files()
    assert file.stream is None
    assert len(logger.handlers) == 1


def test_the_traceback_of_an_error_of_hpctrain_is_in_the_log_file_alone(logger, tmp_path, capsys):
    def loss_of_the_task():
        raise TaskError("expected a scalar")

    log_to_console(0)
    file = tmp_path / "rank_0.log"
    logger.addHandler(logging.FileHandler(file))
    with pytest.raises(TaskError) as caught:
        loss_of_the_task()
    workload._report_error(SimpleNamespace(program=None), "rank 0 on here", caught.value, "")
    close_log_files()
    assert capsys.readouterr() == ("", "hpctrain: rank 0 on here: expected a scalar\n")
    text = file.read_text()
    assert text.startswith("hpctrain: rank 0 on here: expected a scalar\nTraceback ")
    assert "in loss_of_the_task" in text


def test_a_process_without_a_place_among_the_ranks_is_left_as_it_was(monkeypatch):
    def state():
        umask = os.umask(0)
        os.umask(umask)
        return umask, signal.getsignal(signal.SIGTERM)

    before = state()
    monkeypatch.setenv("RANK", "no number")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterEnvironmentError):
        run_rank(TrainingWorkload(Composer().compose([])))
    assert state() == before


def test_what_a_rank_imports_is_left_out_of_collections_of_garbage():
    program = "\n".join(
        (
            "import gc, sys",
            "from hpctrain.train.workload import _imports_frozen",
            "at_start = gc.get_freeze_count()",  # 0, but 375 in Python 3.12.1
            "assert 'torch' not in sys.modules and at_start < 1_000",
            "with _imports_frozen():",
            "    assert not gc.isenabled()",
            "assert gc.isenabled() and gc.get_freeze_count() > 1_000",
        )
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_process_that_had_imported_torch_collects_its_garbage():
    importlib.import_module("torch")
    before = gc.get_freeze_count()
    with workload._imports_frozen():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_a_rank_whose_launcher_died_before_it_started_ends():
    program = "import os; from hpctrain.run.process import end_with_parent; end_with_parent(os.getppid() + 1); print(1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (4, b"")


def test_a_rank_without_a_launcher_stays():
    end_with_parent(None)
    assert os.getppid()


def member_of(directory, environment):
    return Member(environment=environment, claim=Claim(Ledger(directory), 1))


@pytest.mark.parametrize(
    ("launcher", "claims", "stopped", "lost_a_peer"),
    [(LauncherFacts(attempt=1), 1, 0, 1), (LauncherFacts(attempt=1), 2, 0, 0), (LauncherFacts(), 2, 4, 1)],
    ids=["launched", "launched and superseded", "by hand"],
)
def test_exit_codes_that_srun_sees(tmp_path, monkeypatch, launcher, claims, stopped, lost_a_peer):
    """At a code other than 0 srun has a step killed, which may be that of a later attempt in the same job."""
    monkeypatch.setattr(rank_module, "PEERS_S", 0.0)
    directory = RunDirectory.at(tmp_path / "R")
    directory.create(0o750)
    for _ in range(claims):
        Ledger(directory).claim()
    environment = ClusterEnvironment.from_environment(rank_variables(1, 2, 29123))
    rank = Rank(Config(), environment, launcher, StopRequest(), Times(0.0), member_of(directory, environment))
    assert workload._exit_code(rank, ExitCode.INTERRUPTED) == stopped
    assert workload._fail(rank, RuntimeError("Connection closed by peer")) == lost_a_peer


@pytest.mark.parametrize(("begun", "code"), [(False, ExitCode.BAD_CONFIGURATION), (True, ExitCode.FAILED)])
def test_a_bad_configuration_that_the_ranks_find_fails_the_run_once_it_has_begun(tmp_path, begun, code):
    directory = RunDirectory.at(tmp_path / "R")
    directory.create(0o750)
    Ledger(directory).claim()
    environment = ClusterEnvironment.from_environment(rank_variables(1, 2, 29123))
    member = member_of(directory, environment) if begun else None
    rank = Rank(Config(), environment, LauncherFacts(), StopRequest(), Times(0.0), member)
    assert workload._fail(rank, ConfigError("data.batch", 1, "is odd", "make it even")) == code
