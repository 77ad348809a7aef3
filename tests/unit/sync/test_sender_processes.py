"""Sender processes of a training: they follow its end, and it never waits for them longer than it said."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain.config.logger import SERVICES, Logger, MLflow, Wandb
from hpctrain.errors import ExitCode
from hpctrain.run.process import process_start
from hpctrain.sync import transfer as transfers
from hpctrain.sync.sender import Cursor
from hpctrain.sync.sender_processes import Parent, SenderProcesses
from hpctrain.sync.transfer import Transfer, send_during_training
from tests.support.fake_service import FakeService
from tests.support.logged_run import LoggedRun
from tests.unit.supervising import until

STUB = Path(__file__).parent / "programs"


@pytest.fixture
def run(directory):
    return LoggedRun(directory)


@pytest.fixture
def pipe():
    """A pipe as rank zero holds it; its writing end is closed by a test."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


@pytest.fixture
def sent_during_training(run, pipe):
    """Starts the sender of a training run in a thread, and returns it with what it returns."""

    def start(*services):
        made, codes = iter(services), []
        transfer = Transfer(directory=run.directory, service="wandb", make_client=lambda *_, **__: next(made))
        parent = Parent(pipe[0])
        thread = threading.Thread(target=lambda: codes.append(send_during_training(transfer, parent)))
        thread.start()
        return thread, codes

    return start


def test_a_completed_run_is_sent_to_its_end(run, pipe, sent_during_training, tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, "LOOK_EVERY_S", 0.02)
    made = FakeService(tmp_path / "service", asks_at_open=True)
    run.train(0, 10)
    thread, codes = sent_during_training(made)
    until(lambda: len(made.arrived()) == 9)
    run.train(10, 20)
    until(lambda: len(made.arrived()) == 19)
    os.write(pipe[1], Parent.COMPLETED.encode())
    thread.join(10)
    os.close(pipe[1])
    assert codes == [ExitCode.FINISHED]
    assert made.arrived() == run.logged()
    assert made.states == ["completed"]
    assert Cursor.read(run.directory, "wandb").complete


def test_a_run_that_is_interrupted_keeps_what_lies_after_its_checkpoint(run, pipe, sent_during_training, tmp_path):
    made = FakeService(tmp_path / "service", asks_at_open=True)
    run.train(0, 10)
    thread, codes = sent_during_training(made)
    os.close(pipe[1])
    thread.join(10)
    assert codes == [ExitCode.FINISHED]
    assert [row["step"] for row in made.arrived()] == list(range(1, 10))
    assert made.states == ["interrupted"]


def test_a_service_that_refused_is_tried_again_at_the_end_of_a_completed_run(
    run, pipe, sent_during_training, tmp_path, capsys
):
    path = tmp_path / "service"
    refusing = FakeService(path, asks_at_open=False, refuses_after=3)
    working = FakeService(path, asks_at_open=False)
    run.train(0, 10)
    thread, codes = sent_during_training(refusing, working)
    until(lambda: refusing.states)
    os.write(pipe[1], Parent.COMPLETED.encode())
    thread.join(10)
    os.close(pipe[1])
    assert codes == [ExitCode.FINISHED]
    assert working.arrived() == run.logged()
    assert "W&B: 503: come back later; trying again in 10 s" in capsys.readouterr().out


@pytest.fixture
def senders(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{STUB}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def start(what):
        monkeypatch.setenv("STUB", what)
        started = SenderProcesses(run.directory, Logger(wandb=Wandb(enabled=True), sync_timeout_s=3))
        started.start()
        return started

    return start


def test_a_service_that_hangs_costs_the_end_of_a_run_the_configured_seconds(run, senders, caplog):
    run.train(0, 10)
    run.directory.sync.mkdir()
    # of the run before it was resumed
    Cursor(complete=True, time=time.time() - 100).write(run.directory, "wandb")
    began = time.monotonic()
    started = senders("hangs")
    pid = started.processes["wandb"].pid
    assert time.monotonic() - began < 1
    started.complete(lambda: False)
    started.leave()
    assert 3 <= time.monotonic() - began < 8
    assert "W&B doesn't have the whole run yet (its sender process hadn't finished after 3 s" in caplog.text
    assert f"send the rest with: python -m hpctrain sync {run.directory.path} --service wandb" in caplog.text
    assert "W&B: opening hpctrain\n" in (run.directory.sync / "wandb.log").read_text()
    until(lambda: process_start(pid) is None)


def test_a_service_that_refuses_is_reported_with_its_reason(run, senders, caplog):
    run.train(0, 10)
    started = senders("refuses")
    until(lambda: "not known" in (run.directory.sync / "wandb.log").read_text())
    began = time.monotonic()
    started.complete(lambda: False)
    assert time.monotonic() - began < 3
    started.leave()
    assert "W&B doesn't have the whole run yet (the key is [31mnot known); send the rest with" in caplog.text


def test_a_signal_ends_the_wait(run, senders):
    run.train(0, 10)
    started = senders("hangs")
    began = time.monotonic()
    started.complete(lambda: True)
    started.leave()
    assert time.monotonic() - began < 1


def test_what_the_end_of_a_run_needs_was_imported_at_its_start(run, senders, caplog, monkeypatch):
    run.train(0, 10)
    started = senders("hangs")
    monkeypatch.setitem(sys.modules, "hpctrain.sync.sender", None)  # the installation is another one meanwhile
    started.complete(lambda: True)
    started.leave()
    assert "W&B doesn't have the whole run yet" in caplog.text


def test_nothing_is_started_for_a_service_that_is_not_enabled():
    assert not Logger().enabled_services
    assert [*Logger(wandb=Wandb(enabled=True), mlflow=MLflow(enabled=True)).enabled_services] == ["wandb", "mlflow"]


def test_each_group_below_the_logger_is_a_service():
    groups = {field.name: field.default_factory for field in dataclasses.fields(Logger)}
    assert {name: group for name, group in groups.items() if dataclasses.is_dataclass(group)} == SERVICES
