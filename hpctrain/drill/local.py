"""A drill's training on this machine."""

from __future__ import annotations

import contextlib
import signal
import subprocess

from hpctrain.drill.training import Training
from hpctrain.run.ledger import Ledger

PATIENCE_S = 20.0
"""Seconds that a training gets to end after Ctrl-C on the drill."""


class LocalTraining(Training):
    """Launched as a process of its own; interrupted by signals to it, and resumed by hand."""

    _process: subprocess.Popen[bytes]

    def begin(self) -> None:
        """See `Training`."""
        self._process = self.run(*self.command)

    def over(self, attempt: int) -> bool:
        """See `Training`."""
        if self._process.poll() is None:
            return False
        if self._process.returncode and Ledger(self.directory).last_claim() < attempt:
            self.refuse(self._process.returncode)
        return True

    def interrupt(self, number: int) -> str:
        """See `Training`."""
        self._process.send_signal(number)
        return signal.Signals(number).name

    def go_on(self) -> None:
        """See `Training`."""
        self._process = self.run("resume", str(self.directory.path))

    def abandon(self) -> None:
        """See `Training`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
            self._process.kill()
            self._process.wait()
