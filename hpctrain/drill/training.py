"""The trainings of a drill, launched like a user's and watched through their run directories."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from hpctrain.errors import ExitCode, RunDirectoryError, RunFailedError, SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.metrics import read_metrics
from hpctrain.status.report import job_ids

TAIL_BYTES = 4096
"""Bytes to read at the end of metrics.jsonl to find its last step."""
SHOWN_LINES = 12
"""Number of lines of a training's output that an error quotes."""
STOP_S = 20.0
"""Seconds to wait for a training to end after Ctrl-C on the drill."""
ASK_EVERY_S = 1.0
"""Seconds between two queries to SLURM."""


class Training(ABC):
    """A run that a drill launches, and may interrupt.

    Args:
        directory: of the run; the training itself creates it.
        overrides: the overrides of the launch, without the run directory.
        config_dir: a folder with more configuration.

    Attributes:
        poll_s: seconds between two checks of the run.
        settle_s: seconds that the record of an attempt's end may take to cross a shared file system.
    """

    poll_s: float
    settle_s: float

    def __init__(self, directory: RunDirectory, overrides: Sequence[str], config_dir: str | None) -> None:
        self.directory = directory
        self._log = directory.path.with_name(f"{directory.path.name}.log")
        options = [] if config_dir is None else ["--config-dir", config_dir]
        self._command = [*options, *overrides, f"run_dir={directory.path}"]

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

    def steps(self, attempt: int) -> Iterator[int]:
        """Yield the last completed step of an attempt repeatedly until the attempt ends."""
        while not self.has_ended(attempt):
            step = self._last_step(attempt)
            if step is not None:
                yield step
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
        if not expected and "next" not in entry.extra:
            raise RunFailedError(f"attempt {attempt} of {self.directory.path}: {entry.reason}{self._end_of_log()}")
        return entry

    def _last_step(self, attempt: int) -> int | None:
        """The last step that an attempt is known to have completed; None before its first."""
        start = Ledger(self.directory).attempt(attempt).start_step
        records = list(read_metrics(self.directory.metrics, last_bytes=TAIL_BYTES))
        return records[-1].step if records and start is not None and records[-1].step > start else None

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start hpctrain, with its output in a log next to the run directory."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            # a separate session: Ctrl-C on the drill reaches it only through `stop`, and so only once
            return subprocess.Popen(
                [sys.executable, "-m", "hpctrain", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _raise_not_launched(self, code: int) -> None:
        if code == ExitCode.BAD_CONFIGURATION:
            raise RunDirectoryError(f"the training was refused{self._end_of_log()}")
        raise RunFailedError(f"the training could not be launched (exit code {code}){self._end_of_log()}")

    def _end_of_log(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        except OSError:
            return ""
        return "\n".join([f"; the end of {os.path.relpath(self._log)}:", *(f"  {line}" for line in lines)])


class LocalTraining(Training):
    """A process on this machine; interrupted by signals, and continued by `resume`."""

    # a step of a small model takes a millisecond, and the drill should interrupt close to the chosen step
    poll_s = 0.005
    settle_s = 0.0

    def __init__(self, directory: RunDirectory, overrides: Sequence[str], config_dir: str | None) -> None:
        super().__init__(directory, overrides, config_dir)
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """See `Training`."""
        self._process = self._start(*self._command)

    def has_ended(self, attempt: int) -> bool:
        """See `Training`."""
        assert self._process is not None
        if self._process.poll() is None:
            return False
        if self._process.returncode and Ledger(self.directory).last_claim() < attempt:
            self._raise_not_launched(self._process.returncode)
        return True

    def interrupt(self, signal_number: int) -> str:
        """See `Training`."""
        assert self._process is not None
        self._process.send_signal(signal_number)
        return signal.Signals(signal_number).name

    def resume(self) -> None:
        """See `Training`."""
        self._process = self._start("resume", str(self.directory.path))

    def stop(self) -> None:
        """See `Training`."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._process.kill()
            self._process.wait()


class SubmittedTraining(Training):
    """A SLURM job; interrupted by `scontrol requeue`, after which SLURM restarts it."""

    poll_s = 0.05
    settle_s = 15.0

    def __init__(self, directory: RunDirectory, overrides: Sequence[str], config_dir: str | None) -> None:
        super().__init__(directory, overrides, config_dir)
        self._slurm = Slurm()
        self._asked_at = float("-inf")
        self._job_is_over = False

    def launch(self) -> None:
        """See `Training`."""
        code = self._start(*self._command).wait()
        if code:
            self._raise_not_launched(code)

    def has_ended(self, attempt: int) -> bool:
        """See `Training`: the next attempt began, or the job is over and none will."""
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
        """See `Training`."""
        self._slurm.requeue(self._job_id)
        return "scontrol requeue"

    def resume(self) -> None:
        """See `Training`: SLURM has put the job back into the queue."""

    def stop(self) -> None:
        """See `Training`."""
        # before the submission there is no job
        for job_id in job_ids(self.directory)[-1:]:
            self._slurm.cancel(job_id)

    @property
    def _job_id(self) -> str:
        return job_ids(self.directory)[-1]
