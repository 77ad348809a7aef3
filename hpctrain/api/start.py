"""`hpctrain.submit` and `hpctrain.fit`: train a configuration elsewhere, or in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hpctrain.api.run import Run
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.tasks.task import Task


def submit(config: Config) -> Run:
    """Launch a run, and return while it waits or trains.

    With `cluster=slurm`, a job is submitted, as by the command. With `cluster=local`, the ranks are started as
    processes of this machine, which continue when the program ends; their output goes into the run's ``logs``. If
    `config.run_dir` names a run that has stopped, it continues; a run that has completed is left as it is.

    Args:
        config: from `compose`. `cluster.wait` is for the command, and without effect here: call `Run.wait`.

    Raises:
        ConfigError: the configuration can't work, or names a class of this program, which other processes can't import.
        RunDirectoryError: the run is queued or running, or its directory can't be written.
        SchedulerError: SLURM isn't there, or refuses the job.
        RunFailedError: the processes on this machine ended at once.
    """
    from hpctrain.api.launching import launch_detached

    _require_config(config, "submit")
    return Run(launch_detached(config).path)


def fit(config: Config, *, task: Callable[..., Task] | None = None) -> Run:
    """Train a run in this process, as one rank, and return at its end.

    Made for notebooks and small programs. It may be called repeatedly: what training changes in the process (random
    states, torch's settings, logging, signal handlers, the environment) is restored. If `config.run_dir` names a run
    that has stopped, it continues exactly where it was saved.

    After Ctrl-C or another signal to stop, the run finishes its step and is saved; then the program gets the signal:
    Ctrl-C raises KeyboardInterrupt. A second Ctrl-C raises it at once, without a save. `Run.cancel` also stops the run,
    from another thread or process. In another thread than the main one, no signal reaches the run.

    Args:
        config: from `compose`, with `cluster=local` and one rank.
        task: the class, or function, with which the configuration was composed. It is needed only for a function
            without a name of its own, such as a lambda: others are found by the path in the configuration.

    Returns:
        The run, which has completed.

    Raises:
        ConfigError: the configuration can't work, or asks for a job or several ranks.
        RunDirectoryError: the run is running, or its directory can't be written.
        Exception: the error that ended the training, as the task or hpctrain raised it.
        RunFailedError: the run was cancelled, or stopped in another way.
    """
    from hpctrain.api.training import train_here
    from hpctrain.config.main_module import require_task

    _require_config(config, "fit")
    if task is not None:
        require_task(config, task)
    return Run(train_here(config, task).path)


def _require_config(config: object, call: str) -> None:
    if isinstance(config, Config):
        return
    if isinstance(config, type):
        shown, found, given = config.__name__, "a class", f"task={config.__name__}"
    else:
        shown, found = str(config), f"an object of type {type(config).__name__}"
        given = "{...}" if isinstance(config, Mapping) else "[...]" if isinstance(config, list | tuple) else "..."
    problem = f"expected a configuration, got {found}"
    raise ConfigError("config", shown, problem, f"write hpctrain.{call}(hpctrain.compose({given}))")
