"""Standard streams of a command: keep them open, able to print any text, and usable after their reader has exited."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

from hpctrain.terminal import GuardedStream, unguarded

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Report: TypeAlias = Callable[[str], object]
"""Gets lines for the user: a command prints them, a program logs them."""


def print_warning(text: str) -> None:
    """Print a warning as the commands do."""
    print(f"hpctrain: warning: {text}", file=sys.stderr)  # noqa: T201 - what it is for


def open_streams() -> None:
    """Replace closed streams by /dev/null, and print characters that the encoding lacks as escapes.

    Call it first: a file opened while standard output is closed would get its descriptor, and then the output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                while (made := os.open(os.devnull, os.O_RDWR)) < descriptor:
                    pass
                if made != descriptor:
                    os.dup2(made, descriptor)
                    os.close(made)
                setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # names of files, runs and metrics may have characters that an ASCII terminal hasn't
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Flush standard output and error, if possible: a program may have none, or have closed or replaced them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


@contextlib.contextmanager
def missing_output_discarded() -> Iterator[None]:
    """Inside the context, standard output and error exist: what is printed to a missing or closed one is discarded."""
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        for stream, replaced in ((sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)):
            if stream is None or getattr(stream, "closed", False):
                stack.enter_context(replaced(null))
        yield


def discard_output(stream: TextIO) -> None:
    """Discard a stream's buffered and later output, because its reader has exited or its disk is full."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def ignore_write_errors() -> None:
    """Ignore failed writes to standard output and error, so that training survives `| head` and a full disk."""
    for name in ("stdout", "stderr"):
        found = getattr(sys, name)
        stream = unguarded(found)
        # a stream that a test put there, or that a program replaced, is its owner's
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _ErrorIgnoringFile(stream.fileno(), "w", closefd=False)
            made = io.TextIOWrapper(
                raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw),  # python -u has no buffer
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, made if found is stream else GuardedStream(made))
            setattr(sys, f"__{name}__", made)


class _ErrorIgnoringFile(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            # the reader is gone, or the disk is full: it has room again later, perhaps
            return memoryview(data).nbytes
