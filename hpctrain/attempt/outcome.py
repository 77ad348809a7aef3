"""The outcome of an attempt, from its ranks' exit records and never from an exit code that passed through srun.

For a rank's exit code 7, srun of SLURM 22.05 returned 143, 137, or 1 if another rank trapped the signal, depending on
which rank `--kill-on-bad-exit` hit first; after the failure of a node it returned 0.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from hpctrain.attempt.hang import GIL_HELD, SIGALRM_MESSAGE, hang_report
from hpctrain.attempt.termination import USER_SIGNALS, Termination
from hpctrain.config.plain_yaml import is_program
from hpctrain.errors import RunDirectoryError
from hpctrain.phrases import listed, numbered, signal_name
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.code import current_code
from hpctrain.run.config_change import changes_weights, keep_config, revert_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord, first_cause, read_exit_records
from hpctrain.run.file_system import write_with_reserve
from hpctrain.run.gone_checkpoints import allow_start_over, may_start_over, recorded_step
from hpctrain.run.ledger import EndFacts, Ledger, StartFacts
from hpctrain.run.reason import Reason
from hpctrain.run.times import TimesRecord
from hpctrain.streams import LostOutput

OUT_OF_MEMORY = re.compile(r"out of memory|oom.kill", re.IGNORECASE)
"""What srun and slurmstepd print when the kernel killed a rank that used too much memory."""
LOST_WORKER = re.compile(r"DataLoader worker \(pid.*(is killed by signal: Killed|exited unexpectedly)")
"""What torch prints for a DataLoader worker that the kernel may have killed for lack of memory."""
PROGRAM_DIED = re.compile(r"killed by SIG")
"""The first words about a program that died of a signal."""
RANK_DIED = re.compile(r"ranks? .+ on \S+: killed by ")
"""The first words of `death_complaint`."""

TIME_BOUND = "trainer.max_time_min"
"""The key that bounds the training time; the report of a run that it ended begins with it."""

log = logging.getLogger("hpctrain.attempt")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt: its reason, its last step, and the report for the user.

    Attributes:
        reason: why it ended.
        step: the last step known to be completed.
        report: lines for the user; empty when all went well, or why the run was completed before its last step.
        suspects: nodes that the failure points at, as SLURM names them.
        suspect_rank: the rank whose node the failure points at, because it reported that its machine failed.
        silent_ranks: ranks that left no exit record.
        stop_signal: number of the signal that had asked the failing rank to stop; None if none had.
        error_after_signal: the rank raised an error, but SLURM was ending the job, which is the likelier cause.
    """

    reason: Reason
    step: int
    report: str = ""
    suspects: tuple[str, ...] = ()
    suspect_rank: int | None = None
    silent_ranks: tuple[int, ...] = ()
    stop_signal: int | None = None
    error_after_signal: bool = False

    @property
    def headline(self) -> str:
        """The first line of the report."""
        return self.report.splitlines()[0] if self.report else ""

    @classmethod
    def of_attempt(cls, directory: RunDirectory, attempt: int, world_size: int, complaints: str = "") -> Outcome:
        """Find out how an attempt ended, once its ranks are gone.

        Args:
            directory: the run.
            attempt: the attempt's number.
            world_size: number of ranks.
            complaints: messages of the ranks' launcher about how they ended.
        """
        claim = directory.attempt(attempt)
        last_step = max(saved_step(directory), TimesRecord.read(claim).last_step or 0)
        independent = is_program(directory.config)
        records = read_exit_records(claim)
        outcome = cls.from_records(records, world_size, last_step, complaints, independent=independent)
        return outcome.as_cancelled if directory.is_cancelled(attempt) else outcome

    @classmethod
    def from_records(
        cls,
        records: Mapping[int, ExitRecord],
        world_size: int,
        last_step: int,
        complaints: str = "",
        *,
        independent: bool = False,
    ) -> Outcome:
        """Find out how an attempt ended.

        Args:
            records: by rank; a rank without one was killed, or could not write.
            world_size: number of ranks.
            last_step: the last step known from elsewhere, such as the newest checkpoint.
            complaints: messages of the ranks' launcher about how they ended.
            independent: whether each rank ends on its own, as a program's do, and may not report steps.
        """
        step = max([last_step, *(record.step for record in records.values())])
        after = "" if independent and not step else f" after step {step}"
        silent = tuple(rank for rank in range(world_size) if rank not in records)
        cause = first_cause(records)
        if cause is not None and cause.reason is Reason.HANG:
            return cls(Reason.HANG, step, hang_report(records, silent, after), silent_ranks=silent)
        if cause is not None and not (cause.blames_peer and silent):
            return cls._of_failure(cause, step, complaints, independent=independent)
        is_done = not silent and any(record.done for record in records.values())
        orderly = [record for record in records.values() if record.reason.meaning.orderly]
        stopped = [record for record in orderly if record.reason is not Reason.COMPLETED]
        # one such record is enough, if ranks stop together: a rank writes it after a barrier that all ranks reached
        # with everything saved
        if stopped and not is_done and not (independent and silent):
            return cls._of_stop(stopped, step, after, independent=independent)
        if silent:
            return cls._of_silence(silent, world_size, step, complaints)
        return cls(Reason.COMPLETED, step, next((record.message for record in records.values() if record.message), ""))

    @classmethod
    def _of_silence(cls, silent: tuple[int, ...], world_size: int, step: int, complaints: str) -> Outcome:
        reason, advice = Reason.INFRASTRUCTURE, "see its log" if len(silent) == 1 else "see their logs"
        if OUT_OF_MEMORY.search(complaints):
            reason = Reason.OUT_OF_MEMORY
        elif SIGALRM_MESSAGE in complaints:
            reason = Reason.HANG
            advice = GIL_HELD
        if RANK_DIED.match(complaints):
            report = f"{complaints}; {advice}"
        else:
            why = f": {complaints}" if complaints else " (killed from outside?)"
            report = f"{numbered('rank', silent)} of {world_size} ended without an exit record{why}; {advice}"
        return cls(reason, step, report, silent_ranks=silent)

    @classmethod
    def _of_failure(cls, cause: ExitRecord, step: int, complaints: str, *, independent: bool) -> Outcome:
        died = independent and PROGRAM_DIED.match(cause.message) is not None
        lost = LOST_WORKER.search(cause.message) or (died and "SIGKILL" in cause.message)
        reason = Reason.OUT_OF_MEMORY if lost and OUT_OF_MEMORY.search(complaints) else cause.reason
        # that a program dies of a signal is more often its own fault than its node's
        at_fault = cause.reason.meaning.machine_failure and not cause.blames_peer and not died
        # a program that failed after a stop is one whose exit code is to be believed (run.on_stop=exit_code)
        believed = independent and reason is Reason.FAILED
        return cls(
            reason,
            step,
            describe(cause, independent=independent),
            suspect_rank=cause.rank if at_fault else None,
            stop_signal=None if believed else cause.stop_signal,
        )

    @classmethod
    def _of_stop(cls, stopped: Sequence[ExitRecord], step: int, after: str, *, independent: bool) -> Outcome:
        reasons = [record.reason for record in stopped]
        reason = next((candidate for candidate in reasons if candidate is not Reason.INTERRUPTED), Reason.INTERRUPTED)
        if reason is Reason.PAUSED:
            return cls(reason, step, f"paused{after}: {reason.meaning.why_final}")
        if not independent:  # the ranks have asked SLURM why they were to stop
            return cls(reason, step, f"stopped{after}")
        message = next((f" ({record.message})" for record in stopped if record.message), "")
        signals = [record.stop_signal for record in stopped if record.stop_signal is not None]
        # SLURM's warning before the time limit is recognised by its signal, and SIGTERM may have followed it
        received = next((number for number in signals if number in USER_SIGNALS), signals[0] if signals else None)
        return cls(reason, step, f"stopped{after}{message}", stop_signal=received)

    @property
    def as_cancelled(self) -> Outcome:
        """The outcome of an attempt that its user has cancelled: `cancelled`, unless it completed, failed or paused."""
        if self.reason in (Reason.COMPLETED, Reason.FAILED, Reason.PAUSED, Reason.CANCELLED):
            return self
        after = "" if self.reason.meaning.orderly else f"cancelled by its user; {self.reason.value}: "
        return replace(self, reason=Reason.CANCELLED, report=f"{after}{self.report}")

    def may_be_slurms_doing(self, ledger: Ledger, attempt: int) -> bool:
        """Whether SLURM may have ended the attempt without its ranks noticing; if so, check SLURM's record of the job.

        If SLURM doesn't track processes by cgroups, it signals all of a rank's processes. A child process, such as
        a compiler, may die of that, and the rank fails with an error that looks like the task's own. The ranks of a
        program don't ask SLURM why they are to stop.
        """
        if self.reason is not Reason.FAILED:
            return self.reason not in (Reason.COMPLETED, Reason.CANCELLED, Reason.PAUSED)
        # not twice in a row: blame the task the second time, or the run could be requeued for ever
        before = [entry for entry in ledger.attempts() if entry.attempt < attempt]
        return self.stop_signal is not None and not (before and before[-1].error_after_signal)

    def with_suspects(self, nodes: Mapping[int, str], num_nodes: int) -> Outcome:
        """Find the nodes that the failure points at.

        Args:
            nodes: of the ranks, by rank, as far as they are known; SLURM's names.
            num_nodes: of the attempt. Ranks that are on all of them make no node more suspect than another.
        """
        if self.suspect_rank is None and not self.silent_ranks:
            return self
        ranks = self.silent_ranks if self.suspect_rank is None else (self.suspect_rank,)
        unlocated = [rank for rank in ranks if rank not in nodes]
        if unlocated and nodes and num_nodes > 1:
            head, line_break, details = self.report.partition("\n")
            remark = f"no start record names the node of {numbered('rank', unlocated)}"
            return replace(self, report=f"{head}; {remark}{line_break}{details}")
        suspects = tuple(sorted({nodes[rank] for rank in ranks if rank in nodes}))
        on_all_nodes = self.suspect_rank is None and len(suspects) >= num_nodes
        return self if unlocated or on_all_nodes else replace(self, suspects=suspects)

    def explained_by(self, termination: Termination | None) -> Outcome:
        """Replace the reason by SLURM's reason for ending the job, if it gives a different one."""
        if termination is None or termination.reason in (None, self.reason):
            return self
        assert termination.reason is not None
        failed = self.reason is Reason.FAILED
        report = termination.evidence
        if failed:
            report += f"; an error followed, as of a child process that the signal ended: {self.report}"
        return Outcome(termination.reason, self.step, report, error_after_signal=failed)


