"""One training of a drill: launched as its user would, and watched through its run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.errors import ExitCode, RunDirectoryError, RunFailedError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason

TAIL_BYTES = 4096
SHOWN_LINES = 12


class Training(ABC):
    """A run in a process of its own, or in a job.

    Args:
        directory: of the run; made by the training itself.
        overrides: what it is launched with, without the run directory.
        config_dir: more configuration.

    Attributes:
        poll_s: seconds between two looks at the run.
        settle_s: seconds that an ended attempt's last words may take to cross a shared file system.
    """

    poll_s = 0.005
    settle_s = 0.0

    def __init__(self, directory: RunDirectory, overrides: Sequence[str], config_dir: str | None) -> None:
        self.directory = directory
        self.log = directory.path.with_name(f"{directory.path.name}.log")
        options = [] if config_dir is None else ["--config-dir", config_dir]
        self.command = [*options, *overrides, f"run_dir={directory.path}"]

    @abstractmethod
    def begin(self) -> None:
        """Launch it for the first time."""

    @abstractmethod
    def over(self, attempt: int) -> bool:
        """Whether an attempt has ended."""

    @abstractmethod
    def interrupt(self, number: int) -> str:
        """Interrupt the attempt that runs, by the signal of this number if by one; says how."""

    @abstractmethod
    def go_on(self) -> None:
        """See to it that there will be another attempt."""

    @abstractmethod
    def abandon(self) -> None:
        """End it, since the drill itself is interrupted."""

    def wait(self, attempt: int, on_step: Callable[[int], None], until: int | None = None) -> bool:
        """Wait for the end of an attempt, or until it has done a step.

        Args:
            attempt: its number.
            on_step: told the last completed step now and then.
            until: the step; None waits for the end.

        Returns:
            Whether it still runs.
        """
        while not self.over(attempt):
            step = self.step(attempt)
            if step is not None:
                on_step(step)
                if until is not None and step >= until:
                    return True
            time.sleep(self.poll_s)
        return False

    def step(self, attempt: int) -> int | None:
        """The last step that an attempt is known to have completed; None before its first."""
        entry = self.entry(attempt)
        if entry is None or entry.start_step is None:
            return None
        step = last_step(self.directory.metrics)
        return step if step > entry.start_step else None

    def entry(self, attempt: int) -> Attempt | None:
        """What the ledger has of an attempt."""
        found = Ledger(self.directory).attempts()
        return next((entry for entry in found if entry.attempt == attempt), None)

    def ended(self, attempt: int) -> Attempt:
        """An attempt that is over, as the ledger has it.

        Raises:
            RunFailedError: it ended in a way after which the run doesn't go on.
        """
        deadline = time.monotonic() + self.settle_s
        entry = self.entry(attempt)
        while (entry is None or entry.open) and time.monotonic() < deadline:
            time.sleep(0.1)
            entry = self.entry(attempt)
        if entry is None or entry.reason is None:
            raise RunFailedError(f"attempt {attempt} of {self.directory.path} left no end{self._last_words()}")
        # a local run has no supervisor: the drill itself resumes it after its ranks were killed
        expected = entry.reason.meaning.resumable or entry.reason in (Reason.COMPLETED, Reason.INFRASTRUCTURE)
        if not expected and "next" not in entry.extra:
            raise RunFailedError(
                f"attempt {attempt} of {self.directory.path} ended as {entry.reason}{self._last_words()}"
            )
        return entry

    def run(self, *words: str) -> subprocess.Popen[bytes]:
        """Start hpctrain, its output going to the log beside the run."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # a session of its own: Ctrl-C on the drill reaches it in order, through `abandon`
            return subprocess.Popen(
                [sys.executable, "-m", "hpctrain", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def refuse(self, code: int) -> None:
        """Raise for a command that launched nothing.

        Raises:
            RunDirectoryError: by a word about what was asked for.
            RunFailedError: by something else.
        """
        if code == ExitCode.BAD_CONFIGURATION:
            raise RunDirectoryError(f"the training was refused{self._last_words()}")
        raise RunFailedError(f"the training could not be launched (exit code {code}){self._last_words()}")

    def _last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        except OSError:
            return ""
        return "\n".join([f"; the end of {os.path.relpath(self.log)}:", *(f"  {line}" for line in lines)])


def last_step(metrics: Path) -> int:
    """The newest step in metrics.jsonl; 0 where there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
    return 0
