"""The output of a program: copied to the log, and searched for the error that ended it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.streams import LogFile, LostOutput, lost_output

TAIL_BYTES = 64 * 2**10
ARRIVED_S = 2.0
"""Seconds until the launcher, through which rank zero's output may go, has written it into the log."""
LAST_LINES = 20
"""Lines that are kept of an output without a traceback."""
LONGEST_TRACEBACK = 100
"""Lines of a traceback."""
MOST_TRACEBACKS = 100
"""Tracebacks that are looked at: a program may print thousands of chained ones."""
_STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d hpctrain: "
_OWN_LINE = re.compile(rf"(^)?{_STAMP}.*\n", re.MULTILINE)
"""What this process has logged, perhaps after an unfinished line of the program."""
_STAMP_AT_END = re.compile(f"{_STAMP}$".encode())
_TRACEBACK = re.compile(r"(?P<prefix>(\[rank\d+\]: ?)?)(Original )?Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(: (?P<text>.*))?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_ABORT = re.compile(r"(\[rank\d+\]: ?)?terminate called after throwing an instance of '(c10|gloo)::")
"""torch's backends end a process so, such as NCCL's watchdog; frames of C++ follow."""
_WRAPPER = "ChildFailedError"
"""torchrun's own error when one of its processes has failed."""


class ProgramOutput:
    """The output of a program; if it goes to a file, a thread of this process writes it.

    If the program wrote to the file itself, a full disk would make its next print fail.

    Attributes:
        writer: the descriptor that the program gets as standard output and error.
    """

    def __init__(self) -> None:
        self._reader: int | None = None
        self.writer = sys.stdout.fileno()
        # the launcher reads rank zero's output from a pipe, and writes it
        if stat.S_ISREG(os.fstat(self.writer).st_mode):
            self._log = LogFile(self.writer, "w", closefd=False)
            self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
            self._writing = threading.Lock()
            self._thread = threading.Thread(target=self._copy, args=(self._reader,), daemon=True)

    @property
    def lost(self) -> LostOutput:
        """The output of the program and of this process that the log lacks."""
        lost = lost_output(sys.stdout, sys.stderr)
        return lost if self._reader is None else lost + self._log.lost

    def start(self) -> None:
        """Start copying; call it once the program has the descriptor."""
        if self._reader is not None:
            os.close(self.writer)
            self._thread.start()

    def drain(self) -> None:
        """Wait until everything printed so far is written, for at most `ARRIVED_S`."""
        deadline = time.monotonic() + ARRIVED_S
        while self._reader is not None and time.monotonic() < deadline:
            with self._writing:
                (waiting,) = struct.unpack("i", fcntl.ioctl(self._reader, termios.FIONREAD, bytes(4)))
            if not waiting:
                return
            time.sleep(0.001)

    def close(self) -> None:
        """Wait until the last process of the program has closed its output, for at most `ARRIVED_S`."""
        if self._reader is not None:
            self._thread.join(ARRIVED_S)

    def _copy(self, reader: int) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        while True:
            poll.poll()  # without the lock
            with self._writing:
                data = os.read(reader, 65536)
                self._log.write(data)
            if not data:
                return


@dataclass(frozen=True, slots=True)
class OutputError:
    """The error that ended a program, as far as its output shows it.

    Attributes:
        message: its last line.
        traceback: of Python, with those that it followed from; or the last lines of the output.
        type: of the exception, without its module; empty if there was none.
        signs: the text in which signs of a lost peer count.
    """

    message: str
    traceback: str
    type: str = ""
    signs: str = ""


def read_tail(log: Path, start: int, end_mark: str) -> str:
    """Return the last output of a program.

    Args:
        log: of its rank.
        start: size of the log when the program was started.
        end_mark: in a line that this process has logged after the program's end; what follows isn't the program's.
    """
    deadline = time.monotonic() + ARRIVED_S
    mark = end_mark.encode()
    while True:
        try:
            with log.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(start if start <= size else 0, size - TAIL_BYTES))
                data = file.read()
        except OSError:
            return ""
        found = data.rfind(mark)
        if found >= 0 or time.monotonic() > deadline:
            kept = data if found < 0 else data[: _line_of(data, found)]
            return _OWN_LINE.sub(lambda one: "" if one[1] is not None else "\n", kept.decode(errors="replace"))
        time.sleep(0.02)


def _line_of(data: bytes, mark: int) -> int:
    """Where this process' line with the end mark begins; the program may have left its last one unfinished."""
    start = data.rfind(b"\n", 0, mark) + 1
    stamp = _STAMP_AT_END.search(data, start, mark)
    return start if stamp is None else stamp.start()


def find_errors(text: str) -> list[OutputError]:
    """Return the errors at the end of an output, the last one last; at least one if there is any output.

    Args:
        text: the end of the output.
    """
    # a progress bar returns to the beginning of its line
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)][-MOST_TRACEBACKS:]
    found = [error for start in starts if (error := _error_at(lines, start, starts)) is not None]
    found = [error for error in found if error.type != _WRAPPER]
    if found:
        return found
    last = [line for line in lines if line.strip()][-LAST_LINES:]
    return [OutputError(message=last[-1].strip(), traceback="\n".join(last), signs=_signs(lines))] if last else []


def _signs(lines: Sequence[str]) -> str:
    """An error of torch's C++ code that ended the process; else the last line, since others are about anything."""
    ended_at = [number for number, line in enumerate(lines) if _ABORT.match(line)]
    if ended_at:
        return "\n".join(lines[ended_at[-1] : ended_at[-1] + 4])
    return next((line for line in reversed(lines) if line.strip()), "")


def _error_at(lines: Sequence[str], start: int, starts: Sequence[int]) -> OutputError | None:
    match = _TRACEBACK.match(lines[start])
    assert match is not None
    prefix = match["prefix"]
    for number in range(start + 1, len(lines)):
        line = lines[number].removeprefix(prefix)
        if line.startswith(" ") or not line:
            continue
        found = _EXCEPTION.match(line)
        if found is None:
            return None
        first = _first_of_chain(lines, start, starts)
        shown = [one.removeprefix(prefix) for one in lines[first : number + 1]][-LONGEST_TRACEBACK:]
        signs = "\n".join(one.removeprefix(prefix) for one in lines[number : number + 4])
        return OutputError(
            message=line.strip(), traceback="\n".join(shown), type=found["type"].rpartition(".")[2], signs=signs
        )
    return None


def _first_of_chain(lines: Sequence[str], start: int, starts: Sequence[int]) -> int:
    """The first traceback of those from which this one followed."""
    for earlier in sorted((one for one in starts if one < start), reverse=True):
        between = lines[earlier + 1 : start]
        is_original = "Original Traceback" in lines[start]
        if not is_original and not any(sentence in line for line in between for sentence in _CHAINED):
            break
        start = earlier
    return start
