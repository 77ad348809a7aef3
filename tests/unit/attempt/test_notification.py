"""The command of notify.command, as a real process: what it gets, and that nothing it does delays or fails a run."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.attempt.notification import KILLED_S, Notifier
from hpctrain.attempt.outcome import Outcome
from hpctrain.config.notify import EVENTS, Notify
from hpctrain.config.root import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

FAILED = Outcome(Reason.FAILED, 12, "rank 0 on n1, after step 12: ValueError: no\nTraceback ...")
RECORDS = "cat >> seen"
LONG_S = 600.0


@pytest.fixture
def make(directory, monkeypatch):
    """Makes a notifier by its command, which runs in the run directory."""
    monkeypatch.chdir(directory.path)

    def notifier(command: str | None, *, environ=os.environ, job_id="7", **settings) -> Notifier:
        config = RunConfig(name="digits", notify=Notify(command=command, **settings))
        return Notifier(directory, config, environ, job_id)

    return notifier


def seen(directory) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory.path / "seen").read_text().splitlines()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def pid_in(path: Path) -> int:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


def test_the_object_that_a_command_gets(directory, make):
    notifier = make(RECORDS)
    began = time.time()
    notifier.ended(3, FAILED)
    notifier.finish()
    (found,) = seen(directory)
    assert began <= found.pop("time") <= time.time()
    assert found.pop("host") == os.uname().nodename
    assert found.pop("message").startswith("failed after step 12: rank 0 on n1, after step 12: ValueError: no; the run")
    assert found == {
        "event": "failed",
        "run_dir": str(directory.path),
        "name": "digits",
        "job_id": "7",
        "attempt": 3,
        "step": 12,
        "reason": "failed",
    }


@pytest.mark.parametrize(
    ("outcome", "continuation", "event", "message"),
    [
        (Outcome(Reason.COMPLETED, 80), "", "completed", "completed after step 80"),
        (
            Outcome(Reason.COMPLETED, 8, "trainer.max_time_min=1"),
            "",
            "completed",
            "completed after step 8: trainer.max_time_min=1",
        ),
        (
            Outcome(Reason.PREEMPTED, 5, "stopped after step 5"),
            "job 7 is requeued",
            "interrupted",
            "preempted after step 5; job 7 is requeued",
        ),
        (Outcome(Reason.CANCELLED, 5), "", "cancelled", "cancelled after step 5; the run ends here; to resume: "),
        (Outcome(Reason.STALLED, 5), "", "failed", "stalled after step 5; the run ends here; to resume: "),
        (Outcome(Reason.HANG, 0, "a rank\nhangs"), "new ranks", "interrupted", "hang: a rank; new ranks"),
        (Outcome(Reason.INTERRUPTED, 5), "", "interrupted", "interrupted after step 5; the run ends here; to resume: "),
    ],
)
def test_events_and_messages(directory, make, outcome, continuation, event, message):
    notifier = make(RECORDS)
    notifier.ended(1, outcome, continuation=continuation)
    notifier.finish()
    (found,) = seen(directory)
    assert found["event"] == event
    assert found["message"].startswith(message)
    assert found["message"].endswith(continuation)
    assert "\n" not in found["message"]


def test_why_a_run_ends_although_its_reason_is_requeued(directory, make):
    notifier = make(RECORDS)
    notifier.ended(1, Outcome(Reason.PREEMPTED, 5, "stopped after step 5"), why="max_preemptions=2 allows no more")
    notifier.finish()
    assert seen(directory)[0]["message"].startswith(
        "preempted after step 5: max_preemptions=2 allows no more; the run ends"
    )


def test_a_start_names_the_end_before_it(directory, make):
    ledger = Ledger(directory)
    ledger.start(ledger.claim(), job_id="7", nodes=["n1"], world_size=1, step=0)
    ledger.end(1, reason=Reason.NODE_FAILURE, step=4)
    notifier = make(RECORDS, job_id=None)
    notifier.started(2, "n1 n2")
    notifier.finish()
    (found,) = seen(directory)
    assert found["message"] == "attempt 2 starts on n1 n2; attempt 1 ended as node_failure"
    assert (found["event"], found["job_id"], found["reason"]) == ("started", None, None)


def test_only_the_chosen_events(directory, make):
    notifier = make(RECORDS, on=["failed"])
    notifier.started(1, "n1")
    notifier.ended(1, Outcome(Reason.COMPLETED, 80))
    notifier.ended(1, FAILED)
    notifier.finish()
    assert [one["event"] for one in seen(directory)] == ["failed"]


def test_without_a_command_nothing_happens(directory, make):
    notifier = make(None)
    notifier.started(1, "n1")
    notifier.ended(1, FAILED)
    notifier.finish()
    assert not directory.notify_log.exists()


def test_the_input_has_nothing_of_the_environment(directory, make):
    notifier = make(f"{RECORDS}; echo $HIDDEN", environ={**os.environ, "HIDDEN": "hunter2"})
    notifier.ended(1, FAILED)
    notifier.finish()
    assert "hunter2" not in json.dumps(seen(directory))
    assert directory.notify_log.read_text() == "hunter2\n", "the command itself has the environment"


def test_its_output_is_appended_to_a_log(directory, make):
    notifier = make("echo out; echo error >&2")
    for _ in range(2):
        notifier.ended(1, FAILED)
        notifier.finish()
    assert directory.notify_log.read_text() == "out\nerror\n" * 2


def test_starting_a_command_takes_no_time(make):
    notifier = make("sleep 600", timeout_s=LONG_S)
    began = time.monotonic()
    notifier.started(1, "n1")
    notifier.ended(1, FAILED)
    assert time.monotonic() - began < 1
    notifier.finish(0)


@pytest.mark.parametrize(
    "stubborn",
    [
        "echo $$ > pid; sleep 600",
        "trap '' TERM INT HUP; echo $$ > pid; while true; do sleep 1; done",
        "sleep 600 & echo $! > pid; wait",
        "set -m; sleep 600 & echo $! > pid; wait",
        "timeout 600 sh -c 'echo $$ > pid; sleep 600'",
    ],
    ids=["hangs", "ignores SIGTERM", "a child of its own", "a child in a group of its own", "a time limit of its own"],
)
def test_a_command_that_hangs_is_killed_with_its_children(directory, make, stubborn, caplog):
    notifier = make(stubborn, timeout_s=1)
    began = time.monotonic()
    notifier.ended(1, FAILED)
    pid = pid_in(directory.path / "pid")
    with caplog.at_level(logging.WARNING):
        notifier.finish()
    assert 0.9 < time.monotonic() - began < 1 + KILLED_S
    deadline = time.monotonic() + 5
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(pid)
    assert "notify.command took more than 1 s for failed: killed with its child processes" in caplog.text


def test_waiting_can_be_shorter_than_the_timeout(directory, make):
    notifier = make("echo $$ > pid; sleep 600", timeout_s=LONG_S)
    notifier.ended(1, FAILED)
    pid = pid_in(directory.path / "pid")
    began = time.monotonic()
    notifier.finish(0.2)
    assert time.monotonic() - began < 0.2 + KILLED_S
    assert is_gone(pid)


def test_a_command_that_reads_nothing(make, caplog):
    notifier = make("exec 0<&-; true")
    with caplog.at_level(logging.WARNING):
        notifier.ended(1, Outcome(Reason.FAILED, 1, "x" * 1_000_000))
        notifier.finish()
    assert not caplog.records


@pytest.mark.parametrize("before", ["", "set -m; ", "nohup "])
def test_a_child_that_keeps_the_output_open_holds_nothing_up(directory, make, caplog, before):
    notifier = make(f"{before}sleep 600 & echo $! > pid", timeout_s=LONG_S)
    began = time.monotonic()
    notifier.ended(1, FAILED)
    notifier.finish()
    assert time.monotonic() - began < 10
    deadline = time.monotonic() + 5
    while not is_gone(pid := int((directory.path / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(pid)
    (line,) = caplog.messages
    assert line.startswith("killed what notify.command left in the background for failed: sleep 600; ")


def test_a_daemon_is_its_users_business(directory, make, caplog):
    notifier = make("setsid sh -c 'echo $$ > pid; exec sleep 600' &", timeout_s=LONG_S)
    notifier.ended(1, FAILED)
    pid = pid_in(directory.path / "pid")
    notifier.finish()
    assert not is_gone(pid)
    assert not caplog.messages
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("command", ["echo $$ > pid; sleep 600", "set -m; sleep 600 & echo $! > pid; wait"])
def test_a_command_ends_with_its_launcher(directory, command):
    program = f"""
