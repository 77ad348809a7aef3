"""Processes of this machine, as the kernel tells of them and starts them."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def stat_fields(pid: int | str) -> list[str]:
    """The fields of proc(5)'s ``stat`` that come after the command's name: the state, the parent and so on.

    Args:
        pid: of the process, or ``self``.

    Raises:
        OSError: there is no such process, or no proc.
    """
    # the command's name, in parentheses, may hold spaces and parentheses
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


@contextmanager
def signals_blocked(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Inside, these signals wait; a process started here inherits that, until it unblocks those that it can handle."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
