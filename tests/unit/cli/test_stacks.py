from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

from hpctrain.cli.stacks import main
from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

RANK = """
import sys, time
from hpctrain.config.health import Health
from hpctrain.rank import watchdog
from types import SimpleNamespace
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory

def train():
    while True:
        time.sleep(0.1)

watchdog.REQUESTS_EVERY_S = 0.1
directory, rank = RunDirectory.at(sys.argv[1]), int(sys.argv[2])
watched = SimpleNamespace(
    doing="import_s",
    progress=0,
    stacks=directory.stacks(1, rank),
    member=SimpleNamespace(claim=SimpleNamespace(is_cancelled=False), stacks_request=directory.stacks_request(1)),
    description=f"rank {rank} of 2",
    program=None,
    communication_error="",
    stop=StopRequest(),
)
with watchdog.Watchdog(Health(), watched, tick_s=0.05):
    print("running", flush=True)
    train()
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.at("runs/digits/now")
    directory.create(0o750)
    directory.config.touch()
    return directory


def begin(directory, world_size=2):
    """An attempt that belongs to this process."""
    ledger = Ledger(directory)
    number = ledger.claim()
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    (directory.attempt(number) / "owner.json").write_text(json.dumps(owner))
    if world_size is not None:
        ledger.start(number, job_id=None, nodes=["here"], world_size=world_size, step=0)
    return number


@contextmanager
def running(directory, *ranks):
    """Ranks as processes that only watch themselves."""
    with ExitStack() as stack:
        for rank in ranks:
            command = [sys.executable, "-c", RANK, directory.path, str(rank)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout.readline() == b"running\n"
        yield


def test_every_rank_shows_its_stacks(directory, capsys):
    begin(directory)
    with running(directory, 0, 1):
        assert main(["digits"]) == 0
        first = capsys.readouterr()
        assert main(["digits", "--rank", "1"]) == 0
        second = capsys.readouterr()
    assert first.err == ""
    heads = [line for line in first.out.splitlines() if line.startswith("====")]
    assert [head.partition(",")[0] for head in heads] == [
        f"==== stacks as requested: rank {rank} of 2" for rank in (0, 1)
    ]
    assert first.out.count("in train\n") == 2
    assert second.out.count("in train\n") == 1
    assert "rank 1 of 2" in second.out


def test_a_rank_that_does_not_answer_is_named(directory, capsys):
    begin(directory)
    with running(directory, 1):
        assert main(["digits", "--wait", "3"]) == 1
    out, err = capsys.readouterr()
    assert "rank 1 of 2" in out
    assert err.startswith("hpctrain: rank 0 did not answer within 3 s: ")


def test_a_rank_that_has_ended_owes_nothing(directory, capsys):
    attempt = begin(directory)
    ExitRecord(rank=0, host="here", reason=Reason.COMPLETED, step=3).write(directory.attempt(attempt))
    with running(directory, 1):
        assert main(["digits"]) == 0
    assert capsys.readouterr().out.count("in train\n") == 1


def test_a_run_that_is_only_starting_shows_who_is_there(directory, capsys):
    begin(directory, world_size=None)
    with running(directory, 1):
        assert main(["digits", "--wait", "3"]) == 0
    assert "rank 1 of 2" in capsys.readouterr().out
    assert main(["digits", "--wait", "0"]) == 1
    assert "the run is just starting, or has just ended" in capsys.readouterr().err


def test_a_run_that_is_over_is_an_error_that_names_the_stacks_it_has(directory):
    Ledger(directory).end(begin(directory), reason=Reason.HANG, step=7)
    directory.stacks(1, 0).touch()
    expected = r"runs/digits/now is failed, and only a running run has stacks to show; earlier stacks: runs/.*/sta"
    with pytest.raises(RunDirectoryError, match=expected):
        main(["digits"])
    assert not directory.stacks_request(1).exists()


def test_a_run_that_never_began_is_an_error(directory):
    with pytest.raises(RunDirectoryError, match=r"now is prepared, and only a running run has stacks to show$"):
        main(["digits"])


def test_a_rank_that_there_is_not_is_an_error(directory):
    begin(directory)
    with pytest.raises(RunDirectoryError, match="--rank 2: the run has 2 ranks, counted from 0"):
        main(["digits", "--rank", "2"])


@pytest.mark.parametrize("option", ["--wait", "--rank"])
def test_negative_numbers_are_refused(directory, option, capsys):
    with pytest.raises(SystemExit):
        main(["digits", option, "-1"])
    assert "must be 0 or more" in capsys.readouterr().err
