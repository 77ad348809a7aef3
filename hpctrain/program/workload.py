"""A program as the work of a rank's process: set up, run the program, and write the exit record.

The program is a child, and doesn't replace this process: then no exit record would be written after a crash, and no
process would notice a hang.

Why it is like this: docs/adr/0019-any-program-as-a-run.md.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpctrain.attempt.out_of_memory import oom_kills
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.program import command_of
from hpctrain.config.resources import resources_of
from hpctrain.config.root import ProgramConfig
from hpctrain.config.stored import load_run
from hpctrain.errors import (
    MAX_SHOWN_CHARS,
    ConfigError,
    ExitCode,
    HpctrainError,
    SupersededError,
)
from hpctrain.phrases import listed, on_one_line
from hpctrain.program.loop import EventLoop, HangError, Signals
from hpctrain.program.output import ProgramEnd, ProgramOutcome, ProgramOutput, outcome_of, read_tail
from hpctrain.program.processes import RunningProgram, size_of
from hpctrain.program.rank import ProgramRank, command_in_copy, program_variables
from hpctrain.program.reports import EventPipe, Records
from hpctrain.rank.classification import classify
from hpctrain.rank.entry import log_to
from hpctrain.run.code import current_code, written_files
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import explain, reserve_for_rank
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.process import process_age_s
from hpctrain.run.reason import Reason
from hpctrain.run.start_record import address_of_rank_zero
from hpctrain.run.temporary_folder import temporary_folder
from hpctrain.run.times import Times
from hpctrain.run.written_files import written_originals

DEADLINES = ("HPCTRAIN_DEADLINE", "SLURM_JOB_END_TIME")
"""Variables with the epoch seconds at which the job's time is over: from the supervisor, and from SLURM since 23.02."""

log = logging.getLogger("hpctrain.program")


class ProgramWorkload:
    """The program of a run, which this process runs as one rank (`hpctrain.rank.entry.Workload`).

    Args:
        directory: of the run.

    Raises:
        ConfigError: the run is a training.
    """

    def __init__(self, directory: RunDirectory) -> None:
        config = load_run(directory.config)
        if not isinstance(config, ProgramConfig):
            problem = "is a training, not a program"
            raise ConfigError("run", directory.path, problem, f"python -m hpctrain.train {directory.as_typed}")
        self.config = config
        self.directory = directory
        self._signals = Signals()

    def prepared(self) -> Signals:
        """Receive the stop signals."""
        return self._signals

    def run(self, environment: ClusterEnvironment, launcher: LauncherFacts) -> int:
        """Run the program as the rank of this place until it ends, and write the exit record.

        Returns:
            An `ExitCode`: 0 if the run is completed, or was asked to stop; the exit record says more.

        Raises:
            ConfigError: no launcher has started this rank.
            OSError: the folder of the program's session can't be made.
        """
        times = Times(process_age_s())
        with temporary_folder("session") as session:
            rank = self._rank(environment, launcher, session)
            log_to(sys.stdout, "%(asctime)s hpctrain: %(message)s")
            try:
                return _run(rank, times, self._signals)
            except HangError:
                return ExitCode.FAILED
            except Exception as error:
                return _end_after_error(rank, error)

    def _rank(self, environment: ClusterEnvironment, launcher: LauncherFacts, session: Path) -> ProgramRank:
        directory = self.directory
        if launcher.attempt is None:
            problem = "no launcher has begun an attempt of it"
            raise ConfigError("run", directory.path, problem, f"python -m hpctrain resume {directory.as_typed}")
        code = current_code(directory, launcher.code) if launcher.code else None
        if code is not None and code.own_paths is not None:
            code = code.as_own_copy  # even if this node doesn't see it yet: the shared copy isn't for writing
        claim = Claim(Ledger(directory), launcher.attempt)
        reserve_for_rank(directory.attempt(claim.attempt), environment.rank)
        return ProgramRank(
            config=self.config,
            claim=claim,
            environment=environment,
            session=session,
            code=code,
            deadline=_deadline(os.environ),
            output=ProgramOutput(),
        )


def _end_after_error(rank: ProgramRank, error: Exception) -> int:
    """Record an error of hpctrain's own process, such as of the file system; return the exit code."""
    if isinstance(error, SupersededError):
        log.warning("%s", error)
        rank.write(rank.make_exit_record(Reason.INTERRUPTED, message=str(error)))
        return ExitCode.FINISHED
    if isinstance(error, HpctrainError):
        log.error("%s", error)
        cause = classify(error, rank.environment.world_size)
        rank.write(replace(rank.make_exit_record(cause.reason, message=str(error)), blames_peer=cause.blames_peer))
        return ExitCode.FAILED
    log.exception("hpctrain's own process of this rank failed")
    reason, text = Reason.FAILED, str(error)
    if isinstance(error, OSError):
        reason, text = Reason.INFRASTRUCTURE, explain(error)
    trace = "".join(traceback.format_exception(error))
    rank.write(replace(rank.make_exit_record(reason, message=f"{type(error).__name__}: {text}"), traceback=trace))
    return ExitCode.FAILED


