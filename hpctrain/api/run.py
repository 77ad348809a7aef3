"""`hpctrain.Run`, a run, whoever started it; `hpctrain.submit` and `hpctrain.fit`, which start one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, overload

from hpctrain.config.root import Config, ProgramConfig
from hpctrain.config.stored import load_for_model, load_run
from hpctrain.errors import ConfigError, HpctrainError, RunDirectoryError, RunFailedError
from hpctrain.run.checkpoints import CheckpointInfo, list_checkpoints
from hpctrain.run.config_change import trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import first_cause, read_exit_records
from hpctrain.status.follow import LOOK_EVERY_S, RunWatch
from hpctrain.status.metrics import read_metrics
from hpctrain.status.run_status import RunStatus, read_statuses
from hpctrain.status.runs import run_of
from hpctrain.status.state import RunState

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import nn

    from hpctrain.tasks.task import Task

LONGEST_PAUSE_S = 2.0
"""Seconds between two looks at a run that has been waited for for a while: a pipeline may wait for days."""

log = logging.getLogger("hpctrain.api")


class Run:
    """A run, however it was started: its state, metrics and weights; `cancel` and `resume` do what the commands do.

    Only `load_model` and `load_task` import torch.

    Args:
        path: the run directory, or its name in `runs_dir`.
        runs_dir: the folder that contains the runs.

    Raises:
        RunDirectoryError: no run matches, or several do.
    """

    def __init__(self, path: str | PathLike[str], *, runs_dir: str | PathLike[str] = "runs") -> None:
        self._directory = run_of(fspath(path), Path(runs_dir))

    @property
    def path(self) -> Path:
        """The run directory, absolute."""
        return self._directory.path

    @property
    def config(self) -> Config | ProgramConfig:
        """The stored configuration, with everything resolved.

        Raises:
            ConfigError: this version can't read it.
        """
        return load_run(self._directory.config)

    @property
    def state(self) -> RunState:
        """The state, such as ``running`` or ``completed``; see `status`."""
        return self.status().state

    def status(self) -> RunStatus:
        """Read the status, from the run directory and SLURM: state, step, last metrics, best score, attempts, jobs.

        Raises:
            RunDirectoryError: the run directory is gone.
        """
        (status,) = read_statuses([self._directory], log.warning)
        return self._if_there(status)

    def wait(self, timeout_s: float | None = None, *, check: bool = True) -> RunStatus:
        """Wait until the run is over, across all requeues; a run whose state is unknown isn't over.

        Args:
            timeout_s: the most seconds to wait; None for no bound. A run that has just ended counts as over then.
            check: raise an error unless the run has completed, or paused at `trainer.pause_at_step`; False returns the
                status in any case.

        Returns:
            The status at the end.

        Raises:
            RunFailedError: the run ended without completing; the message has the failed rank's error.
            RunDirectoryError: the run was never started, so that it would never end; or its directory is gone.
            TimeoutError: the run isn't over after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watch, pause_s = RunWatch(self._directory, warn=log.warning), LOOK_EVERY_S
        while not watch.is_over(status := self._if_there(watch.read_status())):
            if status.state is RunState.PREPARED:
                raise RunDirectoryError(f"{self.path} has not been started: call hpctrain.submit or resume() first")
            left_s = pause_s if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                if watch.may_be_over:
                    break
                raise TimeoutError(f"{self.path} is {status.described} after {timeout_s:g} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(LONGEST_PAUSE_S, 1.1 * pause_s)
        # a pipeline must not continue by mistake with the weights of a run that failed
        if check and status.state not in (RunState.COMPLETED, RunState.PAUSED):
            raise RunFailedError(self._describe_end(status))
        return status

    @overload
    def metrics(self, *, as_frame: Literal[False] = False) -> list[dict[str, float]]: ...

    @overload
    def metrics(self, *, as_frame: Literal[True]) -> pd.DataFrame: ...

    def metrics(self, *, as_frame: bool = False) -> list[dict[str, float]] | pd.DataFrame:
        """Read the logged metrics, oldest first.

        Args:
            as_frame: return a pandas.DataFrame, with a row per record and NaN for what it lacks.

        Returns:
            A mapping per record: ``step``, ``time`` (epoch seconds) and the metrics by name, such as ``train/loss``,
            NaN and infinities included.

        Raises:
            HpctrainError: `as_frame` without pandas.
        """
        records = []
        for logged in read_metrics(self._directory.metrics):
            when = {} if logged.time is None else {"time": logged.time}
            records.append({"step": logged.step, **when, **logged.values})
        if not as_frame:
            return records
        try:
            import pandas
        except ImportError as error:
            raise HpctrainError('metrics(as_frame=True) needs pandas: pip install "hpctrain[frames]"') from error
        return pandas.DataFrame.from_records(records)

    def checkpoints(self, *, verify: bool = False) -> list[CheckpointInfo]:
        """List the checkpoints, oldest first; none for a program, whose newest save is ``status().saved_path``.

        Args:
            verify: read every byte and compare checksums; otherwise names and sizes are compared.
        """
        return list_checkpoints(self._directory, verify=verify)

    def cancel(self) -> str:
        """Cancel the run: a queued job leaves the queue; a running one finishes its step, saves, and isn't requeued.

        It returns at once; `wait` waits for the end. `resume` continues the run.

        Returns:
            What was done, in words.

        Raises:
            HpctrainError: the run is queued or running, and can't be reached from here.
        """
        from hpctrain.launch.cancellation import cancel

        return cancel(self._directory, log.warning)

    def resume(
        self,
        overrides: Sequence[str] | Mapping[str, object] = (),
        *,
        config_dir: str | PurePath | None = None,
        task: Callable[..., Task] | None = None,
        force: bool = False,
        code: Literal["now"] | None = None,
    ) -> Run:
        """Continue the run from its newest intact checkpoint; a completed run needs a larger `trainer.max_steps`.

        A job is submitted, or processes are started on this machine, as by `hpctrain.submit`. If the run's task is a
        class of this program, the run trains in this process instead, as by `hpctrain.fit`, until its end.

        Args:
            overrides: keys to change, as for `hpctrain.compose`.
            config_dir: a folder with your own groups and options.
            task: what makes the task, as for `hpctrain.fit`.
            force: resume although SLURM can't confirm that the run's job has ended.
            code: ``now``: take the code as it is in the working directory now, in place of the run's own copy.

        Returns:
            This run.

        Raises:
            ConfigError: an override is invalid, or would change the weights.
            RunDirectoryError: the run is queued or running, or may be; or its code comes from another folder.
            HpctrainError: as `hpctrain.submit` or `hpctrain.fit`.
        """
        from hpctrain.api.composition import as_words, hydra_restored
        from hpctrain.api.launching import launch_detached, own_task, train_here
        from hpctrain.config.target import own_targets
        from hpctrain.launch.existing_run import changed_config, revert_failed_changes
        from hpctrain.launch.launch_code import require_original_folder

        if code not in (None, "now"):
            raise ConfigError("code", code, "is not known", 'write code="now", or leave it out')
        if code == "now":
            require_original_folder([self._directory], log.warning)
        revert_failed_changes([self._directory], log.info)
        folder = None if config_dir is None else str(config_dir)
        with hydra_restored(), own_task(self.config, task):
            config = changed_config(self._directory, as_words(overrides), folder, code_now=code == "now")
        if isinstance(config, Config) and (task is not None or own_targets(config)):
            train_here(config, task, force=force)
        else:
            launch_detached(config, force=force, code_now=code == "now")
        return self

    def load_task(self, *, task: Callable[..., Task] | None = None) -> Task:
        """Build the run's task; imports torch. Its data isn't prepared.

        Args:
            task: what makes the task, as for `hpctrain.fit`.

        Raises:
            ConfigError: its class can't be imported here.
        """
        config = load_for_model(trained_config(self._directory))
        from hpctrain.api.launching import own_task, working_directory_importable
        from hpctrain.config.target import require_own_targets
        from hpctrain.train.stored_model import load_task

        with own_task(config, task), working_directory_importable():
            require_own_targets(config)
            return load_task(config)

    def load_model(
        self,
        which: Literal["newest", "best"] | int = "newest",
        *,
        device: torch.device | str = "cpu",
        ema: bool | None = None,
        task: Callable[..., Task] | None = None,
    ) -> nn.Module:
        """Build the run's model as the run did, and load the weights of a checkpoint; imports torch.

        Classes come from the program's own modules, and not from the run's copy of the code, whose classes would be
        second ones of the same names.

        The checkpoint is verified first. The task's data isn't prepared: if its `build_model` needs that, pass
        ``task=lambda **keys: made``, where ``made`` is a task that you have prepared; ``keys`` are the keys of
        conf/task, which it ignores.

        Args:
            which: ``newest``, ``best`` (by the score of its evaluation; with a warning if the
                checkpoint of the best evaluation isn't on disk), or the step of a checkpoint.
            device: where to put the model.
            ema: load the moving average of the weights; None: if the run has one and evaluates it (`trainer.eval_ema`).
            task: what makes the task, as for `hpctrain.fit`.

        Returns:
            The model in evaluation mode, outside of DDP.

        Raises:
            CheckpointError: there is no such checkpoint, or it isn't intact.
            ConfigError: a class can't be imported here.
        """
        config = load_for_model(trained_config(self._directory))
        from hpctrain.api.launching import own_task, working_directory_importable
        from hpctrain.config.target import require_own_targets
        from hpctrain.train.stored_model import load_model

        with own_task(config, task), working_directory_importable():
            require_own_targets(config)
            return load_model(config, self._directory, which, device=device, averaged=ema)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Show the state in a notebook; `repr` doesn't, since SLURM would be asked."""
        status = self.status()
        total = "" if status.total_steps is None else f"/{status.total_steps}"
        step = f", step {status.step}{total}" if status.knows_step else ""
        best = "" if status.best is None else f", best {status.best.name} {status.best.value:.4g}"
        printer.text(f"{self!r}: {status.described}{step}{best}")

    def _if_there(self, status: RunStatus) -> RunStatus:
        if status.state is RunState.PREPARED:  # so does a run without any record look
            RunDirectory.existing(self.path)
        return status

    def _describe_end(self, status: RunStatus) -> str:
        cause = None
        if status.attempts and not status.unstarted:
            cause = first_cause(read_exit_records(self._directory.attempt(status.attempts[-1].attempt)))
        trace = f"\n{cause.traceback.rstrip()}" if cause is not None and cause.traceback else ""
        return f"{self.path} is {status.described}{status.at_step}{trace}"


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
    from hpctrain.api.launching import train_here
    from hpctrain.config.target import require_task

    _require_config(config, "fit")
    if task is not None:
        require_task(config, task)
    return Run(train_here(config, task).path)


def _require_config(config: object, call: str) -> None:
    if isinstance(config, Config):
        return
    if isinstance(config, type):
        text, kind, argument = config.__name__, "a class", f"task={config.__name__}"
    else:
        text, kind = str(config), f"an object of type {type(config).__name__}"
        argument = "{...}" if isinstance(config, Mapping) else "[...]" if isinstance(config, list | tuple) else "..."
    problem = f"expected a configuration, got {kind}"
    raise ConfigError("config", text, problem, f"write hpctrain.{call}(hpctrain.compose({argument}))")
