"""Write the Python stacks of this process to a file, and find the position of one thread."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

from hpctrain.attempt.peers import waits_for_peers
from hpctrain.run.stacks import framed

STDERR = 2


def write_stacks(path: Path | None, title: str, token: str) -> None:
    """Append the stacks of all threads of this process.

    Args:
        path: the file; standard error is used if it is None or can't be opened.
        title: first line: rank, host, time.
        token: marks the beginning and the end.
    """
    try:
        file = STDERR if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError:
        file = STDERR
    begin, end = framed(title, token)
    names = "".join(f"0x{thread.ident or 0:016x} is {thread.name}\n" for thread in threading.enumerate())
    try:
        os.write(file, f"{begin}{names}\n".encode())
        # unlike the traceback module, this allocates no memory, takes no locks and reads no source files, so it works
        # in a process in which hardly anything else does
        faulthandler.dump_traceback(file, all_threads=True)
        os.write(file, end.encode())
    finally:
        if file != STDERR:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Position:
    """A thread's innermost Python frame, and its stack.

    Attributes:
        text: function, file and line.
        stack: formatted, outermost call first; empty if the thread has ended.
        waits: whether it is in a collective or a backward pass, where a rank waits for the others, so that the cause is
            probably elsewhere. A guess: on a GPU a rank waits wherever it first needs a result.
    """

    text: str
    stack: str
    waits: bool

    @classmethod
    def of(cls, thread_id: int) -> Position:
        """The position of a thread of this process, by its `threading.get_ident()`."""
        frame = sys._current_frames().get(thread_id)
        if frame is None:
            return cls("a thread that has ended", "", waits=False)
        code = frame.f_code
        return cls(
            text=f"{code.co_name} in {code.co_filename}:{frame.f_lineno}",
            stack="".join(traceback.format_stack(frame)),
            waits=waits_for_peers(code.co_filename),
        )
