"""This machine: the rank in this process, or one process per rank."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO

from hpctrain.attempt.outcome import close, judge_attempt, resume_command
from hpctrain.attempt.unrecorded import close_silent
from hpctrain.cluster.scrub import scrubbed
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.distributed.stop_request import STOP_SIGNALS
from hpctrain.errors import ExitCode
from hpctrain.files import TEMPORARY_PREFIX
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.handover import Handover
from hpctrain.run.ledger import Ledger
from hpctrain.run.owner import Owner
from hpctrain.run.process import signals_blocked
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from hpctrain.worker.entry import run_rank

GRACE_S = 5.0
"""Seconds that the ranks get to end by themselves after one of them failed, and after a second Ctrl-C."""
WRITING_S = 25.0
"""Seconds more for rank zero while it writes a checkpoint, or once it has said its last word: it may be writing one."""
STOPPING_S = 60.0
"""Seconds that the ranks get to end by themselves after one of them stopped: all was saved before it did."""
POLL_S = 0.05


def launch_local(config: Config, directory: RunDirectory) -> int:
    """Train on this machine and wait for the end.

    Returns:
        An `ExitCode`.
    """
    world_size = resources_of(config).world_size
    close_silent(directory, Slurm(os.environ), None, world_size)
    ledger = Ledger(directory)
    attempt = ledger.claim()
    Owner.write(directory.claim(attempt))
    cut_short = False
    if world_size == 1:
        _in_this_process(config, directory, attempt)
    else:
        ranks = LocalRanks(directory, attempt, world_size, port=config.cluster.master_port or free_port())
        ranks.run()
        cut_short = ranks.cut_short
    outcome = judge_attempt(directory, attempt, world_size)
    if cut_short and outcome.reason is Reason.INFRASTRUCTURE:
        # ranks that were killed at a person's wish left no word
        outcome = replace(outcome, reason=Reason.INTERRUPTED, report="ended at once by a second Ctrl-C, without a save")
    close(directory, attempt, world_size, outcome)
    if outcome.report:
        # in this process the error has been shown where it arose
        text = outcome.report if world_size > 1 else outcome.report.splitlines()[0]
        print(f"hpctrain: {text}\nto go on: {resume_command(directory)}", file=sys.stderr)
    return outcome.exit_code


def _in_this_process(config: Config, directory: RunDirectory, attempt: int) -> int:
    saved = dict(os.environ)
    # inside an allocation, or a shell with leftovers, the launched rank is still the only one
    os.environ.clear()
    os.environ.update(scrubbed(saved) | Handover(attempt=attempt).variables())
    try:
        return run_rank(config, directory)
    finally:
        os.environ.clear()
        os.environ.update(saved)


def free_port() -> int:
    """A TCP port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables by which a local process knows its place: those of torchrun."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@dataclass
class LocalRanks:
    """The ranks of one attempt as processes of this machine.

    A signal to this process is passed on to them; when one fails the others are ended; none is left behind.

    Args:
        directory: the run.
        attempt: claimed.
        world_size: number of processes.
        port: where rank zero will listen.
    """

    directory: RunDirectory
    attempt: int
    world_size: int
    port: int

    @property
    def cut_short(self) -> bool:
        """Whether a second Ctrl-C ended the ranks."""
        return self._interrupts > 1

    def run(self, command: Sequence[str] = (sys.executable, "-u", "-m", "hpctrain.worker")) -> None:
        """Start the ranks and return when all have ended."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._interrupts = 0
        previous = {number: signal.signal(number, self._pass_on) for number in STOP_SIGNALS}
        token = secrets.token_hex(8)
        common = Handover(attempt=self.attempt, logged=True, token=token, parent=os.getpid()).variables()
        try:
            with signals_blocked(STOP_SIGNALS):  # until a rank can handle them (`StopRequest.install`)
                for rank in range(self.world_size):
                    environ = scrubbed(os.environ) | rank_variables(rank, self.world_size, self.port) | common
                    self._processes.append(self._start(rank, [*command, str(self.directory.path)], environ))
            self._watch()
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, rank: int, command: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.directory.rank_log(rank).open("ab", buffering=0))
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log if rank else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C reaches the ranks through this process alone, once
            )
            if process.stdout is not None:
                stack.pop_all()
                self._copier = threading.Thread(target=copy_output, args=(process.stdout, log), daemon=True)
                self._copier.start()
        return process

    def _watch(self) -> None:
        while any(process.poll() is None for process in self._processes):
            if any(
                process.poll() not in (None, ExitCode.FINISHED, ExitCode.INTERRUPTED) for process in self._processes
            ):
                self._wait(self._processes, GRACE_S)
                self._wait(self._processes[:1], WRITING_S, self._may_write)
                break
            if any(process.poll() == ExitCode.INTERRUPTED for process in self._processes):
                self._wait(self._processes, STOPPING_S)
                break
            if self.cut_short:
                break
            time.sleep(POLL_S)
        self._end_all()
        self._copier.join(timeout=GRACE_S)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _end_all(self) -> None:
        for process in self._processes:
            # the whole session: loading processes of a rank that is already gone as well
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _may_write(self) -> bool:
        """Whether rank zero has said its last word, or still computes and writes a checkpoint beside."""
        said = 0 in read_exit_records(self.directory.claim(self.attempt))
        return said or any(self.directory.checkpoints.glob(f"{TEMPORARY_PREFIX}*"))

    def _wait(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        patience_s: float,
        worth_it: Callable[[], bool] = lambda: True,
    ) -> None:
        """Return when these have ended, after so many seconds, at a second Ctrl-C, or when it isn't worth it."""
        deadline = time.monotonic() + patience_s
        while (
            time.monotonic() < deadline
            and not self.cut_short
            and any(one.poll() is None for one in processes)
            and worth_it()
        ):
            time.sleep(POLL_S)


def copy_output(source: IO[bytes], log: IO[bytes]) -> None:
    """Copy what a rank prints to a log and to the console, to its end; where one of them refuses, to the other one.

    A rank whose output nobody takes would stand still, or fail at its next word.

    Args:
        source: the rank's end of a pipe; closed at the end.
        log: unbuffered; closed at the end.
    """
    with source, log:
        while data := os.read(source.fileno(), 65536):
            with contextlib.suppress(OSError):  # a full disk may have room again later
                log.write(data)
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except OSError:
                # its reader has gone, as `head` does; this process's own last words, and what is buffered, go nowhere
                with Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())
