"""The processes of a program: the first one, which ends with hpctrain's process, its descendants, and their stacks."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpctrain.config.command import interpreter_of
from hpctrain.errors import ConfigError
from hpctrain.rank.stacks import waits_for_peers
from hpctrain.rank.stop_request import STOP_SIGNALS
from hpctrain.run.process import end_with_parent, signals_blocked
from hpctrain.run.stacks import framed

SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ksh93", "mksh", "ash")
_PROBE_SIGNAL = signal.SIGXFSZ
"""Programs don't handle it. A bash with an EXIT trap handles it, and all others that end a process, for itself."""
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
ANSWER_S = 2.0
"""Seconds to wait for the processes' stacks."""
SETTLED_S = 0.1
"""Seconds without more output after which an answer is complete."""
_POLL_S = 0.02
WITHOUT_STACKS = (
    "no stacks of Python: no process of the program has called hpctrain.session.start() in its main thread, "
    "or run.signal is USR1"
)
_MAIN_THREAD_FRAME = re.compile(
    r"^Current thread [^\n]*\n +File \"(?P<path>[^\"\n]*)\", line (?P<line>\d+) in (?P<name>[^\n]*)", re.MULTILINE
)
"""The innermost frame of the thread that faulthandler's signal handler runs in, which is the main one."""
_STANDING = ("T", "t", "D")
"""States of a process that can't act: stopped, traced, waiting for a device."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process; a later one with the same number is a different one.

    Attributes:
        pid: its number.
        started: its start in ticks since the boot.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process with this number; None if there is none."""
        fields = _stat(pid)
        return None if fields is None else cls(pid, int(fields[19]))

    @property
    def state(self) -> str:
        """Its state: R, S, D (waits for a device), T or t (stopped); empty after its end."""
        fields = _stat(self.pid)
        ended = fields is None or int(fields[19]) != self.started or fields[0] in "ZX"
        return "" if fields is None or ended else fields[0]

    @property
    def alive(self) -> bool:
        """Whether it hasn't ended."""
        return bool(self.state)

    @property
    def words(self) -> list[str]:
        """Its command line; an empty word after its end, or if it has none."""
        return read_proc(self.pid, "cmdline").split("\0")

    @property
    def command(self) -> str:
        """Its command line, as one line; its name in brackets if it has none."""
        return " ".join(" ".join(self.words).split()) or f"[{read_proc(self.pid, 'comm').strip()}]"

    @property
    def is_shell(self) -> bool:
        """Whether it is a shell, which would die of a signal and leave alone the programs that it runs."""
        program = Path(read_proc_link(self.pid, "exe")).name
        if program in ("", "busybox"):
            program = Path(self.words[0]).name
        return program in SHELLS

    def handles(self, number: int) -> bool:
        """Whether it has a handler of its own for a signal."""
        mask = self._signals("SigCgt")
        if self.is_shell and (number == signal.SIGINT or mask >> (_PROBE_SIGNAL - 1) & 1):
            return False  # while it waits for a program, every shell handles SIGINT
        return bool(mask >> (number - 1) & 1)

    def blocks(self, number: int) -> bool:
        """Whether its main thread blocks a signal, as one that waits for it in another thread or by signalfd does."""
        # psutil doesn't report signals
        return bool(self._signals("SigBlk") >> (number - 1) & 1)

    def _signals(self, name: str) -> int:
        mask_line = next(
            (line for line in read_proc(self.pid, "status").splitlines() if line.startswith(f"{name}:")), "0"
        )
        return int(mask_line.rpartition("\t")[2], 16)

    def reads_from(self, writers: list[Process]) -> bool:
        """Whether its standard input is a pipe to which one of the others writes."""
        pipe = read_proc_link(self.pid, "fd/0")
        return pipe.startswith("pipe:") and any(
            pipe in (read_proc_link(writer.pid, "fd/1"), read_proc_link(writer.pid, "fd/2"))
            for writer in writers
            if writer != self
        )

    def children(self) -> list[Process]:
        """Its children that haven't ended."""
        pids: list[int] = []
        # not psutil's: it reads the state of every process of the machine
        with suppress(OSError):
            for task in os.listdir(f"/proc/{self.pid}/task"):  # noqa: PTH208 - names
                pids += map(int, read_proc(self.pid, f"task/{task}/children").split())
        return [child for child in map(Process.of, pids) if child is not None and child.alive]

    def descendants(self) -> Iterator[Process]:
        """Its children and theirs, parents first."""
        for child in self.children():
            yield child
            yield from child.descendants()

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            if self.alive:
                os.kill(self.pid, number)


def describe_tree(root: Process) -> str:
    """One line for each process of a tree: number, state, where it waits in the kernel, command line."""
    lines = []
    for process in (root, *root.descendants()):
        place = read_proc(process.pid, "wchan").strip("0\n") or "-"
        lines.append(f"{process.pid:>8} {process.state or 'ended':<5} {place:<24} {process.command[:500]}\n")
    return f"{'pid':>8} {'state':<5} {'waits in':<24} command\n{''.join(lines)}"


