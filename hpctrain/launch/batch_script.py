"""What the batch script runs: a supervisor, and signals that reach it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from hpctrain.config.stored import load
from hpctrain.launch.batch_log import log_to_stdout
from hpctrain.launch.supervisor import Supervisor
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.slurm import Slurm


def supervise(directory: RunDirectory, environ: Mapping[str, str]) -> int:
    """Run attempts of the run in this allocation, until the run ends or goes on elsewhere.

    Args:
        directory: the run.
        environ: the batch script's environment.

    Returns:
        The exit code for the batch script.
    """
    log_to_stdout()
    bell, rope = os.pipe()
    os.set_blocking(rope, False)
    # a handler in Python runs only once the main thread does, and that one may have just begun to wait for srun's words
    signal.set_wakeup_fd(rope, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # the ranks get these from SLURM themselves; whoever judges them must outlive them
        signal.signal(number, lambda *_: None)
    supervisor = Supervisor(directory, load(directory.config), environ, Slurm(environ))
    threading.Thread(target=supervisor.lookout.heed, args=(bell,), daemon=True).start()
    return supervisor.run()
