"""The callables that submitit pickles, and calls in the batch script.

submitit's own requeue, `checkpoint()` in a signal handler of rank zero, isn't used: it ignores SIGTERM, guesses the
cause from elapsed time, and reads only rank zero's result.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Executes the supervisor of a run.

    Args:
        run_dir: the run directory; everything else is read from it.
    """

    run_dir: str

    def __call__(self) -> None:
        """Replace this process with the supervisor; a signal that arrives meanwhile stays pending for it."""
        _execute("hpctrain.supervise", self.run_dir)


@dataclass(frozen=True, slots=True)
class SearchJob:
    """Executes one task of a search, which asks for its runs.

    Args:
        home: the sweep's folder; everything else is read from it.
    """

    home: str

    def __call__(self) -> None:
        """Replace this process, as `Job` does."""
        _execute("hpctrain.search", self.home)


@dataclass(frozen=True, slots=True)
class DoctorJob:
    """Executes the job of `python -m hpctrain doctor`.

    Args:
        folder: of the examination; everything else is read from it.
    """

    folder: str

    def __call__(self) -> None:
        """Replace this process, as `Job` does; no Python of the job imports from the working directory."""
        if sys.flags.safe_path:
            os.environ["PYTHONSAFEPATH"] = "1"
        _execute("hpctrain.doctor", self.folder)


def _execute(module: str, folder: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, folder])
