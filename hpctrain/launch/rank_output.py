"""The output of rank zero, for its log and for the console of the launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

from hpctrain.streams import LogFile, print_warning

CLEAR_LINE = b"\r\x1b[K"


def copy_output(source: IO[bytes], log: LogFile, *, over_bar: bool = False) -> None:
    """Copy a rank's output to a log and to the console until it ends; an error in one doesn't stop the other.

    Args:
        source: the rank's end of a pipe; closed at the end.
        log: closed at the end.
        over_bar: whether the rank may have drawn a bar on the console, which lines replace.
    """
    at_start = True
    warnings: list[str] = []
    log.report = warnings.append
    with source, log:
        # to the end in any case: a rank whose pipe is full blocks, and one whose pipe is closed fails
        while data := os.read(source.fileno(), 65536):
            log.write(data)
            lines = data[: data.rfind(b"\n") + 1] if warnings else data
            _print(CLEAR_LINE + lines if over_bar and at_start else lines)
            if lines.endswith(b"\n"):
                while warnings:
                    print_warning(warnings.pop())
            _print(data[len(lines) :])
            at_start = data.endswith(b"\n")
    for warning in warnings:
        print_warning(warning)


def _print(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError:
        # its reader has exited, as `head` does; discard what is buffered and what this process prints later
        with Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())
