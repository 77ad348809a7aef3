"""Launch a run that continues after the program: as a job, or in processes of this machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.config.checks import check
from hpctrain.config.main_module import refuse_own_targets
from hpctrain.config.root import Config
from hpctrain.config.run_config import RunConfig
from hpctrain.errors import ConfigError, RunFailedError
from hpctrain.launch.launch_code import importing_code_of
from hpctrain.launch.launcher import begin
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.owner import Owner
from hpctrain.run.process import environ_replaced
from hpctrain.status.log import Tail
from hpctrain.status.run_status import RunStatus

BEGIN_S = 120.0
"""Seconds that the launcher may take until it claims an attempt, on a busy machine."""
LOOK_EVERY_S = 0.05

log = logging.getLogger("hpctrain.api")


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
        command = program_command()
        begun = begin(config, command, force=force, code_now=code_now, report=log.info, warn=log.warning)
        if isinstance(begun, RunStatus):
            return RunDirectory(begun.path)
        if begun.job_id is None:
            _start_launcher(begun.run)
    return begun.run.directory


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
    while (claimed := ledger.last_claim()) == before or not _is_owned_by(process, directory.claim(claimed)):
        if process.poll() is not None or time.monotonic() > deadline:
            why = f"ended with exit code {process.returncode}" if process.returncode is not None else "hangs"
            process.kill()
            lines = Tail(directory.launcher_log, printed_before).read().decode(errors="replace").strip().splitlines()
            said = lines[-1] if lines else "it printed nothing"
            where = directory.launcher_log
            raise RunFailedError(f"{directory.path}: its launcher {why} before an attempt began: {said}; see {where}")
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
