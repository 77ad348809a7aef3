"""Processes of this machine: their age, cgroups, and what new ones inherit from them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.errors import ExitCode
from hpctrain.startup import PYTHON_STARTED_S

PR_SET_PDEATHSIG = 1
KILL_ROUNDS = 10
"""Rounds in which processes of a session are killed: one may fork while the others are."""
MAX_OPEN_FILES = 1 << 20
"""Most open files for which a rank asks: a hard limit can be a billion, and some programs try each descriptor."""


def process_start(pid: int) -> float | None:
    """Epoch seconds at which a process began; None if it doesn't exist, or is a zombie."""
    import psutil  # slow to import, and few commands look at processes

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return float(process.create_time())
    return None


def boot_id() -> str:
    """The id of this boot of the machine (random(4)), the same in all its containers; empty if it can't be read."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def process_age_s() -> float:
    """Seconds since Python began in this process."""
    return time.monotonic() - PYTHON_STARTED_S


def memory_cgroups(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each cgroup that limits this process's memory, innermost first.

    See cgroups(7). In a container, only the outermost folder may exist.

    Args:
        proc: where procfs is mounted.
        mount: where cgroups are mounted.
    """
    try:
        membership = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in membership:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            # version 2 has one tree for all, version 1 one for memory
            root = mount / controllers
            group = root / path.lstrip("/")
            for place in [group, *group.parents]:
                if not place.is_relative_to(root):
                    break
                yield (1 if controllers else 2), place


def session_members(leader: int) -> list[int]:
    """The living processes of a session (setsid(2)), in whichever process group they are: `timeout` makes its own."""
    import psutil

    members = []
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended meanwhile
            if os.getsid(pid) == leader and process_start(pid) is not None:
                members.append(pid)
    return members


def kill_session(leader: int) -> None:
    """Kill the processes of a session; those that left it, as a daemon does, stay."""
    for _ in range(KILL_ROUNDS):
        members = session_members(leader)
        for pid in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            return


def command_line(pid: int) -> str:
    """The command line of a process, as one line; empty after its end, or if it is hidden as another user's."""
    import psutil

    with suppress(psutil.Error):
        return " ".join(" ".join(psutil.Process(pid).cmdline()).split())
    return ""


@contextmanager
def signals_blocked(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Context manager in which these signals stay pending, also in a process that is started there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def may_handle_signals() -> bool:
    """Whether this is the main thread, the only one that Python lets set signal handlers, and that runs them."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handlers_restored(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """After the context, these signals have the handlers from before it; nothing happens outside of the main thread."""
    before = {number: signal.getsignal(number) for number in numbers} if may_handle_signals() else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def environ_replaced(variables: Mapping[str, str]) -> Iterator[None]:
    """Context manager in which `os.environ` holds exactly these variables."""
    before = dict(os.environ)
    # in this order, a thread that reads the environment meanwhile never misses a variable that stays
    os.environ.update(variables)
    for name in before.keys() - variables.keys():
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def open_files_raised() -> Iterator[None]:
    """Context manager that raises the soft limit on open files to the hard one, also for processes started inside.

    The usual soft limit of 1024 is for programs that call select(2). Each tensor that a DataLoader worker hands over is
    an open file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        yield
        return
    with suppress(OSError, ValueError):  # as where a sandbox forbids the call
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def end_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its launcher dies (Linux, prctl(2))."""
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(ExitCode.INTERRUPTED)
