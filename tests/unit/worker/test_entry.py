from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from hpctrain.worker.entry import close_log_files, end_with_parent, log_to_console


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


def test_a_rank_whose_launcher_died_before_it_started_ends():
    program = (
        "import os; from hpctrain.worker.entry import end_with_parent; end_with_parent(os.getppid() + 1); print(1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (4, b"")


def test_a_rank_without_a_launcher_stays():
    end_with_parent(None)
    assert os.getppid()
