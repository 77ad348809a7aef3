"""What runs elsewhere, given nothing but a run directory: the batch script's callable, and a rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.train.stop import STOP_SIGNALS

if __name__ == "__main__":
    # no moment of a start is deaf, nor deadly: they wait until `StopFlag.install`
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

from hpctrain.config.root import Config
from hpctrain.config.stored import load
from hpctrain.run.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Job:
    """What submitit pickles and calls in the batch script.

    Args:
        run_dir: the run directory; everything else is read from it.
    """

    run_dir: str

    def __call__(self) -> None:
        """Run the attempt; ends the batch script with the attempt's exit code."""
        from hpctrain.launch.batch_script import supervise

        code = supervise(RunDirectory.existing(self.run_dir), os.environ)
        if code:
            sys.exit(code)


def run_rank(
    config: Config, directory: RunDirectory | None, make_directory: Callable[[], RunDirectory] | None = None
) -> int:
    """Be a rank of the run, to its end.

    Args:
        config: of the run.
        directory: the run directory, where it exists already.
        make_directory: makes it, on rank zero; the other ranks are told.

    Returns:
        An `ExitCode`.
    """
    os.environ.update(config.cluster.env)
    from hpctrain.train.rank import main  # the one door to the worker half: what is above it never imports torch

    return main(config, directory, make_directory)


def end_process(code: int) -> None:
    """Leave at once: neither threads of a broken process group nor a write must keep a process that is over."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_directory = RunDirectory.existing(sys.argv[1])
    end_process(run_rank(load(run_directory.config), run_directory))
