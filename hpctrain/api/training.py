"""Train in the calling program: as one rank, in its own process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.api.launching import program_command, refuse_dry_run
from hpctrain.cluster.environment import ClusterEnvironment, is_rank
from hpctrain.config.checks import check
from hpctrain.config.cluster import Slurm
from hpctrain.config.main_module import target_bound
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.config.run_config import RunConfig
from hpctrain.errors import ClusterEnvironmentError, ConfigError, HpctrainError, RunFailedError
from hpctrain.launch.launcher import begin
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.process import may_handle_signals
from hpctrain.run.reason import Reason
from hpctrain.status.run_status import RunStatus
from hpctrain.streams import missing_output_discarded
from hpctrain.worker.host_program import HostProgram

SUBMIT = "use hpctrain.submit(config)"

log = logging.getLogger("hpctrain.api")
_training = threading.Lock()


def train_here(config: Config, task: Callable[..., Any] | None = None, *, force: bool = False) -> RunDirectory:
    """Train a run in this process to its end, unless it has completed already; see `hpctrain.fit`.

    Args:
        config: of the run.
        task: makes the task that the configuration names; None: what it names does.
        force: continue an existing run although SLURM can't be asked whether its job is over.
    """
    refuse_dry_run(config)
    _require_one_rank(config)
    if not _training.acquire(blocking=False):
        raise HpctrainError("another run is training in this process, and only one can: wait for its end")
    try:
        with own_task(config, task), working_directory_importable():
            check(config)
            # what this process has imported already is what trains: its copy is for the record
            begun = begin(
                config,
                program_command(),
                force=force,
                code_now=True,
                code_required=False,
                report=log.info,
                warn=log.warning,
            )
            if isinstance(begun, RunStatus):
                return RunDirectory(begun.path)
            program = _train(begun.run)
    finally:
        _training.release()
    _pass_on(program, begun.run.directory)
    return begun.run.directory


@contextmanager
def own_task(config: RunConfig, task: Callable[..., Any] | None) -> Iterator[None]:
    """Inside the context, the configuration's task is made by ``task``; None: by what its path names."""
    target = str(config.task["_target_"]) if isinstance(config, Config) else ""
    with target_bound(target, task):
        yield


@contextmanager
def working_directory_importable() -> Iterator[None]:
    """Inside the context, Python imports modules from the working directory as well, as the command does."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _require_one_rank(config: Config) -> None:
    """Refuse what needs other processes.

    Raises:
        ConfigError: the configuration asks for a job, or several ranks.
        ClusterEnvironmentError: this process is one of several ranks.
    """
    if isinstance(config.cluster, Slurm):
        raise ConfigError("cluster", "slurm", "fit trains in this process, not in a job", SUBMIT)
    if (processes := resources_of(config).world_size) > 1:
        problem = "fit trains in this process, as one rank"
        raise ConfigError("cluster.processes_per_node", processes, problem, f"set it to 1, or {SUBMIT}")
    if is_rank(os.environ) and (size := ClusterEnvironment.from_environment(os.environ).world_size) > 1:
        text = f"fit trains in one process, and this is one of {size} ranks: start the program without srun or torchrun"
        raise ClusterEnvironmentError(text, {})


def _train(run: RunPlan) -> HostProgram:
    # torch, which nothing here needs before a run really trains
    from hpctrain.launch.local import launch_local
    from hpctrain.train.process_state import process_state_restored

    program, directory = HostProgram(), run.directory
    with process_state_restored(), _logging_restored(), missing_output_discarded():
        launch_local(run, program)
        if (last := Ledger(directory).attempts()[-1]).reason is not Reason.COMPLETED:
            log.info("%s at step %s; %s", last.reason, last.end_step, resume_hint(directory))
    return program


@contextmanager
def _logging_restored() -> Iterator[None]:
    logger = logging.getLogger("hpctrain")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    try:
        yield
    finally:
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.setLevel(level)


def resume_hint(directory: RunDirectory) -> str:
    """How a program resumes a run."""
    return f"to resume: hpctrain.Run({str(directory.path)!r}).resume()"


def _pass_on(program: HostProgram, directory: RunDirectory) -> None:
    """Give the program what the training got in its place: an error, or a signal to stop.

    Raises:
        BaseException: the error that ended the training.
        RunFailedError: the training was cancelled; or it was stopped by a signal that the program ignores, or that
            reached it outside of its main thread.
    """
    if program.error is not None:
        program.error.add_note(f"the run is in {directory.path}; {resume_hint(directory)}")
        raise program.error
    last = Ledger(directory).attempts()[-1]
    number = None if directory.is_cancelled(last.attempt) else program.stop.last_signal
    if number is not None and may_handle_signals():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as stop:
            stop.add_note(f"the training stopped and was saved; {resume_hint(directory)}")
            raise
    if last.reason not in (Reason.COMPLETED, Reason.PAUSED):
        raise RunFailedError(f"{directory.path}: {last.reason} at step {last.end_step}; {resume_hint(directory)}")
