"""Launch on this machine: a single rank in this process, or one process per rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO, NoReturn

from hpctrain.attempt.hang import alarm_complaint
from hpctrain.attempt.lost_gpu import has_lost_gpu
from hpctrain.attempt.notification import SOON_S, Notifier
from hpctrain.attempt.out_of_memory import oom_complaint, oom_kills, with_memory_advice
from hpctrain.attempt.outcome import Outcome, death_complaint, record_end, resume_advice
from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.cluster.variables import without_job_variables
from hpctrain.errors import ExitCode
from hpctrain.files import TEMPORARY_PREFIX
from hpctrain.launch.prepare import RunPlan
from hpctrain.rank.entry import run_rank
from hpctrain.rank.private_folder import lockable_folder
from hpctrain.rank.rank import HostProgram
from hpctrain.rank.stop_request import STOP_SIGNALS
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.code import code_for_attempt, current_code
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord, first_cause, read_exit_records
from hpctrain.run.file_system import explain
from hpctrain.run.import_path import imported_from
from hpctrain.run.launcher import LauncherFacts, Owner
from hpctrain.run.ledger import Ledger
from hpctrain.run.process import environ_replaced, handlers_restored, may_handle_signals, signals_blocked
from hpctrain.run.reason import Reason
from hpctrain.run.temporary_folder import temporary_folder
from hpctrain.scheduler.slurm import Slurm
from hpctrain.streams import LogFile, LostOutput, print_warning
from hpctrain.terminal import can_redraw, is_terminal
from hpctrain.train.workload import TrainingWorkload

GRACE_S = 5.0
"""Seconds to wait before killing the ranks, after one of them failed or after a second Ctrl-C."""
WRITING_S = 25.0
"""Further seconds for rank zero while it may be writing a checkpoint."""
STOPPING_S = 60.0
"""Seconds to wait before killing the ranks, after one of them completed or stopped; all of them have saved by then."""
POLL_S = 0.05
FORWARDED = (*STOP_SIGNALS, signal.SIGHUP)
CLEAR_LINE = b"\r\x1b[K"


def launch_local(run: RunPlan, program: HostProgram | None = None, *, quiet: Collection[Reason] = ()) -> int:
    """Train on this machine and wait for the end.

    Args:
        run: prepared.
        program: the user's, if this process isn't hpctrain's own. The run then has one rank, and how the attempt ended
            isn't printed, but left to the program.
        quiet: reasons for which the attempt may end without a message, because the caller has one.

    Returns:
        An `ExitCode`.
    """
    with run.directory.permissions():
        return _launch(run, program, quiet if program is None else tuple(Reason))


def _launch(run: RunPlan, program: HostProgram | None, quiet: Collection[Reason]) -> int:
    directory, world_size = run.directory, run.resources.world_size
    UnrecordedEnds(directory, Slurm()).close(world_size)
    # a program has imported its code already
    code, damage = code_for_attempt(directory) if program is None else (current_code(directory), "")
    digest = "" if code is None else code.digest
    # without an address from their user, local ranks meet at a file that only the user can open
    needs_secret = world_size > 1 and not run.is_program and run.training.parallel.init_method != "env://"
    number = Ledger(directory).claim(secret=needs_secret)
    Owner.write(directory.attempt(number), in_program=program is not None)
    attempt = _Attempt(run, number, Notifier(directory, run.config, os.environ), quiet, digest or None)
    if damage:
        return attempt.refuse(damage)
    attempt.notifier.started(number, socket.gethostname())
    # a process that has lost its GPU can't train another run of its sweep, and keeps its memory there until it ends
    if world_size == 1 and not run.is_program and (program is not None or not has_lost_gpu()):
        # inside an allocation, or in a shell with leftover variables, the launched rank is still the only one
        alone = environ_replaced(
            without_job_variables(os.environ) | LauncherFacts(attempt=number, code=digest).variables()
        )
        # a program's search path is its own
        imports = imported_from(code) if program is None else contextlib.nullcontext()
        with _sudden_exit_concluded(attempt.conclude), alone, imports:
            run_rank(TrainingWorkload(run.training, directory, program=program))
        return attempt.conclude()
    port = run.config.cluster.master_port or free_port()
    ranks = LocalRanks(directory, number, world_size, port=port, code=digest, independent=run.is_program)
    try:
        ranks.run(run.rank_command(code), run.code_variables(code, os.environ))
    except OSError as error:
        if len(ranks.processes) == world_size:
            raise
        # on a full disk, a log can't be made
        return attempt.refuse(f"the ranks can't be started: {explain(error)}")
    return attempt.conclude(ranks)


@contextlib.contextmanager
def _sudden_exit_concluded(conclude: Callable[[], object]) -> Iterator[None]:
    """Context manager in which `os._exit` calls ``conclude`` first, and exits with `FAILED` in place of 0."""
    process, really_exit = os.getpid(), os._exit

    def exit_failed(status: int) -> NoReturn:
        if os.getpid() != process:  # a forked DataLoader worker, which always ends by os._exit
            really_exit(status)
        try:
            conclude()
        finally:
            really_exit(status or ExitCode.FAILED)

    os._exit = exit_failed
    try:
        yield
    finally:
        os._exit = really_exit


@dataclass(frozen=True)
class _Attempt:
    """An attempt on this machine, and the record of its end.

    Attributes:
        run: the run.
        number: of the attempt, which is claimed.
        notifier: of the run.
        quiet: reasons for which nothing is printed.
        code: digest of the copy from which its ranks import; None without one.
        kills: the kernel's count of processes that it killed for their memory, before the attempt.
    """

    run: RunPlan
    number: int
    notifier: Notifier
    quiet: Collection[Reason]
    code: str | None = None
    kills: int = field(default_factory=oom_kills)

    def refuse(self, why: str) -> int:
        """End it before its ranks start: the code isn't what was submitted, or the system refuses to start them."""
        directory, world_size = self.run.directory, self.run.resources.world_size
        outcome = Outcome(Reason.FAILED, saved_step(directory), why)
        record_end(directory, self.number, outcome, world_size=world_size, ends_run=True, code=self.code)
        print(f"hpctrain: {outcome.reason.value}: {why}", file=sys.stderr)
        self.notifier.ended(self.number, outcome)
        self.notifier.finish()
        return outcome.reason.meaning.exit_code

    def conclude(self, ranks: LocalRanks | None = None) -> int:
        """Record and print how it ended, unless that is recorded already; return the exit code.

        Args:
            ranks: which have ended; None if the launching process is the only rank.
        """
        directory, world_size = self.run.directory, self.run.resources.world_size
        # a rank in this process that hung has recorded its end, and printed it
        is_recorded = not Ledger(directory).attempt(self.number).open
        records, codes = read_exit_records(directory.attempt(self.number)), () if ranks is None else ranks.codes
        complaint = (
            oom_complaint(self.kills, codes, records) or alarm_complaint(codes) or death_complaint(codes, records)
        )
        outcome = Outcome.of_attempt(directory, self.number, world_size, complaint)
        outcome = with_memory_advice(outcome, self.run.config)
        is_killed = outcome.reason in (Reason.INFRASTRUCTURE, Reason.OUT_OF_MEMORY)
        if ranks is not None and ranks.cut_short and is_killed:
            # because their user asked for it, so that they left no exit record
            report = "ended at once by a second Ctrl-C, without a save"
            outcome = replace(outcome, reason=Reason.INTERRUPTED, report=report)
        lost = {} if ranks is None else {0: ranks.lost}
        record_end(directory, self.number, outcome, lost, world_size=world_size, ends_run=True, code=self.code)
        if outcome.report and not is_recorded and outcome.reason not in (Reason.COMPLETED, *self.quiet):
            print(f"hpctrain: {self._end(outcome, first_cause(records))}", file=sys.stderr)
            print(resume_advice(directory, outcome.reason), file=sys.stderr)
        self.notifier.ended(self.number, outcome)
        # after a Ctrl-C, the user waits at the terminal
        is_urgent = outcome.reason.meaning.resumable or outcome.reason.meaning.by_slurm
        self.notifier.finish(SOON_S if is_urgent else None)
        return outcome.reason.meaning.exit_code

    def _end(self, outcome: Outcome, cause: ExitRecord | None) -> str:
        """Describe how it ended, without an error that rank zero has printed already."""
        if outcome.reason.meaning.orderly or outcome.reason is Reason.HANG:  # the report itself says that a rank hangs
            return outcome.report
        if cause is not None and cause.rank == 0 and not cause.blames_peer:
            if self.run.is_program:  # its exit code wasn't printed
                return f"{outcome.reason.value}: {outcome.headline}"
            return f"{outcome.reason.value} after step {outcome.step}"
        return f"{outcome.reason.value}: {outcome.report}"


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables of a local rank, which are those of torchrun."""
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

    Signals to this process are forwarded to them. When one fails the others are killed, and none outlives `run`.

    Args:
        directory: of the run.
        attempt: claimed.
        world_size: number of processes.
        port: where rank zero will listen.
        code: digest of the copy from which they import; empty if there is none.
        independent: whether the ranks end on their own, as a program's do: one that completed ends no other.

    Attributes:
        processes: by rank, once they are started.
        codes: by rank, the exit code; None for a rank that the launcher killed.
        lost: the output that the log of rank zero lacks.
        interrupts: how often Ctrl-C was pressed.
    """

    directory: RunDirectory
    attempt: int
    world_size: int
    port: int
    code: str = ""
    independent: bool = False
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    codes: list[int | None] = field(default_factory=list, init=False)
    lost: LostOutput = field(default_factory=LostOutput, init=False)
    interrupts: int = field(default=0, init=False)

    @property
    def cut_short(self) -> bool:
        """Whether a second Ctrl-C ended the ranks."""
        return self.interrupts > 1

    def run(self, command: Sequence[str], extra_variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the ranks by their command, with more variables, and return when all have ended."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(temporary_folder("ranks", lockable_folder()))
            # for a bar: what rank zero prints goes through a pipe
            terminal = os.dup(sys.stdout.fileno()) if can_redraw(sys.stdout) else None
            launcher = LauncherFacts(
                attempt=self.attempt,
                logged=True,
                store=f"{folder}/store",
                parent=os.getpid(),
                terminal=terminal,
                code=self.code,
            )
            common = {**launcher.variables(), **extra_variables}
            stack.enter_context(handlers_restored(FORWARDED))
            for number in FORWARDED if may_handle_signals() else ():
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    signal.signal(number, self._forward)
            stack.callback(self._kill_all)
            with signals_blocked(FORWARDED):  # until a rank handles them (`StopRequest.install`)
                for rank in range(self.world_size):
                    variables = without_job_variables(os.environ) | rank_variables(rank, self.world_size, self.port)
                    process = self._start(rank, [*command, str(self.directory.path)], variables | common, terminal)
                    self.processes.append(process)
                    if process.stdout is not None:
                        log = LogFile(self.directory.rank_log(0))
                        copying = partial(copy_output, process.stdout, log, over_bar=terminal is not None)
                        copier = threading.Thread(target=copying, daemon=True)
                        copier.start()
            if terminal is not None:
                os.close(terminal)
            self._watch()
            self.codes = [process.poll() for process in self.processes]
            self._kill_all()
            copier.join(timeout=GRACE_S)
            self.lost = log.lost

    def _start(
        self, rank: int, command: list[str], variables: Mapping[str, str], terminal: int | None
    ) -> subprocess.Popen[bytes]:
        with self.directory.rank_log(rank).open("ab", buffering=0) as log:
            return subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log if rank else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=() if rank or terminal is None else (terminal,),
                start_new_session=True,  # the terminal's Ctrl-C reaches the ranks through this process alone, once
            )

    def _watch(self) -> None:
        while not self.cut_short:
            codes = [process.poll() for process in self.processes]
            if None not in codes:
                return
            if any(code not in (None, ExitCode.FINISHED) for code in codes):
                self._wait(GRACE_S, self._any_runs)
                self._wait(WRITING_S, self._rank_zero_writes)
                return
            if ExitCode.FINISHED in codes and not self.independent:
                self._wait(STOPPING_S, self._any_runs)
                return
            time.sleep(POLL_S)

    def _wait(self, timeout_s: float, condition: Callable[[], bool]) -> None:
        """Wait while the condition holds, until the timeout is over or the user presses Ctrl-C a second time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.cut_short and condition():
            time.sleep(POLL_S)

    def _any_runs(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def _rank_zero_writes(self) -> bool:
        """Whether rank zero may be writing a checkpoint: its exit record, or an unfinished checkpoint, exists."""
        if self.processes[0].poll() is not None:
            return False
        recorded = 0 in read_exit_records(self.directory.attempt(self.attempt))
        return recorded or any(self.directory.checkpoints.glob(f"{TEMPORARY_PREFIX}*"))

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        if number == signal.SIGINT and is_terminal(sys.stdout):
            os.write(sys.stdout.fileno(), b"\n")  # after the ^C that the terminal echoes
        for process in self.processes:
            if process.poll() is None:
                # the terminal was closed: a stop, and ranks don't handle its signal
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
                # suspended processes (SIGSTOP) handle the signal, and load samples, only once they continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGCONT)

    def _kill_all(self) -> None:
        for process in self.processes:
            # the whole session: also the DataLoader workers of a rank that has ended already
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def copy_output(source: IO[bytes], log: LogFile, *, over_bar: bool = False) -> None:
    """Copy a rank's output to a log and to the console until it ends; an error in one doesn't stop the other.

    Args:
        source: the rank's end of a pipe; closed at the end.
        log: closed at the end.
        over_bar: whether the rank may have drawn a bar on the console, which lines replace.
    """
    at_start = True
    warnings: list[str] = []
    log.report = warnings.append
    with source, log:
        # to the end in any case: a rank whose pipe is full blocks, and one whose pipe is closed fails
        while data := os.read(source.fileno(), 65536):
            log.write(data)
            # a warning waits for the end of a line
            lines = data[: data.rfind(b"\n") + 1] if warnings else data
            _print(CLEAR_LINE + lines if over_bar and at_start else lines)
            if lines.endswith(b"\n"):
                while warnings:
                    print_warning(warnings.pop())
            _print(data[len(lines) :])
            at_start = data.endswith(b"\n")
    for warning in warnings:
        print_warning(warning)


def _print(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError:
        # its reader has exited, as `head` does; discard what is buffered and what this process prints later
        with Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())
