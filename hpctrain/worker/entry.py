"""The entry point of a rank's process: signals first, then the attempt, then its exit record."""

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

from hpctrain.attempt.lost_gpu import retain_if_gpu_lost, with_cuda_message
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import Config
from hpctrain.errors import ExitCode, HpctrainError, RendezvousError, SupersededError, error_text
from hpctrain.phrases import DATE_TIME
from hpctrain.rank.stop_request import HANDLED, StopRequest
from hpctrain.run.directory import RunDirectory, umask_of
from hpctrain.run.launcher import Handover
from hpctrain.run.process import end_with_parent, handlers_restored, open_files_raised, process_age_s
from hpctrain.run.reason import Reason
from hpctrain.run.start_record import StartRecord
from hpctrain.run.times import Times
from hpctrain.streams import LogHandler, flush_output
from hpctrain.terminal import VisibleFormatter, can_redraw, output_unguarded, unguarded, visible
from hpctrain.worker.advice import advice
from hpctrain.worker.classification import classify
from hpctrain.worker.host_program import HostProgram
from hpctrain.worker.rank import Rank, headline
from hpctrain.worker.stacks import STDERR
from hpctrain.worker.watchdog import Watchdog

log = logging.getLogger("hpctrain.train")


def run_rank(
    config: Config,
    directory: RunDirectory | None,
    make_directory: Callable[[], RunDirectory] | None = None,
    program: HostProgram | None = None,
) -> int:
    """Train as one rank of the run until the attempt ends.

    Args:
        config: of the run.
        directory: the run directory, if it exists already.
        make_directory: makes it, on rank zero; the other ranks learn its path from rank zero.
        program: the user's program, if this process is not the rank's own; it gets the error that ends the attempt.

    Returns:
        An `ExitCode`.

    Raises:
        ClusterEnvironmentError: this process's place among the ranks can't be derived.
    """
    os.environ.update(config.cluster.env)
    umask = os.umask(umask_of(config.mode))
    stop = StopRequest() if program is None else program.stop
    enables_faulthandler = not faulthandler.is_enabled()
    with handlers_restored(HANDLED), open_files_raised():
        try:
            stop.install()
            if enables_faulthandler:
                faulthandler.enable(STDERR)  # the terminal or the log gets the Python stack of a crash in native code
            handover = Handover.read(os.environ)
            end_with_parent(handover.parent)
            environment = ClusterEnvironment.from_environment(os.environ, master_port=config.cluster.master_port)
            log_to_console(environment.rank, stamped=handover.logged)
            if environment.rank == 0 and environment.ignored_message:
                log.warning("%s", environment.ignored_message)
            # with torch imported already, this process did something else before: its age isn't the start-up time
            times = Times(0.0 if "torch" in sys.modules or program is not None else process_age_s())
            rank = Rank(config, environment, handover, stop, times, directory, handover.attempt, program)
            if rank.claim is not None:
                StartRecord.of_this_process(environment).write(rank.claim)
            with output_unguarded():
                try:
                    return _run(rank, make_directory)
                finally:
                    rank.leave_senders()
        finally:
            if enables_faulthandler and program is not None:
                faulthandler.disable()
            close_log_files()
            os.umask(umask)


def end_process(code: int) -> None:
    """End this process at once, even if threads of a broken process group or a writer would keep it alive."""
    flush_output()
    os._exit(code)


def _run(rank: Rank, make_directory: Callable[[], RunDirectory] | None) -> int:
    try:
        with Watchdog(rank.config.health, rank):
            # imports torch, which takes seconds: the handlers and the watchdog are there by now
            with _imports_frozen() if rank.program is None else nullcontext():
                from hpctrain.worker.attempt import run_attempt

            reason = run_attempt(rank, make_directory)
    except SupersededError as error:
        log.warning("%s", error)
        _hand_to_program(rank, error)
        rank.write_exit_record(Reason.INTERRUPTED, error)
        rank.leave_world()
        return _exit_code(rank, ExitCode.INTERRUPTED)
    except HpctrainError as error:
        if rank.directory is None and not rank.is_rank_zero and not isinstance(error, RendezvousError):
            return error.exit_code  # rank zero prints the error for all
        return _fail(rank, error)
    except KeyboardInterrupt as error:
        _hand_to_program(rank, error)
        rank.write_exit_record(Reason.INTERRUPTED, error)
        rank.leave_world()
        rank.close_attempt(Reason.INTERRUPTED, "a second Ctrl-C")
        return ExitCode.INTERRUPTED
    except BaseException as error:
        return _fail(rank, error)
    rank.write_exit_record(reason)
    if rank.is_rank_zero:
        rank.close_attempt(reason, rank.why_ended)
        if reason is Reason.COMPLETED:
            rank.complete_senders()
    return _exit_code(rank, reason.meaning.exit_code)


def _exit_code(rank: Rank, code: ExitCode) -> ExitCode:
    """The exit code after a stop in good order; 0 if a launcher reads the exit records, which say what happened."""
    # At another code srun has slurmctld kill the step. SLURM 22.05 may send that message again a minute later, when the
    # job has been requeued, and its step of the same number belongs to the next attempt.
    return code if rank.handover.attempt is None else ExitCode.FINISHED


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


def _hand_to_program(rank: Rank, error: BaseException) -> None:
    """Pass the error to the user's program, and retain what the GPU has used if it is lost."""
    retain_if_gpu_lost(error, rank)
    if rank.program is not None:
        rank.program.error = error


def _fail(rank: Rank, error: BaseException) -> int:
    error = with_cuda_message(error)
    _hand_to_program(rank, error)
    found = classify(error, rank.environment.world_size)
    sizes = rank.environment.world_size, rank.environment.local_world_size
    hint = "" if found.peer else advice(error, rank.config, *sizes)
    rank.write_exit_record(found.reason, error, blames_peer=found.peer, advice=hint)
    rank.leave_world()
    place = f"rank {rank.environment.rank} on {socket.gethostname()}"
    detail = f"{place}: {headline(error, hint)}"
    if found.peer:
        verb = {Reason.INFRASTRUCTURE: "lost", Reason.HANG: "waited too long for"}.get(found.reason, "ends with")
        log.warning("%s %s another rank: %s", place, verb, error_text(error).partition("\n")[0])
    else:
        _report_error(rank, place, error, hint)
    rank.finish_writing()
    if found.peer:
        rank.close_attempt_for_peer(found.reason, detail)
    else:
        rank.close_attempt(found.reason, detail)
    # once an attempt has begun, the run exists, and has failed whatever the error is
    code = error.exit_code if isinstance(error, HpctrainError) and rank.attempt is None else ExitCode.FAILED
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
    logger = logging.getLogger("hpctrain")
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler = LogHandler(unguarded(sys.stdout if rank == 0 else sys.stderr))
    text = "%(message)s" if rank == 0 else f"rank {rank}: %(message)s"
    if stamped:
        text = f"%(asctime)s {text}"
    # over the ^C that the terminal echoes
    clear = "\r\x1b[K" if can_redraw(handler.stream) and not stamped else ""
    handler.setFormatter(VisibleFormatter(text, DATE_TIME, prefix=clear, stream=handler.stream))
    logger.addHandler(handler)


def close_log_files() -> None:
    """Close the log files of this attempt, so that a sweep in one process doesn't collect open files."""
    logger = logging.getLogger("hpctrain")
    for handler in [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()
