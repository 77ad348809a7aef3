"""Standard streams of a command: keep them open, able to print any text, and usable after their reader has exited."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from hpctrain.phrases import counted
from hpctrain.terminal import GuardedStream, unguarded

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Printer: TypeAlias = Callable[[str], object]
"""Gets lines for the user: a command prints them, a program logs them."""


def print_warning(text: str) -> None:
    """Print a warning as the commands do."""
    print(f"hpctrain: warning: {text}", file=sys.stderr)  # noqa: T201 - what it is for


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records to a stream. One that can't be written costs one warning, not a traceback for each record."""

    _is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Warn once that the stream can't be written; report other errors as logging does."""
        error = sys.exc_info()[1]
        is_closed = isinstance(error, ValueError) and getattr(self.stream, "closed", False)
        if not (isinstance(error, OSError) or is_closed):
            super().handleError(record)
        elif not self._is_reported:
            self._is_reported = True
            why = error.strerror or str(error) if isinstance(error, OSError) else "it was closed"
            _print_warning_if_possible(_lines_are_lost(_name_of(self.stream), why))


def _lines_are_lost(name: object, why: str) -> str:
    return f"{name} can't be written ({why}): lines are lost while that lasts"


def _print_warning_if_possible(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print_warning(text)


def _is_same_file(stream: TextIO, other: TextIO | None) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return other is not None and os.path.sameopenfile(stream.fileno(), other.fileno())
    return False


def _name_of(stream: Any) -> str:
    """The path of a stream's file, or what Python calls it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return str(Path(f"/proc/self/fd/{stream.fileno()}").readlink())
    return str(getattr(stream, "name", "the log"))


def open_streams() -> None:
    """Replace closed streams by /dev/null, and print characters that the encoding lacks as escapes.

    Call it first: a file opened while standard output is closed would get its descriptor, and then the output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                while (null := os.open(os.devnull, os.O_RDWR)) < descriptor:
                    pass
                if null != descriptor:
                    os.dup2(null, descriptor)
                    os.close(null)
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
    """Context manager in which output that is printed to a missing or closed standard output or error is discarded."""
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        for stream, redirect in ((sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)):
            if stream is None or getattr(stream, "closed", False):
                stack.enter_context(redirect(null))
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
        current = getattr(sys, name)
        stream = unguarded(current)
        # a stream that a test put there, or that a program replaced, is its owner's
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            kind = LogFile if is_file else _ErrorIgnoringFile
            raw = kind(stream.fileno(), "w", closefd=False)
            if isinstance(raw, LogFile) and name == "stdout" and not _is_same_file(stream, sys.stderr):
                raw.report = _print_warning_if_possible
            wrapper = io.TextIOWrapper(
                raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw),  # python -u has no buffer
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, wrapper if current is stream else GuardedStream(wrapper))
            setattr(sys, f"__{name}__", wrapper)


class _ErrorIgnoringFile(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            # the reader is gone, or the disk is full: it has room again later, perhaps
            return memoryview(data).nbytes


@dataclass(frozen=True, slots=True)
class LostOutput:
    """The output that a log lacks because its file couldn't be written.

    Attributes:
        lines: number of lines whose end is missing.
        size_bytes: their size.
    """

    lines: int = 0
    size_bytes: int = 0

    def __add__(self, other: LostOutput) -> LostOutput:
        return LostOutput(self.lines + other.lines, self.size_bytes + other.size_bytes)

    def __str__(self) -> str:
        return f"{counted(max(1, self.lines), 'line')} ({counted(self.size_bytes, 'byte')})"


class LogFile(io.FileIO):
    """A log file whose writer doesn't fail or wait if the file can't be written (disk full, read-only, unmounted).

    Output that can't be written is dropped and counted. Once the file can be written again, it gets a line with the
    counts.

    Args:
        file: its path, or a descriptor.
        mode: `a`, or `w` for a descriptor.
        closefd: whether to close a descriptor with the file.

    Attributes:
        report: gets a line at the first failure.
    """

    report: Printer = staticmethod(lambda _text: None)

    def __init__(self, file: int | Path, mode: str = "a", *, closefd: bool = True) -> None:
        super().__init__(file, mode, closefd=closefd)
        self._gap = LostOutput()
        self._error = ""
        self._ends_line = True
        self._written_output = LostOutput()
        self._dropped = LostOutput()
        self._is_removed = False

    @property
    def lost(self) -> LostOutput:
        """The dropped output; also all that was written, if the file was removed."""
        if not self.closed:
            self._look_for_file()
        return self._dropped + self._written_output if self._is_removed else self._dropped

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of the data, or count what is dropped; return its size."""
        remaining = memoryview(data).cast("B")
        size_bytes = remaining.nbytes
        try:
            self._close_gap()
            while remaining:
                remaining = remaining[self._write_some(remaining) :]
        except OSError as error:
            self._drop(remaining.tobytes(), error)
        return size_bytes

    def close(self) -> None:
        """Close the file; first try once more to write the line with the counts."""
        if self.closed:
            return
        with contextlib.suppress(OSError):
            self._close_gap()
        self._look_for_file()
        try:
            super().close()
        except OSError as error:  # NFS reports here what it couldn't store
            self._drop(b"?", error)

    def _look_for_file(self) -> None:
        try:
            self._is_removed = os.fstat(self.fileno()).st_nlink == 0
        except OSError as error:  # on NFS, another node may have removed the file
            self._is_removed = error.errno == errno.ESTALE

    def _close_gap(self) -> None:
        if not self._error:
            return
        mark = f"hpctrain: {self._gap} lost here: the file could not be written ({self._error})\n".encode()
        remaining = memoryview(mark if self._ends_line else b"\n" + mark)
        while remaining:
            remaining = remaining[self._write_some(remaining) :]
        self._gap, self._error = LostOutput(), ""

    def _write_some(self, data: memoryview) -> int:
        num_written = super().write(data)
        if not num_written:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._ends_line = data[num_written - 1] == ord("\n")
        self._written_output += LostOutput(data[:num_written].tobytes().count(b"\n"), num_written)
        return num_written

    def _drop(self, data: bytes, error: OSError) -> None:
        lost = LostOutput(data.count(b"\n"), len(data))
        if not self._dropped.size_bytes:
            name = _name_of(self) if isinstance(self.name, int) else self.name
            self.report(_lines_are_lost(name, error.strerror or str(error)))
        self._dropped += lost
        self._gap += lost
        self._error = error.strerror or str(error)


def open_log(path: Path) -> io.TextIOWrapper[Any]:
    """Open a `LogFile` for unbuffered text at its end; its first failure is printed as a warning."""
    raw = LogFile(path)
    raw.report = print_warning
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def lost_output(*streams: TextIO | None) -> LostOutput:
    """Add up the output that the log files behind text streams lack; other streams are skipped."""
    buffers = [getattr(unguarded(stream), "buffer", None) for stream in streams if stream is not None]
    files = [getattr(buffer, "raw", buffer) for buffer in buffers]
    return sum((file.lost for file in files if isinstance(file, LogFile)), LostOutput())
