"""Launch a run from a program: as a job or in processes that outlive it, or in the program's own process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.environment import ClusterEnvironment, is_rank
from hpctrain.config.checks import check
from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config, RunConfig
from hpctrain.config.target import refuse_own_targets, target_bound
from hpctrain.errors import ClusterEnvironmentError, ConfigError, HpctrainError, RunFailedError
from hpctrain.launch.launch_code import importing_code_of
from hpctrain.launch.launcher import prepare_launch
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import RunDirectory
from hpctrain.run.growing_file import GrowingFile
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Ledger
from hpctrain.run.process import environ_replaced, may_handle_signals
from hpctrain.run.reason import Reason
from hpctrain.status.run_status import RunStatus
from hpctrain.streams import missing_output_discarded

if TYPE_CHECKING:
    from hpctrain.rank.rank import HostProgram

BEGIN_S = 120.0
"""Seconds that the launcher may take until it claims an attempt, on a busy machine."""
LOOK_EVERY_S = 0.05
SUBMIT = "use hpctrain.submit(config)"

log = logging.getLogger("hpctrain.api")
_prepare_launch = partial(prepare_launch, report=log.info, warn=log.warning)
_training = threading.Lock()
"""Held while a run trains here: seeds, signal handlers and torch's settings belong to the whole process."""


def launch_detached(config: RunConfig, *, force: bool = False, code_now: bool = False) -> RunDirectory:
    """Launch a run, unless it has completed already; return once its job is submitted, or its attempt has begun.

    Args:
        config: of the run.
        force: launch an existing run although SLURM can't be asked whether its job is over.
        code_now: take today's code for an existing run, too.

    Raises:
        HpctrainError: as `begin`; RunFailedError if the launcher on this machine ended at once.
    """
    refuse_dry_run(config)
    with importing_code_of(config.run_dir, now=code_now):
        check(config)
    if isinstance(config, Config):
        refuse_own_targets(config, "is defined in this program, which other processes can't import")
    with _imports_passed_on():
        prepared = _prepare_launch(config, program_command(), force=force, code_now=code_now)
        if isinstance(prepared, RunStatus):
            return RunDirectory(prepared.path)
        if prepared.job_id is None:
            _start_launcher(prepared.run)
    return prepared.run.directory


def refuse_dry_run(config: RunConfig) -> None:
    """Refuse a configuration that only shows what would be launched.

    Raises:
        ConfigError: it has cluster.dry_run.
    """
    if config.cluster.dry_run:
        raise ConfigError("cluster.dry_run", "true", "launches nothing", "leave it out, or use the command line")


def program_command() -> list[str]:
    """The command line of this program, for the manifest."""
    return [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]] if sys.orig_argv else ["python"]


@contextmanager
def _imports_passed_on() -> Iterator[None]:
    """Let processes that are started in the context import what lies next to the program's script, as it can."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = str(Path(script).resolve().parent) if script else ""
    # Python put it there because it executes a script; a notebook's kernel has the working directory in its place
    if not folder or not sys.path or str(Path(sys.path[0]).resolve()) != folder or Path.cwd() == Path(folder):
        yield
        return
    places = [*filter(None, [os.environ.get("PYTHONPATH")]), folder]
    with environ_replaced({**os.environ, "PYTHONPATH": os.pathsep.join(places)}):
        yield


def _start_launcher(run: RunPlan) -> None:
    """Start `python -m hpctrain resume RUN`, and return once it has claimed an attempt.

    Raises:
        RunFailedError: it ended before that.
    """
    directory, ledger = run.directory, Ledger(run.directory)
    before = ledger.last_claim()
    with directory.permissions(), directory.launcher_log.open("ab") as output:
        printed_before = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "hpctrain", "resume", str(directory.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives the program, and Ctrl-C is meant for the program
        )
    # it leaves no zombie as long as the program lives
    threading.Thread(target=process.wait, name="hpctrain-launcher", daemon=True).start()
    deadline = time.monotonic() + BEGIN_S
    # with its owner's record, so that nothing takes the run for one that has stopped
    while (claim := ledger.last_claim()) == before or not _is_owned_by(process, directory.attempt(claim)):
        if process.poll() is not None or time.monotonic() > deadline:
            why = f"ended with exit code {process.returncode}" if process.returncode is not None else "hangs"
            process.kill()
            log_text = GrowingFile(directory.launcher_log, printed_before).read().data.decode(errors="replace")
            lines = log_text.strip().splitlines()
            line = lines[-1] if lines else "it printed nothing"
            where = directory.launcher_log
            raise RunFailedError(f"{directory.path}: its launcher {why} before an attempt began: {line}; see {where}")
        time.sleep(LOOK_EVERY_S)


def _is_owned_by(process: subprocess.Popen[bytes], claim: Path) -> bool:
    """Whether the launcher made the claim, and not another one that began at the same moment."""
    owner = Owner.read(claim)
    if owner is None or not owner.is_here:
        return False
    if owner.pid == process.pid:
        return True
    try:
        # the interpreter may be a script that starts Python as its child, in the session that was made for it
        return os.getsid(owner.pid) == process.pid
    except OSError:
        return False


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
            prepared = _prepare_launch(config, program_command(), force=force, code_now=True, code_required=False)
            if isinstance(prepared, RunStatus):
                return RunDirectory(prepared.path)
            program = _train(prepared.run)
    finally:
        _training.release()
    _pass_on(program, prepared.run.directory)
    return prepared.run.directory


@contextmanager
def own_task(config: RunConfig, task: Callable[..., Any] | None) -> Iterator[None]:
    """Context manager in which ``task`` makes the configuration's task; None: what its path names does."""
    target = str(config.task["_target_"]) if isinstance(config, Config) else ""
    with target_bound(target, task):
        yield


@contextmanager
def working_directory_importable() -> Iterator[None]:
    """Context manager in which Python also imports modules from the working directory, as the command does."""
    folder = str(Path.cwd())
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


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
    from hpctrain.rank.rank import HostProgram
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
    """Say how a program resumes a run."""
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
        raise program.error  # itself, so that a debugger has its frames
    last = Ledger(directory).attempts()[-1]
    number = None if directory.is_cancelled(last.attempt) else program.stop.last_signal
    if number is not None and may_handle_signals():
        try:
            # with a return, the cells of a notebook that follow would use half-trained weights
            signal.raise_signal(number)
        except KeyboardInterrupt as stop:
            stop.add_note(f"the training stopped and was saved; {resume_hint(directory)}")
            raise
    if last.reason not in (Reason.COMPLETED, Reason.PAUSED):
        raise RunFailedError(f"{directory.path}: {last.reason} at step {last.end_step}; {resume_hint(directory)}")
