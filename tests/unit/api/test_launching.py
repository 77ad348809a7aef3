from __future__ import annotations

import json
import os
import socket
from types import SimpleNamespace

import pytest

from hpctrain.api import launching
from hpctrain.errors import RunFailedError
from hpctrain.run.ledger import Ledger


def launch(directory, tmp_path, monkeypatch, pid):
    """Start a launcher that finds the run claimed by a process with this id, as a shell spells it."""
    claim = directory.attempt(1)
    owner = f'{{"host": {json.dumps(socket.gethostname())}, "pid": \'{pid}\'}}'
    program = tmp_path / "python"
    lines = ["#!/bin/sh", f"mkdir -p {claim}", f"echo '{owner}' > {claim}/new", f"mv {claim}/new {claim}/owner.json"]
    program.write_text("\n".join([*lines, "sleep 0.2", "echo the run is running", "exit 2"]))
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))
    launching._start_launcher(SimpleNamespace(directory=directory))


def test_the_attempt_of_another_launch_is_not_taken_for_ones_own(directory, tmp_path, monkeypatch):
    with pytest.raises(RunFailedError, match="exit code 2 before an attempt began: the run is running"):
        launch(directory, tmp_path, monkeypatch, pid=str(os.getppid()))


def test_a_launcher_that_claims_an_attempt_has_begun(directory, tmp_path, monkeypatch):
    launch(directory, tmp_path, monkeypatch, pid="$$")
    assert Ledger(directory).last_claim() == 1
