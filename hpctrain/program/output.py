"""The output of a program, and the meaning of its end: by its exit code, its reports and its output."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.run import ProgramRun
from hpctrain.phrases import signal_name
from hpctrain.rank.classification import Classification, classify_text
from hpctrain.run.reason import Reason
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
_TRACEBACK = re.compile(r"(?P<prefix>(\[rank\d+\]: ?)?)(Original )?Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(: (?P<text>.*))?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_ABORT = re.compile(r"(\[rank\d+\]: ?)?terminate called after throwing an instance of '(c10|gloo)::")
"""torch's backends end a process so, such as NCCL's watchdog; frames of C++ follow."""
_WRAPPER = "ChildFailedError"
"""torchrun's own error when one of its processes has failed."""
SHELL_CODES = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""Signals of which a process probably died if a shell, or a program that runs others, exits with 128 + its number."""
DEADLINE = "deadline"
"""The cause that a session reports if it stops because the job's time is nearly over."""
_OF_BACKEND = ("DistBackendError", "DistError", "DistNetworkError", "DistStoreError")
_OF_TORCH = ("RuntimeError", "AcceleratorError", *_OF_BACKEND)
"""Types of torch's errors about other ranks; other types with the same text are the program's own."""
_BACKEND = re.compile(
    r"\bgloo\b|NCCL|TCPStore|c10d|c10::Dist|process ?group|Dist(Backend|Network|Store)Error|monitoredBarrier"
    r"|Timeout waiting for key|wait timeout after \d+ ?ms|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
"""Signs that a message comes from torch's backends; a program's own errors say "timed out" and "broken pipe", too."""
_BARE = re.compile(r"RuntimeError: (Connection reset by peer|Broken pipe|Socket Timeout|Connection closed by peer.*)")
"""Whole messages of the backends of torch before 2.2."""


class ProgramOutput:
    """The output of a program; if it goes to a file, a thread of this process writes it.

    If the program wrote to the file itself, a full disk would make its next print fail, and the lines that are lost
    couldn't be counted.

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
    # the program may have left its last line unfinished
    mark = re.compile(f"(?:{_STAMP})?{re.escape(end_mark)}")
    while True:
        try:
            with log.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(start if start <= size else 0, size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        marks = [*mark.finditer(text)]
        if marks or time.monotonic() > deadline:
            text = text[: marks[-1].start()] if marks else text
            return _OWN_LINE.sub(lambda line: "" if line[1] is not None else "\n", text)
        time.sleep(0.02)


def find_errors(text: str) -> list[OutputError]:
    """Return the errors at the end of an output, the last one last; at least one if there is any output.

    Args:
        text: the end of the output.
    """
    # a progress bar returns to the beginning of its line
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)][-MOST_TRACEBACKS:]
    errors = [error for start in starts if (error := _error_at(lines, start, starts)) is not None]
    errors = [error for error in errors if error.type != _WRAPPER]
    if errors:
        return errors
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
        exception = _EXCEPTION.match(line)
        if exception is None:
            return None
        first = _first_of_chain(lines, start, starts)
        rows = [row.removeprefix(prefix) for row in lines[first : number + 1]][-LONGEST_TRACEBACK:]
        signs = "\n".join(row.removeprefix(prefix) for row in lines[number : number + 4])
        return OutputError(
            message=line.strip(), traceback="\n".join(rows), type=exception["type"].rpartition(".")[2], signs=signs
        )
    return None


def _first_of_chain(lines: Sequence[str], start: int, starts: Sequence[int]) -> int:
    """The first traceback of those from which this one followed."""
    for earlier in sorted((number for number in starts if number < start), reverse=True):
        between = lines[earlier + 1 : start]
        is_original = "Original Traceback" in lines[start]
        if not is_original and not any(sentence in line for line in between for sentence in _CHAINED):
            break
        start = earlier
    return start


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """End of a program: its exit code, and what was asked of it or reported by it before.

    Attributes:
        code: its exit code; the negative number of a signal that killed it.
        stop_signal: the signal that asked this rank to stop; None without one.
        stopping: why the program stopped by itself, as its session reported; empty if it didn't.
        done: whether it called `session.done()`.
        cut_short: whether a second Ctrl-C ended it.
        out_of_memory: whether the kernel killed one of its processes for its memory.
    """

    code: int
    stop_signal: signal.Signals | None = None
    stopping: str = ""
    done: bool = False
    cut_short: bool = False
    out_of_memory: bool = False

    @property
    def killed_by(self) -> int | None:
        """Number of the signal of which it died; None if it exited by itself."""
        if self.code < 0:
            return -self.code
        return next((number for number in SHELL_CODES if self.code == 128 + number), None)

    @property
    def text(self) -> str:
        """The exit code, or the signal."""
        if self.killed_by is None:
            return f"exit code {self.code}"
        name = f"killed by {signal_name(self.killed_by)}"
        return name if self.code < 0 else f"{name} (exit code {self.code})"


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """Meaning of a program's end: fields of its exit record."""

    reason: Reason
    message: str = ""
    traceback: str = ""
    blames_peer: bool = False


def outcome_of(end: ProgramEnd, output: str, run: ProgramRun, world_size: int) -> ProgramOutcome:
    """Return what the end of a program means.

    Args:
        end: of it.
        output: the end of what it printed.
        run: how it is started and stopped.
        world_size: number of ranks, also of those that it starts by itself.
    """
    if end.cut_short:
        return ProgramOutcome(Reason.INTERRUPTED, "ended at once by a second Ctrl-C, without a save")
    was_stopped = end.stop_signal is not None or end.stopping != ""
    # after a stop, 0 doesn't mean that the run is complete: a program that has saved usually exits so
    code_counts = not was_stopped or run.on_stop == "exit_code"
    if end.done or (end.code == 0 and code_counts):
        return ProgramOutcome(Reason.COMPLETED)
    if not code_counts:
        by_itself = end.stop_signal is None and end.stopping == DEADLINE
        message = "" if end.code == 0 else f"after the stop: {end.text}"
        return ProgramOutcome(Reason.TIME_LIMIT if by_itself else Reason.INTERRUPTED, message)
    if was_stopped:
        return _describe_outcome(Reason.FAILED, end, next(reversed(find_errors(output)), None))
    if end.out_of_memory and end.killed_by == signal.SIGKILL:
        return ProgramOutcome(Reason.OUT_OF_MEMORY, f"{end.text}: the kernel was out of memory")
    return _failure_outcome(end, output, run, world_size)


def _failure_outcome(end: ProgramEnd, output: str, run: ProgramRun, world_size: int) -> ProgramOutcome:
    causes = [(error, _classify(error, world_size)) for error in find_errors(output)]
    if run.processes == "node":
        # the output of several ranks: those that only lost a peer may be the last
        causes = [cause for cause in causes if not cause[1].blames_peer][-1:] or causes
    error, meaning = causes[-1] if causes else (None, Classification(Reason.FAILED))
    reason = meaning.reason
    if end.killed_by is not None and reason is Reason.FAILED:
        reason = Reason.INFRASTRUCTURE
    return _describe_outcome(reason, end, error, blames_peer=meaning.blames_peer)


def _classify(error: OutputError, world_size: int) -> Classification:
    if error.type and error.type not in _OF_TORCH:
        return Classification(Reason.FAILED)
    classification = classify_text(error.signs, world_size)
    of_machine = classification.reason is Reason.INFRASTRUCTURE and not classification.blames_peer
    if of_machine or error.type in _OF_BACKEND or _BACKEND.search(error.signs):
        return classification
    if error.type and _BARE.fullmatch(error.message) and world_size > 1:
        return Classification(Reason.INFRASTRUCTURE, blames_peer=True)
    return Classification(Reason.FAILED)


def _describe_outcome(
    reason: Reason, end: ProgramEnd, error: OutputError | None, *, blames_peer: bool = False
) -> ProgramOutcome:
    if error is None:
        return ProgramOutcome(reason, f"{end.text}, without any output", blames_peer=blames_peer)
    if end.killed_by in (signal.SIGKILL, signal.SIGTERM) and not blames_peer:
        return ProgramOutcome(reason, end.text, error.traceback)  # from outside: what it printed last isn't the cause
    return ProgramOutcome(reason, f"{end.text}: {error.message}", error.traceback, blames_peer)
