"""Stacks of a program: those that its processes write by themselves, and a listing of all its processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.attempt.peers import waits_for_peers
from hpctrain.program.process_tree import Process, listing
from hpctrain.run.stacks import framed

ANSWER_S = 2.0
"""Seconds to wait for the processes' stacks."""
SETTLED_S = 0.1
"""Seconds without more output after which an answer is complete."""
_POLL_S = 0.02
WITHOUT_STACKS = (
    "no stacks of Python: no process of the program has called hpctrain.session.start() in its main thread, "
    "or run.signal is USR1"
)
_MAIN = re.compile(
    r"^Current thread [^\n]*\n +File \"(?P<path>[^\"\n]*)\", line (?P<line>\d+) in (?P<name>[^\n]*)", re.MULTILINE
)
"""The innermost frame of the thread that faulthandler's signal handler runs in, which is the main one."""
_STANDING = ("T", "t", "D")
"""States of a process that can't act: stopped, traced, waiting for a device."""


@dataclass(frozen=True, slots=True)
class ProgramStacks:
    """What is known of where a program is.

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
        # as a number of another namespace, in a container, it could be anybody's
        known = [process for process in (root, *root.descendants()) if process.pid in {*reporters}]
        # it would kill one that has replaced itself by another program
        asked = [process for process in known if process.handles(signal.SIGUSR1)]
        stacks = _ask(asked, folder)
        frames = {process: _MAIN.search(text) for process, text in stacks.items()}
        waiting = {process: found is not None and waits_for_peers(found["path"]) for process, found in frames.items()}
        standing = any(process.state in _STANDING for process in (root, *asked))
        first = next(filter(None, (frames[one] for one in sorted(waiting, key=lambda one: waiting[one]))), None)
        parts = [listing(root)]
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


def _ask(processes: list[Process], folder: Path) -> dict[Process, str]:
    files = {process: folder / f"stacks_{process.pid}" for process in processes}
    sizes = {process: _size(file) for process, file in files.items()}
    for process in processes:
        process.send(signal.SIGUSR1)
    latest = dict(sizes)
    now = time.monotonic()
    deadline, settled = now + ANSWER_S, now + SETTLED_S
    while processes and now < deadline:
        time.sleep(_POLL_S)
        now = time.monotonic()
        current = {process: _size(file) for process, file in files.items()}
        if current != latest:
            latest, settled = current, now + SETTLED_S
        if now >= settled and all(latest[process] > sizes[process] for process in processes):
            break
    return {process: _read_from(files[process], sizes[process]) for process in processes}


def _size(path: Path) -> int:
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