def describe(record: ExitRecord, *, independent: bool = False) -> str:
    """Host, rank and traceback of a rank that failed; of a program's rank, also the step if it reported one."""
    after = f", after step {record.step}" if record.step or not independent else ""
    head = f"rank {record.rank} on {record.host}{after}: {record.message}"
    return f"{head}\n{record.traceback.rstrip()}" if record.traceback else head


def death_complaint(codes: Sequence[int | None], records: Mapping[int, ExitRecord]) -> str:
    """Name the signals of which ranks of this machine died without an exit record; empty if none did.

    Args:
        codes: by rank, the exit code; None for a rank that the launcher killed.
        records: the ranks' exit records.
    """
    died: dict[int, list[int]] = {}
    for rank, code in enumerate(codes):
        if code is not None and code < 0 and rank not in records:
            died.setdefault(-code, []).append(rank)
    # a container may not see that the kernel killed it for its memory
    sources: dict[int, str] = {signal.SIGKILL: ", by hand or because memory ran out"}
    return "; ".join(
        f"{numbered('rank', ranks)} on {socket.gethostname()}: killed by {signal_name(number)}{sources.get(number, '')}"
        for number, ranks in died.items()
    )


def resume_command(directory: RunDirectory) -> str:
    """The command that resumes the run."""
    return f"python -m hpctrain resume {directory.as_typed}"