def _stat(pid: int) -> list[str] | None:
    text = read_proc(pid, "stat")
    # the fields after the command's name, which stands in parentheses and may contain spaces and parentheses
    return text.rpartition(")")[2].split() if text else None


def read_proc(pid: int, *names: str) -> str:
    """Return the text of a file in a process's folder of /proc; empty if it can't be read."""
    with suppress(OSError):
        return Path("/proc", str(pid), *names).read_text(errors="replace")
    return ""


def read_proc_link(pid: int, name: str) -> str:
    """Return the target of a link in a process's folder of /proc; empty if it can't be read."""
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/{name}").readlink())
    return ""


class RunningProgram:
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
        self._parent = _own_process(os.getpid())
        self.code: int | None = None
        # blocked: a handler of this process would run in the new one, and write to the pipe that both share
        with signals_blocked((*STOP_SIGNALS, signal.SIGCHLD)):
            self._popen = _start(command, variables, folder, output, partial(_prepare, os.getpid(), stop_signal))
            self.process = _own_process(self._popen.pid)
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

    def processes(self) -> list[Process]:
        """The processes of the program that haven't ended."""
        return [process for process in self._parent.descendants() if process.pid != self._guard.pid]

    def orphans(self) -> list[Process]:
        """The processes of the program whose parent isn't one of them; the first one is among these."""
        return [process for process in self._parent.children() if process.pid != self._guard.pid]

    def kill(self) -> None:
        """Kill all processes of the program, and reap them."""
        deadline = time.monotonic() + KILLED_S
        while (processes := self.processes()) and time.monotonic() < deadline:
            for process in processes:  # again and again: a process may fork until it is dead
                process.send(signal.SIGKILL)
            time.sleep(0.01)
            self.reap()
        self.reap()

    def close(self) -> None:
        """Kill what is left of the program, and end the guard."""
        self.kill()
        self._guard.kill()
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.close()
        if self._guard.returncode is None:
            self._guard.wait()


def _own_process(pid: int) -> Process:
    process = Process.of(pid)
    assert process is not None  # this process, or a child that nothing has reaped
    return process


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
        raise _explain(error, command[0], variables, folder) from error


def _explain(error: OSError, word: str, variables: Mapping[str, str], folder: Path) -> ConfigError:
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


@dataclass(frozen=True, slots=True)
class ProgramStacks:
    """Stacks of a program's processes, and the position that they show.

    Attributes:
        text: the processes, and the stacks of those that wrote them.
        position: the innermost frame of the first process that doesn't wait for other ranks, or of any; empty without.
        waits: whether all processes that report wait for other ranks.
    """

    text: str
    position: str
    waits: bool

    @classmethod
    def collect(cls, root: Process, reporters: Iterable[int], folder: Path) -> ProgramStacks:
        """Ask the processes of a program for their stacks.

        Args:
            root: the first process.
            reporters: numbers of the processes that write stacks when they get SIGUSR1.
            folder: of the session, in which they write them.
        """
        # in a container, the number belongs to another namespace, and could be that of any process here
        reporting = [process for process in (root, *root.descendants()) if process.pid in {*reporters}]
        # it would kill one that has replaced itself by another program
        processes = [process for process in reporting if process.handles(signal.SIGUSR1)]
        stacks = _request_stacks(processes, folder)
        frames = {process: _MAIN_THREAD_FRAME.search(text) for process, text in stacks.items()}
        waiting = {process: frame is not None and waits_for_peers(frame["path"]) for process, frame in frames.items()}
        standing = any(process.state in _STANDING for process in (root, *processes))
        first = next(filter(None, (frames[process] for process in sorted(waiting, key=waiting.__getitem__))), None)
        parts = [describe_tree(root)]
        parts += [f"process {process.pid}:\n{text or 'no stacks in time'}\n" for process, text in stacks.items()]
        if not stacks:
            parts.append(f"{WITHOUT_STACKS}\n")
        return cls(
            text="\n".join(parts),
            position="" if first is None else f"{first['name']} in {first['path']}:{first['line']}",
            waits=bool(waiting) and all(waiting.values()) and not standing,
        )

    def write(self, path: Path, title: str, token: str) -> None:
        """Append them to a file, framed as an answer to a request.

        Raises:
            OSError: the file can't be written.
        """
        begin, end = framed(title, token)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{begin}{self.text}{end}")


def _request_stacks(processes: list[Process], folder: Path) -> dict[Process, str]:
    files = {process: folder / f"stacks_{process.pid}" for process in processes}
    sizes = {process: size_of(file) for process, file in files.items()}
    for process in processes:
        process.send(signal.SIGUSR1)
    latest = dict(sizes)
    now = time.monotonic()
    deadline, settled = now + ANSWER_S, now + SETTLED_S
    while processes and now < deadline:
        time.sleep(_POLL_S)
        now = time.monotonic()
        current = {process: size_of(file) for process, file in files.items()}
        if current != latest:
            latest, settled = current, now + SETTLED_S
        if now >= settled and all(latest[process] > sizes[process] for process in processes):
            break
    return {process: _read_from(files[process], sizes[process]) for process in processes}


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it doesn't exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset, os.SEEK_SET)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
