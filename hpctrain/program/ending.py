"""The meaning of a program's end: a pure function of its exit code, its reports and its output."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from hpctrain.attempt.peers import MACHINE, PEER_LOST, TIMED_OUT
from hpctrain.config.run import ProgramRun
from hpctrain.phrases import signal_name
from hpctrain.program.output import OutputError, find_errors
from hpctrain.run.reason import Reason

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How a program ended.

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
        return f"exit code {self.code}" if self.code >= 0 else f"killed by {signal_name(-self.code)}"


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What the end of a program means: fields of its exit record."""

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
    if end.done:
        return ProgramOutcome(Reason.COMPLETED)
    if end.stop_signal is not None or end.stopping:
        return _after_stop(end, output, run)
    if end.code == 0:
        return ProgramOutcome(Reason.COMPLETED)
    if end.out_of_memory and end.killed_by == signal.SIGKILL:
        return ProgramOutcome(Reason.OUT_OF_MEMORY, f"{_killed(end)}: the kernel was out of memory")
    return _failure(end, output, run, world_size)


def _after_stop(end: ProgramEnd, output: str, run: ProgramRun) -> ProgramOutcome:
    if run.on_stop == "exit_code":
        return ProgramOutcome(Reason.COMPLETED) if end.code == 0 else _described(Reason.FAILED, end, _last(output))
    message = "" if end.code == 0 else f"after the stop: {end.text}"
    by_itself = end.stop_signal is None and end.stopping == DEADLINE
    return ProgramOutcome(Reason.TIME_LIMIT if by_itself else Reason.INTERRUPTED, message)


def _failure(end: ProgramEnd, output: str, run: ProgramRun, world_size: int) -> ProgramOutcome:
    errors = find_errors(output)
    found = [(error, *_classified(error, world_size)) for error in errors]
    if run.processes == "node":
        # the output of several ranks: those that only lost a peer may be the last
        found = [one for one in found if not one[2]][-1:] or found
    error, reason, blames_peer = found[-1] if found else (None, Reason.FAILED, False)
    if end.killed_by is not None and reason is Reason.FAILED:
        reason = Reason.INFRASTRUCTURE
    return _described(reason, end, error, blames_peer=blames_peer)


def _classified(error: OutputError, world_size: int) -> tuple[Reason, bool]:
    """The reason to which an error points, and whether it only shows that another rank was lost."""
    if error.type and error.type not in _OF_TORCH:
        return Reason.FAILED, False
    if MACHINE.search(error.signs):
        return Reason.INFRASTRUCTURE, False
    if error.type not in _OF_BACKEND and not _BACKEND.search(error.signs):
        is_bare = error.type and _BARE.fullmatch(error.message)
        return (Reason.INFRASTRUCTURE, True) if is_bare and world_size > 1 else (Reason.FAILED, False)
    if world_size > 1 and TIMED_OUT.search(error.signs):
        return Reason.HANG, True
    if world_size > 1 and PEER_LOST.search(error.signs):
        return Reason.INFRASTRUCTURE, True
    return Reason.FAILED, False


def _described(
    reason: Reason, end: ProgramEnd, error: OutputError | None, *, blames_peer: bool = False
) -> ProgramOutcome:
    how = end.text if end.killed_by is None else _killed(end)
    if error is None:
        return ProgramOutcome(reason, f"{how}, without any output", blames_peer=blames_peer)
    if end.killed_by in (signal.SIGKILL, signal.SIGTERM) and not blames_peer:
        return ProgramOutcome(reason, how, error.traceback)  # from outside: what it printed last isn't the cause
    return ProgramOutcome(reason, f"{how}: {error.message}", error.traceback, blames_peer)


def _killed(end: ProgramEnd) -> str:
    assert end.killed_by is not None
    name = f"killed by {signal_name(end.killed_by)}"
    return name if end.code < 0 else f"{name} (exit code {end.code})"


def _last(output: str) -> OutputError | None:
    return next(reversed(find_errors(output)), None)
