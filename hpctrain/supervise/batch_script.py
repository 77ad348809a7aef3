"""What the batch script runs: a supervisor, and signals that reach it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from hpctrain.config.stored import load
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.batch_log import log_to_stdout
from hpctrain.supervise.supervisor import Supervisor


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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
    supervisor = Supervisor(directory, load(directory.config), environ, Slurm(environ))
    threading.Thread(target=supervisor.lookout.heed, args=(bell,), daemon=True).start()
    return supervisor.run()
