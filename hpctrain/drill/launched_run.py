"""The runs of a drill, launched like a user's and watched through their run directories."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hpctrain.attempt.outcome import resume_advice
from hpctrain.errors import ExitCode, RunDirectoryError, RunFailedError, SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.process import end_with_parent
from hpctrain.run.reason import Reason
from hpctrain.run.saves import last_change, read_saves
from hpctrain.run.times import TimesRecord
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.jobs import job_ids
from hpctrain.status.metrics import read_metrics

TAIL_BYTES = 4096
"""Bytes to read at the end of metrics.jsonl to find its last step."""
SHOWN_LINES = 12
"""Number of lines of a launch's output that an error quotes."""
STOP_S = 20.0
"""Seconds to wait for a run to end after Ctrl-C on the drill."""
ASK_EVERY_S = 1.0
"""Seconds between two queries to SLURM."""


@dataclass(frozen=True, slots=True)
class AttemptProgress:
    """The progress of a running attempt.

    Attributes:
        step: the last step that it is known to have completed; None before its first.
        running_s: seconds since its start was recorded.
        first_save_s: of these, those before its first save; None before it.
    """

    step: int | None
    running_s: float
    first_save_s: float | None = None


class LaunchedRun(ABC):
    """A run that a drill launches, and may interrupt.

    Args:
        directory: of the run; the launch creates it.
        words: the command line after `python -m hpctrain`.

    Attributes:
        poll_s: seconds between two checks of the run.
        settle_s: seconds that the record of an attempt's end may take to cross a shared file system.
        latest: the progress that was seen last.
    """

    poll_s: float
    settle_s: float
    latest: AttemptProgress = AttemptProgress(None, 0.0)

    def __init__(self, directory: RunDirectory, words: Sequence[str]) -> None:
        self.directory = directory
        self._log = directory.path.with_name(f"{directory.path.name}.log")
        self._words = list(words)

    @abstractmethod
    def launch(self) -> None:
        """Launch the run for the first time."""

    @abstractmethod
    def has_ended(self, attempt: int) -> bool:
        """Whether an attempt is over."""

    @abstractmethod
    def interrupt(self, signal_number: int) -> str:
        """Interrupt the running attempt, by this signal if signals are used; describe how it was done."""

    @abstractmethod
    def resume(self) -> None:
        """Start the next attempt, unless SLURM starts it."""

    @abstractmethod
    def stop(self) -> None:
        """End the run, because the drill itself is interrupted."""

    def progress(self, attempt: int) -> Iterator[AttemptProgress]:
        """Yield how far an attempt is, repeatedly, from its start to its end."""
        began: float | None = None
        saved_before: tuple[int, float] | None = None
        first_save_s: float | None = None
        while not self.has_ended(attempt):
            entry = Ledger(self.directory).attempt(attempt)
            if entry.start_step is not None:
                now = time.monotonic()
                began = now if began is None else began
                running_s = now - began
                if first_save_s is None:
                    saved = saves_of(self.directory)
                    saved_before = saved_before or saved
                    first_save_s = running_s if saved != saved_before else None
                self.latest = AttemptProgress(self._last_step(entry, entry.start_step), running_s, first_save_s)
                yield self.latest
            time.sleep(self.poll_s)

    def end_of(self, attempt: int) -> Attempt:
        """Wait for the end of an attempt, and return the ledger's record of it.

        Raises:
            RunFailedError: the run can't be resumed after such an end.
        """
        while not self.has_ended(attempt):
            time.sleep(self.poll_s)
        deadline = time.monotonic() + self.settle_s
        ledger = Ledger(self.directory)
        while (entry := ledger.attempt(attempt)).open and time.monotonic() < deadline:
            time.sleep(0.1)
        if entry.reason is None:
            raise RunFailedError(f"attempt {attempt} of {self.directory.path} recorded no end{self._end_of_log()}")
        # a local run has no supervisor, so the drill resumes it after its ranks were killed
        expected = entry.reason.meaning.resumable or entry.reason in (Reason.COMPLETED, Reason.INFRASTRUCTURE)
        if not expected and not entry.continues:
            # to resume this run alone would prove nothing
            quoted = self._end_of_log(without=resume_advice(self.directory, entry.reason))
            raise RunFailedError(f"attempt {attempt} of {self.directory.path}: {entry.reason}{quoted}")
        return entry

    def _last_step(self, entry: Attempt, start_step: int) -> int | None:
        """The last step that an attempt is known to have completed; None before its first."""
        # a program may report its steps without metrics
        last_step = TimesRecord.read(self.directory.attempt(entry.attempt)).last_step or 0
        for record in read_metrics(self.directory.metrics, last_bytes=TAIL_BYTES):
            # an earlier attempt may have come further than its last save
            if record.time is None or entry.start_time is None or record.time >= entry.start_time:
                last_step = max(last_step, record.step)
        return last_step if last_step > start_step else None

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start hpctrain, with its output in a log next to the run directory."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with RunDirectory(self._log.parent).permissions():
            log = self._log.open("ab")
        with log:
            # a separate session: Ctrl-C on the drill reaches it only through `stop`, and so only once
            return subprocess.Popen(
                [sys.executable, "-m", "hpctrain", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),  # noqa: PLW1509 - this process has no other threads
            )

    def _raise_not_launched(self, code: int) -> None:
        if code == ExitCode.BAD_CONFIGURATION:
            raise RunDirectoryError(f"the run was refused{self._end_of_log()}")
        raise RunFailedError(f"the run could not be launched (exit code {code}){self._end_of_log()}")

    def _end_of_log(self, without: str = "") -> str:
        try:
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line != without]
        except OSError:
            return ""
        lines = lines[-SHOWN_LINES:]
        return "\n".join([f"; the end of {os.path.relpath(self._log)}:", *(f"  {line}" for line in lines)])


