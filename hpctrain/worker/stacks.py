"""Python stacks of all threads of this process, into a file."""

from __future__ import annotations

import faulthandler
import os
import threading
from pathlib import Path

from hpctrain.run.stacks import framed

STDERR = 2


def write_stacks(path: Path | None, head: str, token: str) -> None:
    """Append the stacks of all threads of this process.

    faulthandler writes them without allocating memory, taking locks or reading source files, so that a process in
    which hardly anything works any more can still do it.

    Args:
        path: the file; standard error is used where there is none, or it can't be opened.
        head: what this is: rank, host, time.
        token: marks begin and end.
    """
    try:
        file = STDERR if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError:
        file = STDERR
    begin, end = framed(head, token)
    names = "".join(f"0x{thread.ident or 0:016x} is {thread.name}\n" for thread in threading.enumerate())
    try:
        os.write(file, f"{begin}{names}\n".encode())
        faulthandler.dump_traceback(file, all_threads=True)
        os.write(file, end.encode())
    finally:
        if file != STDERR:
            os.close(file)
