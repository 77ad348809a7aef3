"""Run the functions of `command` in a process that sends signals at its n-th call of a given function."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType

from tests.multiprocess.programs import command

SENT = "sent.jsonl"
PHASES = {
    "before the handlers": [
        ("hpctrain.rank.entry:run_rank", 1),
        ("hpctrain.rank.stop_request:StopRequest.install", 1),
    ],
    "import": [("hpctrain.run.launcher:LauncherFacts.read", 1), ("hpctrain.rank.watchdog:Watchdog.__enter__", 1)],
    "rendezvous": [
        ("hpctrain.train.attempt:run_attempt", 1),
        ("hpctrain.train.attempt:_meet", 1),
        ("hpctrain.train.attempt:_agree_on_attempt", 1),
        ("hpctrain.rank.world:join", 1),
        ("hpctrain.rank.world:World.gather", 1),
    ],
    "build": [
        ("hpctrain.train.training:build", 1),
        ("hpctrain.train.training_data:TrainingData.loader", 1),
        ("hpctrain.train.checkpointing:Checkpointing.resume", 1),
        ("hpctrain.train.start_table:log_start", 1),
    ],
    "first step": [
        ("hpctrain.train.loop:Loop.run", 1),
        ("hpctrain.rank.agreement:Agreement.agree_and_calibrate", 1),
        ("hpctrain.train.step:TrainStep.__call__", 1),
        ("hpctrain.run.times:Times.first_step_done", 1),
    ],
    "training": [
        ("hpctrain.train.step:TrainStep.__call__", 60),
        ("hpctrain.train.update:Update.__call__", 40),
        ("hpctrain.rank.agreement:Agreement.decide", 60),
        ("hpctrain.train.training_log:TrainingLog.training", 5),
    ],
    "evaluation": [
        ("hpctrain.train.evaluation:Evaluation.__call__", 2),
        ("hpctrain.train.evaluation_results:EvaluationResults.add", 4),
        ("hpctrain.train.evaluation_results:EvaluationResults.reduce", 2),
    ],
    "save": [
        ("hpctrain.train.loop:Loop._save", 3),
        ("hpctrain.train.checkpointing:Checkpointing.save", 3),
        ("hpctrain.checkpoint.saver:CheckpointSaver._write_in_background", 3),
        ("hpctrain.files:fsync_directory", 12),
        ("hpctrain.checkpoint.write:publish", 3),
    ],
    "last step": [("hpctrain.train.step:TrainStep.__call__", 0), ("hpctrain.train.update:Update.__call__", 0)],
    "after it": [
        ("hpctrain.checkpoint.saver:CheckpointSaver.finish", 1),
        ("hpctrain.rank.world:World.close", 1),
        ("hpctrain.rank.rank:Rank.write_exit_record", 1),
        ("hpctrain.train.workload:close_log_files", 1),
    ],
    "the stop": [
        ("hpctrain.train.stopping:Stopping.begin", 1),
        ("hpctrain.train.loop:Loop._leave", 1),
    ],
}
"""By phase of an attempt: functions, MODULE:NAME, where signals are sent, and how often an attempt calls them at least;
0 stands for the number of steps that are left."""


@dataclass(frozen=True)
class PlannedSignal:
    """A signal to a rank, sent some seconds after the previous signal, or after the call of the function."""

    rank: int
    signal: str
    after_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The signals that a rank sends when it calls a function, MODULE:NAME, for the n-th time."""

    folder: str
    at: str
    nth: int = 1
    rank: int = 0
    signals: list[PlannedSignal] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Plan:
        values = json.loads(text)
        return cls(**{**values, "signals": [PlannedSignal(**one) for one in values["signals"]]})

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def code(self) -> CodeType:
        """The function's code; an error where it was renamed."""
        module, _, names = self.at.partition(":")
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        return found.__code__


def run(plan, *words):
    return prepared(plan, command.run, *words)


def rank(plan, path):
    return prepared(plan, command.rank, path)


def prepared(text, function, *arguments):
    if text:
        plan, own = Plan.read(text), int(os.environ.get("RANK", "0"))
        Path(plan.folder, f"pid_{own}").write_text(str(os.getpid()))
        if own == plan.rank:
            send_at_call(plan)
    return function(*arguments)


def send_at_call(plan):
    """Follow every call, in this thread and in later ones, until the planned one."""
    code, process, left = plan.code, os.getpid(), plan.nth

    def on_event(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event != "call" or frame.f_code is not code or os.getpid() != process:
            return
        left -= 1
        if left == 0:
            sys.setprofile(None)
            threading.setprofile(None)
            at_once = len(plan.signals) if not any(one.after_s for one in plan.signals) else 0
            send_all(plan, plan.signals[:at_once])
            if not at_once:
                threading.Thread(target=send_all, args=(plan, plan.signals), daemon=True).start()

    threading.setprofile(on_event)
    sys.setprofile(on_event)


def send_all(plan, signals):
    for planned in signals:
        time.sleep(planned.after_s)
        place = Path(plan.folder, f"pid_{planned.rank}")
        if not place.exists():
            continue  # this rank hasn't started yet
        pid = int(place.read_text())
        if not leads_a_session(pid):
            continue  # it has ended, and the number may be another process's by now
        number = getattr(signal, planned.signal)
        sent = {"rank": planned.rank, "signal": planned.signal}
        with Path(plan.folder, SENT).open("ab", buffering=0) as record, contextlib.suppress(ProcessLookupError):
            # nothing else between these three lines: the rank may be about to restore its signal handlers
            handled = handles_signals(pid)
            record.write(json.dumps(sent | {"handled": handled}).encode() + b"\n")
            os.kill(pid, number)


def leads_a_session(pid):
    """Whether a process exists and may be one of the fork server's."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def handles_signals(pid):
    """Whether a process handles every signal that asks it to stop (SigCgt in proc(5))."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return all(caught >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
