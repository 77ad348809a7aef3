"""The training as the work of a rank's process: torch is imported once signals are handled and the watchdog runs."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from hpctrain.attempt.lost_gpu import retain_if_gpu_lost, with_cuda_message
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import Config
from hpctrain.config.stored import load
from hpctrain.errors import ExitCode, HpctrainError, RendezvousError, SupersededError, error_text
from hpctrain.rank.classification import advice, classify
from hpctrain.rank.entry import log_to
from hpctrain.rank.rank import HostProgram, Member, Rank, headline
from hpctrain.rank.stacks import STDERR
from hpctrain.rank.stop_request import HANDLED, StopRequest
from hpctrain.rank.watchdog import Watchdog
from hpctrain.run.code import current_code
from hpctrain.run.directory import RunDirectory
from hpctrain.run.import_path import search_path
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.process import handlers_restored, open_files_raised, process_age_s
from hpctrain.run.reason import Reason
from hpctrain.run.times import Times
from hpctrain.terminal import output_unguarded, visible

log = logging.getLogger("hpctrain.train")


@dataclass(eq=False)
class TrainingWorkload:
    """A training, which this process does as one rank (`hpctrain.rank.entry.Workload`).

    Attributes:
        config: of the run.
        directory: the run directory, if it exists already.
        make_directory: makes it, on rank zero; the other ranks learn its path from rank zero.
        program: the user's program, if this process is not the rank's own; it gets the error that ends the attempt.
    """

    config: Config
    directory: RunDirectory | None = None
    make_directory: Callable[[], RunDirectory] | None = None
    program: HostProgram | None = None

    def __post_init__(self) -> None:
        self._stop = StopRequest() if self.program is None else self.program.stop

    @classmethod
    def launched(cls, directory: RunDirectory) -> TrainingWorkload:
        """The training of a run whose launcher started this process; imports come from the run's copy of the code."""
        digest = LauncherFacts.read(os.environ).code
        if digest and (code := current_code(directory, digest)) is not None:
            sys.path[:] = search_path(code, sys.path, os.environ)
        return cls(load(directory.config), directory)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Handle the stop signals, and write the Python stacks of a crash in native code to the terminal or the log."""
        os.environ.update(self.config.cluster.env)
        enables_faulthandler = not faulthandler.is_enabled()
        with handlers_restored(HANDLED), open_files_raised():
            try:
                self._stop.install()
                if enables_faulthandler:
                    faulthandler.enable(STDERR)
                with output_unguarded():
                    yield
            finally:
                if enables_faulthandler and self.program is not None:
                    faulthandler.disable()
                close_log_files()

    def run(self, environment: ClusterEnvironment, launcher: LauncherFacts) -> int:
        """Train one attempt as the rank of this place, and write its exit record.

        Returns:
            An `ExitCode`.
        """
        log_to_console(environment.rank, stamped=launcher.logged)
        if environment.rank == 0 and environment.ignored_message:
            log.warning("%s", environment.ignored_message)
        program = self.program
        # with torch imported already, this process did something else before: its age isn't the start-up time
        times = Times(0.0 if "torch" in sys.modules or program is not None else process_age_s())
        member = None
        if self.directory is not None and launcher.attempt is not None:
            member = Member(environment=environment, claim=Claim(Ledger(self.directory), launcher.attempt))
        rank = Rank(self.config, environment, launcher, self._stop, times, member, program)
        try:
            try:
                with Watchdog(self.config.health, rank):
                    with _imports_frozen() if program is None else nullcontext():
                        from hpctrain.train.attempt import run_attempt

                    reason = run_attempt(rank, self._run_directory)
            except BaseException as error:
                return _end_after_error(rank, error, is_new=self.directory is None)
            rank.write_exit_record(reason)
            if rank.is_rank_zero:
                rank.close_attempt(reason, rank.why_ended)
                if reason is Reason.COMPLETED:
                    rank.complete_senders()
            return _exit_code(rank, reason.meaning.exit_code)
        finally:
            rank.leave_senders()

    def _run_directory(self) -> RunDirectory:
        if self.directory is not None:
            return self.directory
        assert self.make_directory is not None
        return self.make_directory()


def _exit_code(rank: Rank, code: ExitCode) -> ExitCode:
    """The exit code after a clean stop; 0 if a launcher reads the exit records, which say what happened."""
    # At another code srun has slurmctld kill the step. SLURM 22.05 may send that message again a minute later, when the
    # job has been requeued, and its step of the same number belongs to the next attempt.
    return code if rank.launcher.attempt is None else ExitCode.FINISHED


@contextmanager
def _imports_frozen() -> Iterator[None]:
    """Import torch with garbage collection off, and exempt the imported objects from later collections.

    Collections take a seventh of the time of the import. Afterwards, each full collection would visit more than 200,000
    objects of torch's modules. That takes 0.1 to 0.2 s, while all other ranks wait in the next exchange of gradients.
    """
    # with torch imported already, this process ran other code before, whose objects may still become garbage
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _end_after_error(rank: Rank, error: BaseException, *, is_new: bool) -> int:
    if isinstance(error, SupersededError | KeyboardInterrupt):
        if isinstance(error, SupersededError):
            log.warning("%s", error)
        _hand_to_program(rank, error)
        rank.write_exit_record(Reason.INTERRUPTED, error)
        rank.leave_world()
        if isinstance(error, SupersededError):
            return _exit_code(rank, ExitCode.INTERRUPTED)
        rank.close_attempt(Reason.INTERRUPTED, "a second Ctrl-C")
        return ExitCode.INTERRUPTED
    # rank zero still makes the run directory, and the others only wait for it
    others_error = is_new and rank.member is None and not rank.is_rank_zero and not isinstance(error, RendezvousError)
    if isinstance(error, HpctrainError) and others_error:
        return error.exit_code  # rank zero prints the error for all
    return _fail(rank, error)


def _hand_to_program(rank: Rank, error: BaseException) -> None:
    """Pass the error to the user's program, and retain what the GPU has used if it is lost."""
    retain_if_gpu_lost(error, rank)
    if (program := rank.program) is not None:
        program.error = error


