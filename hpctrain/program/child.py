"""The first process of a program, in a process group of its own, which ends with hpctrain's process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hpctrain.config.command import interpreter_of
from hpctrain.errors import ConfigError
from hpctrain.program.process_tree import Process
from hpctrain.rank.stop_request import STOP_SIGNALS
from hpctrain.run.process import end_with_parent, signals_blocked

PR_SET_CHILD_SUBREAPER = 36
KILLED_S = 5.0
"""Seconds to wait for killed processes: one that waits for a broken device doesn't end."""
_GUARD = """
read -r line
rm -rf -- "$1"
for round in 1 2 3 4 5; do
    for file in $(grep -lsF -- "HPCTRAIN_SESSION=$1" /proc/[0-9]*/environ); do
        [ -z "$SLURM_JOB_ID" ] || grep -qsF -- "SLURM_JOB_ID=$SLURM_JOB_ID" "$file" || continue
        process=${file#/proc/}
        kill -KILL "${process%/environ}"
    done
done
kill -KILL 0
"""
"""Removes a folder and kills a program when the other end of its standard input closes.

The program is its process group, and the processes that have the folder in their environment: torchrun's workers have
sessions of their own. In a SLURM job it spares those of other jobs, which a program may have submitted."""
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Child:
    """A program that was started.

    Its processes stay below this one, whatever sessions they make, and this process reaps them. If this process is
    killed, so are its process group and the processes that inherited its environment.

    Args:
        command: the program and its arguments.
        variables: its whole environment.
        folder: its working directory.
        stop_signal: by which it is asked to stop.
        session: a folder to remove if this process is killed.
        output: the descriptor for its standard output and error.

    Raises:
        ConfigError: it can't be started.

    Attributes:
        process: the first process.
        code: its exit code once it has ended; the negative number of a signal that killed it.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        *,
        stop_signal: int,
        session: Path,
        output: int,
    ) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.code: int | None = None
        # blocked: a handler of this process would run in the new one, and write to the pipe that both share
        with signals_blocked((*STOP_SIGNALS, signal.SIGCHLD)):
            self._popen = _start(command, variables, folder, output, partial(_prepare, os.getpid(), stop_signal))
            process = Process.of(self._popen.pid)
            assert process is not None  # nothing has reaped it
            self.process = process
            self._guard = self._start_guard(session)

    def _start_guard(self, session: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ("/bin/sh", "-c", _GUARD, "hpctrain-guard", str(session)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=self.process.pid,
            preexec_fn=_ignore_signals,  # noqa: PLW1509 - no threads; a program may signal its whole group
        )

    def reap(self) -> None:
        """Reap every process that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.process.pid:
                self.code = self._popen.returncode = os.waitstatus_to_exitcode(status)
            elif pid == self._guard.pid:
                self._guard.returncode = os.waitstatus_to_exitcode(status)

    def rest(self) -> list[Process]:
        """The processes of the program that haven't ended."""
        this = Process.of(os.getpid())
        assert this is not None
        return [process for process in this.descendants() if process.pid != self._guard.pid]

    def orphans(self) -> list[Process]:
        """The processes of the program whose parent isn't one of them; the first one is among these."""
        this = Process.of(os.getpid())
        assert this is not None
        return [process for process in this.children() if process.pid != self._guard.pid]

    def kill(self) -> None:
        """Kill all processes of the program, and reap them."""
        deadline = time.monotonic() + KILLED_S
        while (rest := self.rest()) and time.monotonic() < deadline:
            for process in rest:  # again and again: a process may fork until it is dead
                process.send(signal.SIGKILL)
            time.sleep(0.01)
            self.reap()
        self.reap()

    def close(self) -> None:
        """Kill what is left of the program, and end the guard."""
        self.kill()
        self._guard.kill()
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        if self._guard.returncode is None:
            self._guard.wait()


def _start(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, output: int, prepare: Callable[[], None]
) -> subprocess.Popen[bytes]:
    if not folder.is_dir():
        problem = f"its working directory {folder} doesn't exist on this node"
        raise ConfigError("run.command", command[0], problem, "launch from a folder that all nodes see")
    try:
        return subprocess.Popen(
            command,
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=prepare,  # noqa: PLW1509 - this process has no other threads
        )
    except OSError as error:
        raise _explained(error, command[0], variables, folder) from error


def _explained(error: OSError, word: str, variables: Mapping[str, str], folder: Path) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        where = f"in {folder}" if "/" in word else f"in PATH ({variables.get('PATH', '')})"
        problem = f"no such program {where}, or its interpreter is missing"
        return ConfigError("run.command", word, problem, "correct the command, or set PATH in cluster.setup")
    if isinstance(error, PermissionError):
        remedy = f"chmod +x it, or name its interpreter: {interpreter_of(str(folder / word))} {word}"
        return ConfigError("run.command", word, "isn't executable", remedy)
    problem = f"can't be started ({error.strerror})"
    remedy = f"begin a script with #!, or name its interpreter: {interpreter_of(str(folder / word))} {word}"
    return ConfigError("run.command", word, problem, remedy)


def _prepare(parent: int, stop_signal: int) -> None:
    """Give a new process the signals that a shell would, except for SLURM's own; runs before the program does."""
    end_with_parent(parent)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    for number in _USER_SIGNALS:
        if number != stop_signal:
            # SLURM may send them to all processes of a job, and they would kill those that don't handle them
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _ignore_signals() -> None:
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