def train_further_command(directory: RunDirectory, why: str) -> str:
    """The command that continues a run which was completed before its last step.

    Args:
        directory: of the run.
        why: the report of its outcome: the key of the bound, or the name of the callback, comes first.
    """
    change = f"{TIME_BOUND}=MINUTES" if why.startswith(TIME_BOUND) else f"'~callbacks.{why.partition(':')[0]}'"
    return f"{resume_command(directory)} {change}"


def resume_advice(directory: RunDirectory, reason: Reason) -> str:
    """Return how to resume a run whose last attempt ended for ``reason``; empty for a completed run."""
    if reason is Reason.COMPLETED:
        return ""
    # with the same code and the same keys, it would fail again
    if reason is not Reason.FAILED:
        return f"to resume: {resume_command(directory)}"
    has_copy = False
    with contextlib.suppress(OSError, RunDirectoryError):
        has_copy = current_code(directory) is not None  # which no correction reaches
    return f"once the cause is fixed, resume with: {resume_command(directory)}{' --code=now' if has_copy else ''}"


def record_end(
    directory: RunDirectory,
    attempt: int,
    outcome: Outcome,
    lost: Mapping[int, LostOutput] = MappingProxyType({}),
    /,
    *,
    world_size: int,
    job_id: str | None = None,
    nodes: Sequence[str] = (),
    ends_run: bool = False,
    facts: EndFacts | None = None,
    code: str | None = None,
) -> None:
    """Record the end of an attempt, and its start if the ranks didn't get that far; the first recorded end counts.

    Args:
        directory: the run.
        attempt: the attempt's number.
        outcome: how it ended.
        lost: by rank, the output that its log lacks, in addition to what its exit record says.
        world_size: number of ranks; this, `job_id`, `nodes` and `code` are fields of the start.
        job_id: its job's id.
        nodes: the nodes of its ranks.
        ends_run: whether no attempt follows automatically. If so, and no step was trained with the configuration of a
            resume, the one from before it is restored, unless the attempt was stopped or cancelled.
        facts: more fields of the end; `saved_step`, `error_after_signal` and `incomplete_logs` follow from the others.
        code: digest of the copy of the code; None if there is none, or it isn't known.

    Raises:
        OSError: the ledger can't be written.
    """
    ledger, saved = Ledger(directory), saved_step(directory)
    if directory.is_cancelled(attempt):
        outcome = outcome.as_cancelled
    entry = ledger.attempt(attempt)
    if not entry.open:
        return
    if entry.start_time is None:
        # no rank has started: pass on the step of a checkpoint that is gone, and the permission to start over
        step = max(saved, recorded_step(directory))
        if may_start_over(directory):
            allow_start_over(directory, attempt)
        start = partial(ledger.start, attempt, job_id=job_id, nodes=nodes, world_size=world_size, step=step)
        write_with_reserve(directory.attempt(attempt), partial(start, StartFacts(code=code)))
        outcome = replace(outcome, step=max(step, outcome.step))
    if ends_run and directory.config_before.exists():
        conclude = partial(_conclude_change, directory, attempt, outcome.reason)
        write_with_reserve(directory.attempt(attempt), conclude)
    if incomplete := _incomplete_logs(directory, attempt, lost):
        log.warning("the log is incomplete: %s", incomplete)
    facts = replace(
        facts or EndFacts(),
        saved_step=saved,
        error_after_signal=outcome.error_after_signal,
        incomplete_logs=incomplete or None,
    )
    ledger.end(attempt, facts, reason=outcome.reason, step=outcome.step, detail=outcome.headline)


