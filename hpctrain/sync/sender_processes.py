"""The processes that rank zero starts to send its run to services, and the pipe by which they watch it.

The services' clients run in processes of their own: their threads, signal handlers and exit hooks are made for one
process that trains once, and a service that hangs must not hold the ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hpctrain.cluster.variables import without_job_variables
from hpctrain.config.logger import Logger, MLflow, Wandb
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launcher import PREFIX
from hpctrain.sync.sender import Cursor

POLL_S = 0.05

log = logging.getLogger("hpctrain.sync")


@dataclass(slots=True)
class SenderProcesses:
    """A process for each service that a run enables, from `start` to `leave`.

    Args:
        directory: of the run.
        logger: the configuration's group.
    """

    directory: RunDirectory
    logger: Logger
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)
    _started: float = field(default=0.0, init=False)

    def start(self) -> None:
        """Start the processes; a failure is a warning."""
        self._started = time.time()
        for name, group in self.logger.enabled_services.items():
            try:
                self.processes[name] = self._start(name, group)
            except OSError as error:
                log.warning("nothing is sent to %s: its process can't be started (%s)", group.title, error)

    def _start(self, name: str, group: Wandb | MLflow) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hpctrain", "sync", str(self.directory.path), "--service", name]
        command.append("--sender-process")
        if group.is_offline:
            command.append("--offline")
        if group.server is not None:
            # the one with which the attempt began: config.yaml may be changed meanwhile
            command += ["--server", group.server]
        environment = {
            key: value for key, value in without_job_variables(os.environ).items() if not key.startswith(PREFIX)
        }
        self.directory.sync.mkdir(exist_ok=True)
        with (self.directory.sync / f"{name}.log").open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # neither Ctrl-C nor the end of the ranks' session reaches it
            )

    def complete(self, is_stopping: Callable[[], bool]) -> None:
        """Have the rest of a completed run sent, and wait for that, up to `logger.sync_timeout_s`.

        What is missing is a warning, with the command that sends it.

        Args:
            is_stopping: whether to wait no longer.
        """
        for process in self.processes.values():
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.write(Parent.COMPLETED.encode())
                process.stdin.flush()
        began = time.monotonic()
        deadline = began + self.logger.sync_timeout_s
        while time.monotonic() < deadline and not is_stopping():
            if all(process.poll() is not None for process in self.processes.values()):
                break
            time.sleep(POLL_S)
        for name, process in self.processes.items():
            late = ""
            if process.poll() is None:
                process.kill()
                late = f"its sender process hadn't finished after {time.monotonic() - began:.0f} s"
            self._warn(name, late)

    def leave(self) -> None:
        """Let the processes end by themselves; at once."""
        for process in self.processes.values():
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            # without a wait for it, the process would stay as a zombie
            threading.Thread(target=process.wait, name="sender", daemon=True).start()
        self.processes.clear()

    def _warn(self, name: str, late: str) -> None:
        with contextlib.suppress(OSError):
            group = self.logger.enabled_services[name]
            cursor = Cursor.read(self.directory, f"{name}_offline" if group.is_offline else name)
            # a cursor from before a resume may be complete
            if not cursor.complete or cursor.problem or cursor.time < self._started:
                reasons = "; ".join(filter(None, (cursor.problem, late)))
                why = f" ({reasons})" if reasons else ""
                command = f"python -m hpctrain sync {self.directory.as_typed} --service {name}"
                log.warning("%s doesn't have the whole run yet%s; send the rest with: %s", group.title, why, command)


LOOK_EVERY_S = 1.0
"""Seconds between two looks whether the parent lives: processes that it forked may hold its end of the pipe open."""


class Parent:
    """The process that started this one, watched by a thread: a call of a service's client may take minutes.

    Args:
        descriptor: of a pipe: the parent writes `COMPLETED` into it, and its end means that it left.
        on_left: called in the thread once the parent has left without completing the run.

    Attributes:
        end: `COMPLETED` or `LEFT`, once the training has ended; None before.
    """

    COMPLETED = "completed"
    LEFT = "left"

    def __init__(self, descriptor: int, on_left: Callable[[], object] = lambda: None) -> None:
        self.end: str | None = None
        self._descriptor = descriptor
        self._on_left = on_left
        self._pid = os.getppid()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait, but no longer than until the parent's training ends."""
        self._ended.wait(seconds)

    def _watch(self) -> None:
        received = b""
        while True:
            ready, _, _ = select.select([self._descriptor], [], [], LOOK_EVERY_S)
            data = os.read(self._descriptor, 64) if ready else b""
            received += data
            if received.startswith(self.COMPLETED.encode()):
                self.end = self.COMPLETED
                break
            if (ready and not data) or os.getppid() != self._pid:
                self.end = self.LEFT
                self._on_left()
                break
        self._ended.set()
