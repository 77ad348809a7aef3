"""One rank of an attempt: its files in the run directory, its parts as they become known, and its exit record."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, TextIO

from hpctrain.attempt.hang import PEERS_S
from hpctrain.attempt.outcome import Outcome, record_end, resume_command
from hpctrain.attempt.termination import ask_termination
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import Config
from hpctrain.errors import HpctrainError, SchedulerError, error_text
from hpctrain.rank.classification import NCCL_ERRORS
from hpctrain.rank.stacks import STDERR, StackPosition
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord, first_cause, read_exit_records
from hpctrain.run.launcher import LauncherFacts, Owner
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.stacks import request_stacks
from hpctrain.run.times import Times
from hpctrain.scheduler.slurm import Slurm
from hpctrain.streams import LostOutput, lost_output

if TYPE_CHECKING:
    from hpctrain.rank.world import World
    from hpctrain.sync.sender_processes import SenderProcesses
    from hpctrain.train.loop import Loop

FINISH_WRITING_S = 20.0
"""Seconds to finish writing a checkpoint when the rank fails: rank zero has the whole checkpoint in memory. SLURM
kills the other tasks of a failed step after its KillWait, 30 s by default."""
ASK_TIMEOUT_S = 5.0
"""Seconds to wait for SLURM's answer: this rank may be killed soon."""

