"""A client for SLURM that runs its commands."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler import command, settings
from hpctrain.scheduler.command import UnknownJobError, array_tasks, run
from hpctrain.scheduler.gres import SiteGpus
from hpctrain.scheduler.job import JobState, SlurmJob
from hpctrain.scheduler.settings import Association, Partition, Settings

COMMAND_TIMEOUT_S = 20.0
"""Seconds that one SLURM command may take."""
SILENCE_S = 300.0
"""Seconds for which the batch script retries a query: during a failover, the controller doesn't answer for slightly
more than `SlurmctldTimeout`, 120 s by default."""
MOST_IDS = 5_000
"""Job ids in one command: Linux allows 128 KiB per argument (MAX_ARG_STRLEN in execve(2))."""
CANCELLED_AT_ONCE = 100
"""Jobs in one call of scancel, which sends the controller a request for each, and has `COMMAND_TIMEOUT_S` for them."""

MOST_DEPENDENCIES = 100
"""Jobs that a dependency names; more are named by their arrays, since the controller checks each in every cycle."""

JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")
"""A job, or a task of a job array."""


class Slurm:
    """The SLURM cluster that this machine's commands reach, with or without accounting.

    The commands are on every cluster, and their output is read from 22.05 to 26.05; pyslurm binds to the libraries of
    one release.

    Job ids are what users type: `12`, or `12_3` for a task of an array. Every method raises `SchedulerMissingError`
    if the command isn't installed, its subclass `SchedulerSilentError` if SLURM doesn't answer in time, and
    `SchedulerError` if SLURM rejects the command, its answer can't be parsed, or an id is invalid.

    Args:
        environ: environment variables for the commands, including PATH; default: this process's.
        timeout_s: seconds that one command may take.
        run: runs a command, as `hpctrain.scheduler.command.run` does.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        timeout_s: float = COMMAND_TIMEOUT_S,
        run: Callable[[Sequence[str], Mapping[str, str], float], str] = run,
    ) -> None:
        self._environ = environ
        self._timeout_s = timeout_s
        self._run_command = run

    def show(self, job_id: str) -> SlurmJob | None:
        """SLURM's record of a job; None if the controller doesn't know the job, or no longer remembers it (MinJobAge).

        For an array's id: the record of the task that has the array's own number.
        """
        try:
            records = command.scontrol(self._run("scontrol", "show", "job", _checked(job_id)))
        except UnknownJobError:
            return None
        matches = [record for record in records if job_id in {record.job_id, str(record.number)}] or records
        return matches[0] if matches else None

    def queue(self, job_ids: Iterable[str]) -> dict[str, SlurmJob]:
        """The controller's records of many jobs, from one query; finished jobs included, for MinJobAge.

        An array's id stands for all of its tasks. Unknown jobs are left out.
        """
        # --all: hidden partitions too; --array: a row per task; --states: without it, finished jobs are left out
        options = ("--noheader", "--all", "--array", "--states=all", f"--Format={command.SQUEUE_FORMAT}")
        records: dict[str, SlurmJob] = {}
        for ids in _in_command_lines(_all_checked(job_ids)):
            with suppress(UnknownJobError):
                answer = self._run("squeue", *options, f"--jobs={ids}")
                records |= {record.job_id: record for record in command.squeue(answer)}
        return records

    def accounting(self, job_ids: Iterable[str]) -> dict[str, SlurmJob]:
        """The accounting database's records of many jobs, from one query; an array's id stands for all of its tasks.

        It lags behind the controller by a few seconds, in which a row can lack its name and time limit.

        Raises:
            SchedulerMissingError: also if there is no accounting.
        """
        return {
            task: replace(record, job_id=task)
            for ids in _in_command_lines(_all_checked(job_ids))
            for record in self._sacct(ids)
            for task in array_tasks(record.job_id)
        }

    def before_requeue(self, job_id: str) -> SlurmJob | None:
        """The record of a job's end before its last requeue; None if accounting has no earlier end.

        Raises:
            SchedulerMissingError: also if there is no accounting.
        """
        records = [record for record in self._sacct(_checked(job_id), duplicates=True) if record.state.is_finished]
        return records[-1] if records else None

    def find(self, job_ids: Collection[str]) -> dict[str, SlurmJob | None]:
        """The record of each job, from squeue, or else from sacct; None if neither has one.

        Raises:
            SchedulerMissingError: the controller doesn't answer, and accounting doesn't know all of them: it may not
                have received the missing ones yet.
        """
        ids = list(dict.fromkeys(job_ids))
        records: dict[str, SlurmJob] = {}
        silent: SchedulerMissingError | None = None
        try:
            records |= self.queue(ids)
            records |= self._cancelled_in_queue([job_id for job_id in ids if job_id not in records])
        except SchedulerMissingError as error:
            silent = error
        if missing := [job_id for job_id in ids if job_id not in records]:
            with suppress(SchedulerMissingError):  # many clusters have no accounting
                records |= self.accounting(missing)
        if silent is not None and not records.keys() >= set(ids):
            raise silent
        return {job_id: records.get(job_id) for job_id in ids}

    def failed_nodes(self, names: Collection[str], since: float) -> tuple[str, ...]:
        """Find those of these nodes that are down, or were restarted after `since` (epoch seconds)."""
        if not names:
            return ()
        return command.failed_nodes(self._run("scontrol", "--oneliner", "show", "node", ",".join(names)), since)

    def largest_array(self) -> int:
        """The largest number of tasks of a job array; 1 where SLURM takes no arrays."""
        return command.largest_array(self._run("scontrol", "show", "config"))

    def batch_host(self, job_id: str) -> str | None:
        """The node of a job's batch script; None if it never began, or SLURM has forgotten the job."""
        try:
            return command.batch_host(self._run("scontrol", "show", "job", _checked(job_id)))
        except UnknownJobError:
            return None

    def settings(self) -> Settings:
        """SLURM's settings."""
        return settings.settings(self._run("scontrol", "show", "config"))

    def partitions(self) -> list[Partition]:
        """The partitions that this user may see."""
        return settings.partitions(self._run("scontrol", "--all", "--oneliner", "show", "partition"))

    def gpus(self) -> SiteGpus:
        """The GPUs of the nodes that this user may see."""
        return SiteGpus.of_nodes(settings.records(self._run("scontrol", "--all", "--oneliner", "show", "node")))

    def associations(self, user: str, cluster: str) -> list[Association]:
        """The user's accounts on a cluster, and what they allow.

        Raises:
            SchedulerMissingError: also if there is no accounting.
        """
        options = ("--noheader", "--parsable2", "show", "associations", "where", f"user={user}", f"cluster={cluster}")
        return settings.associations(self._run("sacctmgr", *options, f"format={settings.ASSOCIATION_FORMAT}"))

    def cancel(self, job_id: str) -> None:
        """Take a job out of the queue, or end it; do nothing if it is over."""
        with suppress(UnknownJobError):  # the controller forgets a job some minutes after its end (MinJobAge)
            self._run("scancel", _checked(job_id))

    def cancel_all(self, job_ids: Sequence[str]) -> dict[str, SchedulerError]:
        """Cancel many jobs in few calls; do nothing to those that are over.

        Returns:
            Why a job can't be cancelled, by its id; empty if all were.
        """
        errors: dict[str, SchedulerError] = {}
        for first in range(0, len(job_ids), CANCELLED_AT_ONCE):
            batch = job_ids[first : first + CANCELLED_AT_ONCE]
            try:
                self._run("scancel", *_all_checked(batch))
            except SchedulerMissingError as error:
                errors |= dict.fromkeys(batch, error)
            except SchedulerError:
                # which of them SLURM refused shows one at a time, and a second request does no harm
                for job_id in batch:
                    try:
                        self.cancel(job_id)
                    except SchedulerError as error:
                        errors[job_id] = error
        return errors

    def cancel_pending(self, job_id: str) -> None:
        """Take a job, or the tasks of an array, out of the queue; leave what runs alone."""
        with suppress(UnknownJobError):
            self._run("scancel", "--state=PENDING", _checked(job_id))

    def steps(self, job_id: str, name: str) -> tuple[str, ...]:
        """The ids of a job's steps of this name that still run, such as `12.0` or `12_3.0`."""
        try:
            # a job's id names all tasks of its array
            answer = self._run("squeue", "--noheader", "--steps", "--format=%i|%j", f"--jobs={_checked(job_id)}")
        except UnknownJobError:
            return ()
        rows = (line.strip().partition("|") for line in answer.splitlines())
        return tuple(step for step, _, step_name in rows if step_name == name and step.rpartition(".")[0] == job_id)

    def signal_step(self, step_id: str, number: signal.Signals) -> None:
        """Send a signal to the tasks of a step; do nothing if it is over."""
        with suppress(UnknownJobError):
            self._run("scancel", f"--signal={number.name.removeprefix('SIG')}", step_id)

    def requeue(self, job_id: str, restarts: int | None = None) -> None:
        """Put a running or finished job back into the queue under its id; this revives a cancelled job, too.

        An array's own id would requeue all of its tasks, including completed ones: pass the task's id.

        Args:
            job_id: of the job.
            restarts: how often it had been requeued before. If given, a rejection isn't an error if SLURM has requeued
                the job since.

        Raises:
            SchedulerError: the job can't be requeued.
        """
        try:
            self._run("scontrol", "requeue", _checked(job_id))
        except SchedulerMissingError:
            raise  # a subclass of the next, but no answer isn't a rejection
        except SchedulerError:
            # SLURM rejects a requeue if it has requeued the job itself, as after a preemption without grace time
            record = None if restarts is None else self.show(job_id)
            if record is None or record.state is JobState.RUNNING:
                raise
            if not (record.state.is_pending or (record.restarts or 0) > (restarts or 0)):
                raise

    def delay(self, job_id: str, job_ids: Sequence[str], seconds: float) -> None:
        """Let a job in the queue start after the end of other jobs, or without any after some seconds.

        Raises:
            SchedulerError: the job isn't in the queue: SLURM 22.05 refuses it for a running job.
        """
        start = f"Dependency={dependency_on(job_ids)}" if job_ids else f"StartTime=now+{seconds:.0f}"
        self._run("scontrol", "update", f"JobId={_checked(job_id)}", start)

    def forbid_requeue(self, job_id: str) -> None:
        """Keep SLURM from requeueing a job when it ends, or when one of its nodes fails.

        Raises:
            SchedulerError: SLURM refuses it, as for a job that has ended.
        """
        self._run("scontrol", "update", f"JobId={_checked(job_id)}", "Requeue=0")

    def _cancelled_in_queue(self, tasks: list[str]) -> dict[str, SlurmJob]:
        """Find array tasks that were cancelled before they started: SLURM then remembers only the array."""
        arrays = {task: task.partition("_")[0] for task in tasks if "_" in task}
        records = self.queue(sorted(set(arrays.values())))
        return {
            task: replace(records[array], job_id=task)
            for task, array in arrays.items()
            if array in records and records[array].state.is_finished
        }

    def _sacct(self, ids: str, duplicates: bool = False) -> list[SlurmJob]:
        # --allocations: without the job's steps; --duplicates: also the records before each requeue
        options = ["--noheader", "--parsable2", "--allocations", f"--format={command.SACCT_FORMAT}"]
        options += ["--duplicates"] if duplicates else []
        return command.sacct(self._run("sacct", *options, f"--jobs={ids}"))

    def _run(self, *arguments: str) -> str:
        return self._run_command(arguments, self._environ, self._timeout_s)