def _fail(rank: Rank, error: BaseException) -> int:
    error = with_cuda_message(error)
    _hand_to_program(rank, error)
    failure = classify(error, rank.environment.world_size)
    sizes = rank.environment.world_size, rank.environment.local_world_size
    hint = "" if failure.blames_peer else advice(error, rank.config, *sizes)
    rank.write_exit_record(failure.reason, error, blames_peer=failure.blames_peer, advice=hint)
    rank.leave_world()
    place = f"rank {rank.environment.rank} on {socket.gethostname()}"
    detail = f"{place}: {headline(error, hint)}"
    if failure.blames_peer:
        lost = {Reason.INFRASTRUCTURE: "lost another rank", Reason.HANG: "waited too long for another rank"}
        why = lost.get(failure.reason, "stops because another rank failed")
        log.warning("%s %s: %s", place, why, error_text(error).partition("\n")[0])
    else:
        _report_error(rank, place, error, hint)
    rank.finish_writing()
    if failure.blames_peer:
        rank.close_attempt_for_peer(failure.reason, detail)
    else:
        rank.close_attempt(failure.reason, detail)
    # once an attempt has begun, the run exists, and has failed whatever the error is
    code = error.exit_code if isinstance(error, HpctrainError) and rank.member is None else ExitCode.FAILED
    return _exit_code(rank, code) if rank.superseded else code


def _report_error(rank: Rank, place: str, error: BaseException, hint: str) -> None:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, HpctrainError):
        text = f"hpctrain: {place}: {error}"
        logged = f"{text}\n{trace}".rstrip()  # it shows which line of a task made the mistake
    else:
        text = logged = f"hpctrain: {place} failed:\n{trace}{hint}".rstrip()
    for handler in logging.getLogger("hpctrain").handlers:
        if isinstance(handler, logging.FileHandler):  # standard error doesn't reach it
            handler.handle(logging.makeLogRecord({"msg": logged}))
    if rank.program is None:
        print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - logging may be what failed
    elif hint:  # the program raises the error, and shows it
        error.add_note(hint)


def log_to_console(rank: int, *, stamped: bool = False) -> None:
    """Log rank zero's progress to standard output, and the warnings of the others to standard error.

    Args:
        rank: of this process.
        stamped: begin each line with date and time, since the output goes into a log.
    """
    text = "%(message)s" if rank == 0 else f"rank {rank}: %(message)s"
    if stamped:
        text = f"%(asctime)s {text}"
    if rank == 0:
        log_to(sys.stdout, text)
    else:
        log_to(sys.stderr, text, logging.WARNING)


def close_log_files() -> None:
    """Close the log files of this attempt, so that a sweep in one process doesn't collect open files."""
    logger = logging.getLogger("hpctrain")
    for handler in [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()