def _deadline(variables: Mapping[str, str]) -> float | None:
    for name in DEADLINES:
        try:
            return float(variables[name])
        except (KeyError, ValueError):
            continue
    return None


def _run(rank: ProgramRank, times: Times, signals: Signals) -> int:
    early: list[signal.Signals] = []

    def is_stopped() -> bool:
        early.extend(number for number in signals.read() if number != signal.SIGCHLD)
        return bool(early)

    address = address_of_rank_zero(rank.claim_folder, rank.environment, is_stopped)
    if is_stopped():
        log.info("%s received before the program was started", early[-1].name)
        rank.write(replace(rank.make_exit_record(Reason.INTERRUPTED), stop_signal=early[-1]))
        return ExitCode.FINISHED
    if rank.is_rank_zero and rank.environment.ignored_message:
        log.warning("%s", rank.environment.ignored_message)
    events = EventPipe(rank.session)
    records = Records(rank, times, events) if rank.is_rank_zero else None
    rank = replace(rank, environment=replace(rank.environment, master_addr=address))
    output_start, kills, began = size_of(rank.log), oom_kills(), time.time()
    child = _start(rank)
    # without a session, that is all that is known of the program's work
    times.enter("train_s")
    try:
        loop = EventLoop(rank, child, signals, events, records)
        end = replace(loop.run(), out_of_memory=oom_kills() > kills)
        rank.output.drain()
        outcome = _outcome(rank, end, output_start)
        record = replace(
            rank.make_exit_record(outcome.reason, loop.progress.step, outcome.message),
            traceback=outcome.traceback,
            blames_peer=outcome.blames_peer,
            stop_signal=end.stop_signal,
            done=end.done,
        )
        rank.write(record)
        if records is not None and outcome.reason is Reason.COMPLETED:
            records.completed()
        # the grace time of a stop is for saving
        if rank.is_rank_zero and end.stop_signal is None:
            _report_written(rank, began)
        loop.end_other_processes()
    finally:
        child.close()
        rank.output.close()
        events.close()
    # after a stop, another code would have the launcher kill the other ranks, which may still save
    stopped = end.stop_signal is not None
    return ExitCode.FINISHED if stopped or outcome.reason.meaning.orderly else ExitCode.FAILED


def _start(rank: ProgramRank) -> RunningProgram:
    command = command_of(rank.config)
    if rank.code is not None:
        command = command_in_copy(rank.code, command)
    text = on_one_line(shlex.join(command))
    text = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
    log.info("attempt %d: starting %s", rank.attempt, text)
    child = RunningProgram(
        command,
        program_variables(rank, os.environ),
        rank.folder,
        stop_signal=signal.Signals[f"SIG{rank.config.run.signal}"],
        session=rank.session,
        output=rank.output.writer,
    )
    rank.output.start()
    return child


def _outcome(rank: ProgramRank, end: ProgramEnd, output_start: int) -> ProgramOutcome:
    mark = f"attempt {rank.attempt}: the program ended: {end.text}"
    # through the same pipe or file as the program's output, which is complete in the log once this line is
    log.info("%s", mark)
    world_size = rank.environment.world_size * (resources_of(rank.config).spawned_per_node or 1)
    output = read_tail(rank.log, output_start, mark) if end.code else ""
    outcome = outcome_of(end, output, rank.config.run, world_size)
    if end.done and end.code:
        log.warning("the program had called session.done(): the run is complete, whatever came after it")
    elif end.code == 0 and outcome.reason is not Reason.COMPLETED:
        log.info("it was asked to stop and didn't call session.done(): the run is interrupted, and can be resumed")
    return outcome


def _report_written(rank: ProgramRank, began: float) -> None:
    """Log which files the program wrote into the copy of its code, and which it wrote into through links."""
    code = rank.code
    if code is None:
        return
    try:
        files = written_files(code)
        originals = [] if code.own_paths is None else written_originals(code, began)
    except (OSError, HpctrainError):
        return  # the launcher of the next attempt compares the copy with its list
    if files and code.own_paths is None:
        advice = "write into $HPCTRAIN_CHECKPOINT_DIR or $HPCTRAIN_RUN_DIR instead"
        log.info(
            "the copy of the code, %s, contains what the program wrote: %s; %s", code.folder, listed(files), advice
        )
    elif files:
        log.info("the program wrote into %s, the run's own copy of the code: %s", code.folder, listed(files))
    if originals:
        remedy = "if this program wrote there, add the name to run.own_folders, so that each run has its own"
        log.warning(
            "while the program ran, something wrote into what all runs share: %s in %s; %s",
            *(listed(originals), code.root, remedy),
        )