def _conclude_change(directory: RunDirectory, attempt: int, reason: Reason) -> None:
    """Keep or revert a resume's change to the configuration, if the run ended before a step was trained with it."""
    # after a stop or a cancellation, the advice is a plain `resume`, which is to continue with the change
    reverts = not reason.meaning.orderly
    if reason is Reason.COMPLETED:
        earlier = [entry.reason for entry in Ledger(directory).attempts() if entry.attempt < attempt]
        if not (reverts := changes_weights(directory) or earlier[-1:] == [Reason.COMPLETED]):
            keep_config(directory)  # a run that is complete because it was made shorter keeps its new length
    if reverts and revert_config(directory):
        what = "no step was trained" if reason is Reason.COMPLETED else "the attempt failed before it trained"
        log.warning("%s: restored the configuration from before this resume", what)


def _incomplete_logs(directory: RunDirectory, attempt: int, lost: Mapping[int, LostOutput]) -> str:
    """Name the logs that lack lines, in one line; empty if all are complete."""
    records = read_exit_records(directory.attempt(attempt))
    lacking = dict(lost)
    for rank, record in records.items():
        lacking[rank] = lacking.get(rank, LostOutput()) + LostOutput(record.lost_lines, record.lost_bytes)
    texts = [f"logs/rank_{rank}.log lacks {output}" for rank, output in sorted(lacking.items()) if output.size_bytes]
    return listed(texts, max_names=2)