def saves_of(directory: RunDirectory) -> tuple[int, float]:
    """Return the number of saves that a program reported, and when its checkpoints changed last (0 without any)."""
    change_times = (last_change(path) for path in directory.checkpoints.iterdir())
    return len(read_saves(directory)), max(change_times, default=0.0)


class LocalRun(LaunchedRun):
    """A process on this machine; interrupted by signals, and continued by `resume`."""

    # a step of a small model takes a millisecond, and the drill should interrupt close to the chosen step
    poll_s = 0.005
    settle_s = 0.0

    def __init__(self, directory: RunDirectory, words: Sequence[str]) -> None:
        super().__init__(directory, words)
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """See `LaunchedRun`."""
        self._process = self._start(*self._words)

    def has_ended(self, attempt: int) -> bool:
        """See `LaunchedRun`."""
        assert self._process is not None
        if self._process.poll() is None:
            return False
        if self._process.returncode and Ledger(self.directory).last_claim() < attempt:
            self._raise_not_launched(self._process.returncode)
        return True

    def interrupt(self, signal_number: int) -> str:
        """See `LaunchedRun`."""
        assert self._process is not None
        self._process.send_signal(signal_number)
        return signal.Signals(signal_number).name

    def resume(self) -> None:
        """See `LaunchedRun`."""
        self._process = self._start("resume", str(self.directory.path))

    def stop(self) -> None:
        """See `LaunchedRun`."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
            finally:  # also after another Ctrl-C; its ranks die with it
                self._process.kill()
                self._process.wait()


class SubmittedRun(LaunchedRun):
    """A SLURM job; interrupted by `scontrol requeue`, after which SLURM restarts it."""

    poll_s = 0.05
    settle_s = 15.0

    def __init__(self, directory: RunDirectory, words: Sequence[str]) -> None:
        super().__init__(directory, words)
        self._slurm = Slurm()
        self._asked_at = float("-inf")
        self._job_is_over = False
        self._launching: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """See `LaunchedRun`."""
        self._launching = self._start(*self._words)
        code = self._launching.wait()
        if code:
            self._raise_not_launched(code)

    def has_ended(self, attempt: int) -> bool:
        """See `LaunchedRun`: the next attempt began, or the job is over and none will."""
        if Ledger(self.directory).last_claim() > attempt:
            return True
        now = time.monotonic()
        if now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            # a busy controller is queried again
            with contextlib.suppress(SchedulerError):
                record = self._slurm.find([self._job_id])[self._job_id]
                self._job_is_over = record is None or record.state.is_finished
        return self._job_is_over

    def interrupt(self, signal_number: int) -> str:  # noqa: ARG002 - SLURM chooses the signal
        """See `LaunchedRun`."""
        self._slurm.requeue(self._job_id)
        return "scontrol requeue"

    def resume(self) -> None:
        """See `LaunchedRun`: SLURM has put the job back into the queue."""

    def stop(self) -> None:
        """See `LaunchedRun`."""
        # before the submission there is no job, and in the middle of it, its id isn't recorded yet
        if self._launching is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launching.wait(STOP_S)
        for job_id in job_ids(self.directory)[-1:]:
            self._slurm.cancel(job_id)

    @property
    def _job_id(self) -> str:
        return job_ids(self.directory)[-1]
