"""Processes of a program, from proc(5): descendants, states, handled signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ksh93", "mksh", "ash")
_GENERIC = signal.SIGXFSZ
"""Programs don't handle it. A bash with an EXIT trap handles it, and all others that end a process, for itself."""


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
    def command(self) -> str:
        """Its command line, as one line; its name in brackets if it has none."""
        words = " ".join(_read(self.pid, "cmdline").replace("\0", " ").split())
        return words or f"[{_read(self.pid, 'comm').strip()}]"

    @property
    def is_shell(self) -> bool:
        """Whether it is a shell, which would die of a signal and leave alone the programs that it runs."""
        program = Path(_link(self.pid, "exe")).name
        if program in ("", "busybox"):
            program = Path(_read(self.pid, "cmdline").partition("\0")[0]).name
        return program in SHELLS

    def handles(self, number: int) -> bool:
        """Whether it has a handler of its own for a signal."""
        mask = self._signals("SigCgt")
        if self.is_shell and (number == signal.SIGINT or mask >> (_GENERIC - 1) & 1):
            return False  # while it waits for a program, every shell handles SIGINT
        return bool(mask >> (number - 1) & 1)

    def blocks(self, number: int) -> bool:
        """Whether its main thread blocks a signal, as one that waits for it in another thread or by signalfd does."""
        return bool(self._signals("SigBlk") >> (number - 1) & 1)

    def _signals(self, name: str) -> int:
        found = next((line for line in _read(self.pid, "status").splitlines() if line.startswith(f"{name}:")), "0")
        return int(found.rpartition("\t")[2], 16)

    def reads_from(self, others: list[Process]) -> bool:
        """Whether its standard input is a pipe to which one of the others writes."""
        pipe = _link(self.pid, "fd/0")
        return pipe.startswith("pipe:") and any(
            pipe in (_link(other.pid, "fd/1"), _link(other.pid, "fd/2")) for other in others if other != self
        )

    def children(self) -> list[Process]:
        """Its children that haven't ended."""
        found: list[int] = []
        # not psutil's: it reads the state of every process of the machine
        with suppress(OSError):
            for task in os.listdir(f"/proc/{self.pid}/task"):  # noqa: PTH208 - names
                found += map(int, _read(self.pid, f"task/{task}/children").split())
        return [child for child in map(Process.of, found) if child is not None and child.alive]

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


def listing(root: Process) -> str:
    """One line for each process of a tree: number, state, where it waits in the kernel, command line."""
    lines = []
    for process in (root, *root.descendants()):
        place = _read(process.pid, "wchan").strip("0\n") or "-"
        lines.append(f"{process.pid:>8} {process.state or 'ended':<5} {place:<24} {process.command[:500]}\n")
    return f"{'pid':>8} {'state':<5} {'waits in':<24} command\n{''.join(lines)}"


def _stat(pid: int) -> list[str] | None:
    text = _read(pid, "stat")
    # the fields after the command's name, which stands in parentheses and may contain spaces and parentheses
    return text.rpartition(")")[2].split() if text else None


def _read(pid: int, name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""


def _link(pid: int, name: str) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/{name}").readlink())
    return ""