def dependency_on(job_ids: Sequence[str]) -> str:
    """The dependency on the end of jobs, however they end, as sbatch and scontrol take it.

    On SLURM 22.05, `afterany` on a job that is requeued stays unfulfilled until the job ends for good; on one that
    SLURM has forgotten, it is accepted and fulfilled.

    Raises:
        SchedulerError: an id is invalid.
    """
    return f"afterany:{':'.join(_at_most(MOST_DEPENDENCIES, _all_checked(job_ids)))}"


def _checked(job_id: str) -> str:
    if not JOB_ID.fullmatch(job_id):
        raise SchedulerError(f"expected a job id such as 12 or 12_3, found {job_id!r}")
    return job_id


def _all_checked(job_ids: Iterable[str]) -> list[str]:
    return [_checked(job_id) for job_id in dict.fromkeys(job_ids)]


def _in_command_lines(job_ids: Sequence[str]) -> Iterator[str]:
    """Join ids by commas, in as few texts as the length of a command's argument allows; none without an id."""
    ids = _at_most(MOST_IDS, job_ids)
    return (",".join(ids[first : first + MOST_IDS]) for first in range(0, len(ids), MOST_IDS))


def _at_most(count: int, job_ids: Sequence[str]) -> Sequence[str]:
    """The ids, or if there are more than so many, those of their arrays: each stands for all of its tasks."""
    return job_ids if len(job_ids) <= count else list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