import os, time
from pathlib import Path
from hpctrain.attempt.notification import Notifier
from hpctrain.config.notify import Notify
from hpctrain.config.root import RunConfig
from hpctrain.run.directory import RunDirectory
config = RunConfig(name="digits", notify=Notify(command={command!r}, timeout_s=600))
Notifier(RunDirectory(Path.cwd()), config, os.environ).started(1, "n1")
while not (Path("pid").exists() and Path("pid").read_text().endswith("\\n")):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], cwd=directory.path, check=False, timeout=60)
    pid = pid_in(directory.path / "pid")
    deadline = time.monotonic() + 20
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("exit 3", 3)])
def test_a_command_that_fails_is_a_line_in_the_log(directory, make, caplog, command, code):
    notifier = make(command)
    with caplog.at_level(logging.WARNING):
        notifier.ended(1, FAILED)
        notifier.finish()
    where = directory.notify_log
    assert caplog.messages == [f"notify.command ended with {code} for failed; its output is in {where}"]


def test_a_machine_without_a_shell(make, no_slurm, caplog):
    notifier = make("true")
    with caplog.at_level(logging.WARNING):
        notifier.ended(1, FAILED)
        notifier.finish()
    assert "notify.command can't be started for failed" in caplog.text


def test_a_run_directory_that_is_lost_is_reported_all_the_same(directory, make, tmp_path):
    notifier = make(f"cat > {tmp_path}/seen")
    directory.logs.rmdir()
    notifier.ended(1, FAILED)
    notifier.finish()
    assert json.loads((tmp_path / "seen").read_text())["event"] == "failed"


def test_slurms_signals_do_not_end_it(directory, make):
    notifier = make("echo $$ > pid; sleep 1; echo done > end")
    notifier.ended(1, FAILED)
    pid = pid_in(directory.path / "pid")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.killpg(pid, number)
    notifier.finish()
    assert (directory.path / "end").exists()


def test_a_terminals_signals_do_not_reach_it(directory, make):
    notifier = make("ps -o sid= -p $$ > session; echo $$ > pid")
    notifier.ended(1, FAILED)
    notifier.finish()
    assert int((directory.path / "session").read_text()) == pid_in(directory.path / "pid") != os.getsid(0)


def test_by_default_every_event_is_reported():
    assert tuple(Notify().on) == EVENTS


@pytest.mark.parametrize("command", ["", " ", "cat ${HOME}/x", "a\0b"])
def test_commands_that_are_refused(command):
    with pytest.raises(ConfigError, match=r"notify\.command"):
        Notify(command=command)