log = logging.getLogger("hpctrain.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank's place in an attempt, of a training or of a program: its files, its claim and its exit record.

    Attributes:
        environment: its place among the ranks.
        claim: of the attempt.
    """

    environment: ClusterEnvironment
    claim: Claim

    @property
    def directory(self) -> RunDirectory:
        """The run directory."""
        return self.claim.ledger.directory

    @property
    def attempt(self) -> int:
        """The attempt's number."""
        return self.claim.attempt

    @property
    def claim_folder(self) -> Path:
        """The folder of the claim."""
        return self.directory.attempt(self.attempt)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero, which records for all ranks."""
        return self.environment.rank == 0

    @property
    def stacks(self) -> Path:
        """The file for its stacks."""
        return self.directory.stacks(self.attempt, self.environment.rank)

    @property
    def stacks_request(self) -> Path:
        """The file by which other processes request stacks."""
        return self.directory.stacks_request(self.attempt)

    def describe(self, step: int) -> str:
        """Rank, host, attempt and step."""
        place = f"rank {self.environment.rank} of {self.environment.world_size} on {socket.gethostname()}"
        return f"{place}, attempt {self.attempt}, step {step}"

    def exit_record(self, reason: Reason, step: int, lost: LostOutput, message: str = "") -> ExitRecord:
        """Make the exit record of a rank that ends now.

        Args:
            reason: why it ends.
            step: the last one that it completed.
            lost: the output that its log lacks.
            message: one line about the end.
        """
        return ExitRecord(
            rank=self.environment.rank,
            host=socket.gethostname(),
            reason=reason,
            step=step,
            message=message,
            time=time.time(),
            lost_lines=lost.lines,
            lost_bytes=lost.size_bytes,
        )

    def write(self, record: ExitRecord) -> None:
        """Write the exit record; an error of the file system is only logged."""
        try:
            record.write(self.claim_folder)
        except OSError as refused:
            log.warning("the exit record can't be written: %s", refused)


@dataclass(slots=True)
class HostProgram:
    """A user's program in which a rank trains: it outlives the attempt, and the attempt's error is its own.

    Attributes:
        stop: the rank's request to stop.
        error: the error that ended the attempt; None if it ended cleanly.
    """

    stop: StopRequest = field(default_factory=StopRequest)
    error: BaseException | None = None


@dataclass(slots=True)
class Rank:
    """The state of a training's rank, which grows from its environment to its exit record.

    It begins with its configuration and its place. Then `train.attempt.run_attempt` sets `member`, `log_stream`,
    `world` and `loop`, in this order. Its exit record contains what is known by then. The watchdog reads the rank
    from other threads, so no property may take a lock that the main thread could hold.

    Attributes:
        config: of the run.
        environment: its place.
        launcher: what the launcher passed to it.
        stop: its request to stop.
        times: where its time goes.
        member: its files and records, once its attempt is known.
        program: in which it trains, if its process is a user's.
        world: the ranks, once they have met.
        loop: the loop of the training, once it is resumed.
        log_stream: its log, if standard output doesn't go there already.
        senders: that send the run to services, once they are started; on rank zero alone.
    """

    config: Config
    environment: ClusterEnvironment
    launcher: LauncherFacts
    stop: StopRequest
    times: Times
    member: Member | None = None
    program: HostProgram | None = None
    world: World | None = None
    loop: Loop | None = None
    log_stream: TextIO | None = None
    senders: SenderProcesses | None = None

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero, which acts for all ranks."""
        return self.environment.rank == 0

    @property
    def step(self) -> int:
        """Completed steps, as far as this rank knows."""
        return self.loop.step if self.loop is not None else 0

    @property
    def why_ended(self) -> str:
        """The reason for which the run was completed before its last step; empty if it wasn't."""
        return self.loop.why_ended if self.loop is not None else ""

    @property
    def progress(self) -> object:
        """A value that changes whenever this rank makes progress."""
        return self.loop.progress if self.loop is not None else None

    @property
    def communication_error(self) -> str:
        """The error that NCCL has reported about this rank's communicator; empty without one."""
        return "" if self.world is None else self.world.communication_error()

    @property
    def superseded(self) -> bool:
        """Whether a later attempt owns the run; False while the attempt is unknown or the file system fails."""
        if self.member is None:
            return False
        try:
            return not self.member.claim.ledger.owns(self.member.attempt)
        except OSError:
            return False

    @property
    def stacks(self) -> Path | None:
        """The file for its stacks, once its attempt is known."""
        return None if self.member is None else self.member.stacks

    @property
    def description(self) -> str:
        """Rank, host, attempt and step."""
        if self.member is None:
            place = self.environment
            return f"rank {place.rank} of {place.world_size} on {socket.gethostname()}, before its attempt"
        return self.member.describe(self.step)

    @property
    def lost_output(self) -> LostOutput:
        """The output that its log lacks because the file couldn't be written."""
        return lost_output(self.log_stream, *((sys.stdout, sys.stderr) if self.launcher.logged else ()))

    def write_exit_record(
        self, reason: Reason, error: BaseException | None = None, *, blames_peer: bool = False, advice: str = ""
    ) -> None:
        """Write the exit record, if the attempt is known; an error of the file system is only logged.

        `attempt.outcome.Outcome.of_attempt` reads the records of all ranks, and derives how the attempt ended.

        Args:
            reason: why this rank ends.
            error: the error that ends it.
            blames_peer: whether the error points at another rank.
            advice: what to change in the configuration.
        """
        if self.member is None:
            return
        record = replace(
            self.member.exit_record(reason, self.step, self.lost_output),
            message=self.why_ended if error is None else headline(error, advice),
            # the message of hpctrain's own errors is written for the user; a traceback through hpctrain adds nothing
            traceback="" if error is None or isinstance(error, HpctrainError) else "".join(format_exception(error)),
            blames_peer=blames_peer,
            stop_signal=self.stop.last_signal,
        )
        self.member.write(record)

    def record_hang(self, message: str, position: StackPosition) -> None:
        """Record that this rank hangs; runs in the watchdog's thread.

        Args:
            message: one line: the time without progress, the key that bounds it, and the rank's position.
            position: of the thread that hangs.
        """
        member = self.member
        if member is None:
            return
        alone = self.environment.world_size == 1
        # without the stop signal, on which a hanging rank doesn't act
        record = replace(
            member.exit_record(Reason.HANG, self.step, self.lost_output),
            message=f"{message}; stacks: {member.stacks}",
            traceback=position.stack,
            blames_peer=position.waits and not alone,
        )
        record.write(member.claim_folder)
        if self.world is not None and not alone:
            # after the first record: reading asks the device, which may be what hangs
            collectives = self.world.collectives()
            # a rank whose GPU waits for NCCL waits for other ranks, wherever Python is
            blames_peer = record.blames_peer or (collectives is not None and collectives.waits_on_nccl)
            record = replace(record, collectives=collectives, blames_peer=blames_peer)
            record.write(member.claim_folder)
        # the other ranks lose their connections when this process ends: give them time to record their own state first
        cause = record if alone else self.wait_for_peer_cause(ask_for_stacks=True) or record
        detail = _detail(cause)
        owner = Owner.read(member.claim_folder)
        if owner is not None and owner.is_here and owner.pid == os.getpid():
            # the launcher, which would close the attempt, is this process and ends with it
            outcome = Outcome(Reason.HANG, self.step, detail)
            record_own_end(member.directory, member.attempt, outcome, self.environment)
            remedy = resume_command(member.directory)
            os.write(STDERR, f"hpctrain: stacks: {member.stacks}; to resume: {remedy}\n".encode())
        else:
            self.close_attempt(Reason.HANG, detail)

    def record_communication_error(self, error: str) -> None:
        """Record an NCCL error that the training thread didn't raise in time; called in the watchdog's thread."""
        reason = Reason.HANG if error == "TIMEOUT" else Reason.INFRASTRUCTURE
        message = NCCL_ERRORS.get(error, f"NCCL reports {error}; this rank ends")
        os.write(STDERR, f"hpctrain: {self.description}: {message}\n".encode())
        if self.member is not None:
            record = self.member.exit_record(reason, self.step, self.lost_output, message)
            replace(record, blames_peer=True).write(self.member.claim_folder)
        self.finish_writing()
        self.close_attempt_for_peer(reason, message)

    def wait_for_peer_cause(self, *, ask_for_stacks: bool) -> ExitRecord | None:
        """Wait for the other ranks' exit records; return that of the first rank to fail, or None if there is none."""
        if self.member is None:
            return None
        if ask_for_stacks:
            # a rank that keeps the others waiting may still be able to write its stacks
            with contextlib.suppress(HpctrainError):
                request_stacks(self.member.stacks_request)
        time.sleep(PEERS_S)
        return first_cause(read_exit_records(self.member.claim_folder))

    def start_senders(self) -> None:
        """Start the processes that send the run to W&B and MLflow, if it enables one of them."""
        if self.member is not None and self.config.logger.enabled_services:
            from hpctrain.sync.sender_processes import SenderProcesses  # not needed by a run that is sent nowhere

            self.senders = SenderProcesses(self.member.directory, self.config.logger)
            self.senders.start()

    def complete_senders(self) -> None:
        """Wait a few seconds until the services have the completed run, unless a signal asks this process to stop."""
        if self.senders is not None:
            with contextlib.suppress(KeyboardInterrupt):
                self.senders.complete(lambda: self.stop.last_signal is not None)

    def leave_senders(self) -> None:
        """Let the processes that send the run end by themselves."""
        if self.senders is not None:
            self.senders.leave()

    def leave_world(self) -> None:
        """Leave the world without waiting. Write the exit record first: peers look for it when they lose this rank."""
        if self.world is not None:
            self.world.abort(process_ends=self.program is None)

    def finish_writing(self) -> None:
        """Wait until a checkpoint is written, for at most `FINISH_WRITING_S` or until Ctrl-C."""
        if self.loop is not None:
            with contextlib.suppress(KeyboardInterrupt):
                self.loop.finish_save_within(FINISH_WRITING_S)

    def close_attempt(self, reason: Reason, detail: str = "") -> None:
        """Record the attempt's end if the ranks were started by hand, since no launcher records it.

        The job isn't requeued: a rank can't judge its own death, and the decision would exist twice, here and in the
        supervisor.
        """
        if self.member is None or self.launcher.attempt is not None:
            return
        outcome = Outcome(reason, self.step, detail, stop_signal=self.stop.last_signal)
        record_own_end(self.member.directory, self.member.attempt, outcome, self.environment)

    def close_attempt_for_peer(self, reason: Reason, detail: str) -> None:
        """Close the attempt after an error that points at another rank, with that rank's own record if there is one.

        Args:
            reason: as this rank saw it.
            detail: as this rank saw it.
        """
        cause = self.wait_for_peer_cause(ask_for_stacks=reason is Reason.HANG)
        if cause is None or cause.rank == self.environment.rank:
            self.close_attempt(reason, detail)
        else:
            self.close_attempt(cause.reason, _detail(cause))


def headline(error: BaseException, advice: str) -> str:
    """The error, after the advice on it, if there is any."""
    return ": ".join(filter(None, (advice, f"{type(error).__name__}: {error_text(error)}")))


def _detail(record: ExitRecord) -> str:
    return f"rank {record.rank} on {record.host}: {record.message}"


def record_own_end(directory: RunDirectory, attempt: int, outcome: Outcome, environment: ClusterEnvironment) -> None:
    """Record the end of the attempt as this rank saw it; the first rank's record counts.

    Nothing is restarted or requeued: that takes a supervisor, which outlives the ranks.
    """
    # after a second Ctrl-C the outcome has its report already
    in_doubt = outcome.reason is Reason.FAILED or (outcome.reason is Reason.INTERRUPTED and not outcome.report)
    if environment.job_id is not None and in_doubt and outcome.may_be_slurms_doing(Ledger(directory), attempt):
        slurm, restarts = Slurm(timeout_s=ASK_TIMEOUT_S), environment.restart_count
        try:
            termination = ask_termination(slurm, environment.job_id, outcome.stop_signal, restarts=restarts)
        except SchedulerError as error:
            log.info("can't query SLURM about why the ranks were stopped: %s", error)
        else:
            outcome = outcome.explained_by(termination)
    record_end(
        directory,
        attempt,
        outcome,
        world_size=environment.world_size,
        job_id=environment.job_id,
        nodes=environment.nodes,
        ends_run=True,
    )
