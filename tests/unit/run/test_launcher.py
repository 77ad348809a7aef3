from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from hpctrain.run.launcher import LauncherFacts, Owner


def write(claim, **record):
    (claim / "owner.json").write_text(json.dumps(record))


@pytest.fixture
def process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "odd) name (S 1"])
    yield process
    process.kill()
    process.wait()


def test_a_process_that_runs_is_alive_and_one_that_ended_is_not(tmp_path, process):
    write(tmp_path, host=socket.gethostname(), pid=process.pid)
    owner = Owner.read(tmp_path)
    assert owner is not None
    assert owner.alive is True
    assert owner.command.endswith("odd) name (S 1")
    process.kill()
    while owner.alive:  # a zombie until it is waited for
        time.sleep(0.01)
    process.wait()
    assert owner.alive is False
    assert owner.command == ""


def test_a_later_process_of_the_same_number_is_another_one(tmp_path, process):
    write(tmp_path, host=socket.gethostname(), pid=process.pid)
    os.utime(tmp_path / "owner.json", (time.time() - 60, time.time() - 60))
    owner = Owner.read(tmp_path)
    assert owner is not None
    assert owner.alive is False


def test_what_runs_elsewhere_cannot_be_seen(tmp_path):
    write(tmp_path, host="another-host", pid=1)
    owner = Owner.read(tmp_path)
    assert owner is not None
    assert not owner.is_here
    assert owner.alive is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}', '{"host": "n", "pid": "x"}'])
def test_an_unreadable_record_is_no_owner(tmp_path, content):
    (tmp_path / "owner.json").write_text(content)
    assert Owner.read(tmp_path) is None


def test_no_record_is_no_owner(tmp_path):
    assert Owner.read(tmp_path / "absent") is None


@pytest.mark.parametrize(
    "passed",
    [
        LauncherFacts(),
        LauncherFacts(attempt=3),
        LauncherFacts(attempt=1, logged=True, store="/tmp/a/store", parent=4321, terminal=7),
        LauncherFacts(attempt=1, code="d1", version="0.1.0"),
    ],
)
def test_a_rank_reads_what_its_launcher_passed(passed):
    assert LauncherFacts.read({"PATH": "/bin", **passed.variables()}) == passed


def test_the_variables_by_name():
    assert LauncherFacts().variables() == {}
    assert LauncherFacts(attempt=2, logged=True, store="/tmp/a/store", parent=7, terminal=9).variables() == {
        "HPCTRAIN_CLAIM": "2",
        "HPCTRAIN_LOGGED": "1",
        "HPCTRAIN_STORE": "/tmp/a/store",
        "HPCTRAIN_PARENT": "7",
        "HPCTRAIN_TERMINAL": "9",
    }


def test_a_rank_that_nothing_launched():
    assert LauncherFacts.read({"HPCTRAIN_CLAIM": "", "HPCTRAIN_LOGGED": "0"}) == LauncherFacts()
