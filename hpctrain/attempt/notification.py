"""Start `notify.command` when the state of a run changes, in the background."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO

from hpctrain.attempt.outcome import Outcome, resume_advice
from hpctrain.config.notify import Notify
from hpctrain.config.root import RunConfig
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.phrases import listed
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.process import command_line, kill_session, session_members
from hpctrain.run.reason import Reason

SOON_S = 5.0
"""Seconds for the last command if the nodes, the terminal or the next run wait for this process."""
KILLED_S = 2.0
"""Seconds for killed processes to disappear: on a hanging file system, a process outlives SIGKILL."""
CHILDREN_END_S = 0.2
"""Seconds for child processes that end just after their command, such as the first ones of a pipeline."""
POLL_S = 0.02
LONGEST_MESSAGE = 500
"""Characters of a message."""
COMMAND_SCRIPT = "trap '' TERM USR1 USR2; (read x <&2 || { pkill -9 -s $$; kill -9 -$$; }) & exec sh -c \"$1\" 2>&1"
"""Runs a command so that it ends with its launcher, however that ends: the kernel then closes the pipe at descriptor 2.

SLURM sends the ignored signals to all processes of a job that it requeues, when there is something to report.
"""
EVENTS = {
    ExitCode.FINISHED: "completed",
    ExitCode.CANCELLED: "cancelled",
    ExitCode.INTERRUPTED: "interrupted",
}
"""The event at the end of a run, by the exit code of its reason; `failed` for all others."""

log = logging.getLogger("hpctrain.attempt")


class Notifier:
    """Starts `notify.command` at the changes of a run's state; nothing that the command does delays or fails the run.

    Args:
        directory: of the run.
        config: its keys `notify` and `name`.
        environ: the environment of the commands.
        job_id: SLURM's; None on this machine.
    """

    def __init__(
        self, directory: RunDirectory, config: RunConfig, environ: Mapping[str, str], job_id: str | None = None
    ) -> None:
        self._directory = directory
        self._settings: Notify = config.notify
        self._name = config.name
        # the caller may change its environment while a command starts
        self._environ = dict(environ)
        self._job_id = job_id
        # monotonic seconds at which commands are killed: that of each, by its thread, and one for all
        self._deadlines: dict[threading.Thread, float] = {}
        self._last_deadline = math.inf

    def started(self, attempt: int, where: str) -> None:
        """Notify that an attempt starts.

        Args:
            attempt: its number.
            where: its nodes.
        """
        if not self._listens_for("started"):
            return
        step, before = 0, ""
        with contextlib.suppress(OSError, HpctrainError):  # the attempt itself reports an unreadable record
            step = saved_step(self._directory)
            ended = [entry for entry in Ledger(self._directory).attempts() if entry.attempt < attempt and entry.reason]
            before = f"; attempt {ended[-1].attempt} ended as {ended[-1].reason}" if ended else ""
        after = f" after step {step}" if step else ""
        self._start("started", attempt, step, None, f"attempt {attempt} starts on {where}{after}{before}")

    def ended(self, attempt: int, outcome: Outcome, *, why: str = "", continuation: str = "") -> None:
        """Notify of the end of an attempt.

        Args:
            attempt: its number.
            outcome: how it ended.
            why: why the run ends with it, if its reason alone doesn't explain that.
            continuation: what continues the run; empty if it ends here.
        """
        reason = outcome.reason
        event = "interrupted" if continuation else EVENTS.get(reason.meaning.exit_code, "failed")
        if not self._listens_for(event):
            return
        # the report of an orderly stop says only that it was one
        is_plain_stop = reason.meaning.orderly and reason not in (Reason.COMPLETED, Reason.PAUSED)
        headline = "" if is_plain_stop else outcome.headline
        after = f"{reason.value} after step {outcome.step}" if outcome.step else reason.value
        cause = ": ".join(filter(None, (after, why, headline)))[:LONGEST_MESSAGE]
        if not continuation and reason is not Reason.COMPLETED:
            continuation = f"the run ends here; {resume_advice(self._directory, reason)}"
        self._start(event, attempt, outcome.step, reason, "; ".join(filter(None, (cause, continuation))))

    def finish(self, within_s: float | None = None) -> None:
        """Wait for the commands, and kill those that take longer.

        Args:
            within_s: seconds to wait at most; None for `notify.timeout_s`.
        """
        self._last_deadline = time.monotonic() + (self._settings.timeout_s if within_s is None else within_s)
        for thread, deadline in self._deadlines.items():
            thread.join(max(0.0, min(deadline, self._last_deadline) - time.monotonic()) + KILLED_S)
        self._deadlines.clear()
        self._last_deadline = math.inf

    def _listens_for(self, event: str) -> bool:
        return self._settings.command is not None and event in self._settings.on

    def _start(self, event: str, attempt: int, step: int, reason: Reason | None, message: str) -> None:
        # what the command gets on its standard input, as docs/how_to/notify.md has it
        notification = {
            "event": event,
            "run_dir": str(self._directory.path),
            "name": self._name,
            "job_id": self._job_id,
            "attempt": attempt,
            "step": step,
            "reason": None if reason is None else reason.value,
            "message": message,
            "time": time.time(),
            "host": socket.gethostname(),
        }
        deadline = time.monotonic() + self._settings.timeout_s
        arguments = (event, json.dumps(notification), deadline)
        # a daemon: a process that waits for a dead file system must not keep this one
        thread = threading.Thread(target=self._run, args=arguments, name="notify", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit on threads
            log.warning("notify.command can't be started for %s: %s", event, error)
            return
        self._deadlines[thread] = deadline

    def _run(self, event: str, text: str, deadline: float) -> None:
        """Start the command, watch and kill it, in a thread.

        Args:
            event: of which it learns.
            text: for its standard input.
            deadline: monotonic seconds at which it is killed.
        """
        began = time.monotonic()
        try:
            code = self._run_to_the_end(event, text, deadline)
        except Exception as error:  # nothing of it may fail the run
            log.warning("notify.command can't be started for %s: %s", event, error)
            return
        if code is None:
            took_s = time.monotonic() - began
            log.warning("notify.command took more than %.0f s for %s: killed with its child processes", took_s, event)
        elif code:
            output = self._directory.notify_log
            log.warning("notify.command ended with %d for %s; its output is in %s", code, event, output)

    def _run_to_the_end(self, event: str, text: str, deadline: float) -> int | None:
        """Return the exit code; None for a command that was killed."""
        with contextlib.ExitStack() as stack:
            # a file and not a pipe: a command that reads nothing can't hold this process up, or end it by SIGPIPE
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
            file.write(f"{text}\n")
            file.seek(0)
            output = self._open_log(stack)
            reader, writer = map(stack.enter_context, map(os.fdopen, os.pipe(), ("rb", "wb")))
            process = subprocess.Popen(
                ["sh", "-c", COMMAND_SCRIPT, "sh", str(self._settings.command)],
                env=self._environ,
                stdin=file,
                stdout=output,
                stderr=reader,
                start_new_session=True,
            )
            while (code := process.poll()) is None and time.monotonic() < min(deadline, self._last_deadline):
                time.sleep(POLL_S)
            if code is not None:
                _report_background_processes(event, process.pid, writer)
            kill_session(process.pid)
        if code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
        return code

    def _open_log(self, stack: contextlib.ExitStack) -> IO[bytes] | int:
        try:
            return stack.enter_context(self._directory.notify_log.open("ab", buffering=0))
        except OSError:
            return subprocess.DEVNULL  # on a full or lost disk the notification matters most


def _report_background_processes(event: str, leader: int, watch: IO[bytes]) -> None:
    """Dismiss the watching shell, and warn of processes that the command left in the background."""
    with contextlib.suppress(OSError):  # the command may have killed it
        watch.write(b"\n")
        watch.flush()
    deadline = time.monotonic() + CHILDREN_END_S
    while (pids := session_members(leader)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    # on a busy machine, the watch may need longer
    if commands := [line for line in map(command_line, pids) if line and COMMAND_SCRIPT not in line]:
        log.warning(
            "killed what notify.command left in the background for %s: %s; remove the &, or start it with setsid "
            "to keep it",
            *(event, listed(commands)),
        )
