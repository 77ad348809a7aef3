"""A client for SLURM, by way of its commands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler import answers, fields
from hpctrain.scheduler.command import SchedulerSilentError, UnknownJobError, run
from hpctrain.scheduler.job import JobRecord

COMMAND_TIMEOUT_S = 20.0
"""Seconds that one command of SLURM's may take."""
SILENCE_S = 300.0
"""Seconds for which the batch script asks again: a controller that fails over is silent for `SlurmctldTimeout`, by
default 120 s, and a little more."""

_JOB_ID = re.compile(r"\d+(_\d+)?")


class Slurm:
    """The SLURM that this machine's commands reach, with or without accounting.

    Job ids are what users type: `12`, or `12_3` for a task of an array. Every method raises `SchedulerMissingError`
    where the command isn't installed, its subclass `SchedulerSilentError` where nothing answers in time, and
    `SchedulerError` where SLURM refuses, its answer can't be read, or an id isn't one.

    Args:
        environ: environment variables for the commands, PATH among them; default: this process's.
        timeout_s: seconds that one command may take.
        run: runs a command, as `hpctrain.scheduler.command.run` does.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = COMMAND_TIMEOUT_S,
        run: Callable[[Sequence[str], Mapping[str, str], float], str] = run,
    ) -> None:
        self._environ = environ
        self._timeout_s = timeout_s
        self._run_command = run

    def available(self) -> bool:
        """Whether the commands are here and a controller answers them."""
        try:
            self._run("squeue", "--noheader", "--states=PENDING", "--Format=JobID", "--user=0")
        except SchedulerError:
            return False
        return True

    def show(self, job_id: str) -> JobRecord | None:
        """All that SLURM knows about a job; None when it doesn't know it, or has forgotten it since (MinJobAge).

        Of an array as a whole: that part of it that has the array's own number.
        """
        try:
            records = answers.scontrol(self._run("scontrol", "show", "job", _checked(job_id)))
        except UnknownJobError:
            return None
        chosen = [record for record in records if job_id in {record.job_id, str(record.number)}] or records
        return chosen[0] if chosen else None

    def queue(self, job_ids: Iterable[str]) -> dict[str, JobRecord]:
        """What the controller remembers of many jobs, in one question; the finished ones too, for MinJobAge.

        An array's id stands for all of its tasks. Unknown jobs are left out.
        """
        ids = _all_checked(job_ids)
        if not ids:
            return {}
        options = ("--noheader", "--all", "--array", "--states=all", f"--Format={answers.SQUEUE_FORMAT}")
        try:
            answer = self._run("squeue", *options, f"--jobs={','.join(ids)}")
        except UnknownJobError:
            return {}
        return {record.job_id: record for record in answers.squeue(answer)}

    def accounting(self, job_ids: Iterable[str]) -> dict[str, JobRecord]:
        """What the accounting database holds of many jobs, in one question; an array's id stands for all of its tasks.

        It trails the controller by some seconds, in which a row can lack its name and time limit.

        Raises:
            SchedulerMissingError: also where there is no accounting.
        """
        ids = _all_checked(job_ids)
        if not ids:
            return {}
        return {
            task: replace(record, job_id=task)
            for record in self._sacct(*ids)
            for task in fields.array_tasks(record.job_id)
        }

    def before_requeue(self, job_id: str) -> JobRecord | None:
        """How a job ended the last time, before it was requeued; None where the accounting has no earlier end of it.

        Raises:
            SchedulerMissingError: also where there is no accounting.
        """
        ended = [record for record in self._sacct(_checked(job_id), duplicates=True) if record.state.is_finished]
        return ended[-1] if ended else None

    def find(self, job_ids: Collection[str]) -> dict[str, JobRecord | None]:
        """Each job, from whichever of squeue, scontrol and sacct knows it; None for one that none of them knows.

        Raises:
            SchedulerMissingError: the controller doesn't answer, and the accounting doesn't know all of them: it may
                not have heard yet of those that are missing.
        """
        wanted = list(dict.fromkeys(job_ids))
        found: dict[str, JobRecord] = {}
        silent: SchedulerMissingError | None = None
        try:
            found |= self._remembered(wanted)
        except SchedulerMissingError as error:
            silent = error
        if missing := [job_id for job_id in wanted if job_id not in found]:
            with suppress(SchedulerMissingError):  # many clusters have none
                found |= self.accounting(missing)
        if silent is not None and not found.keys() >= set(wanted):
            raise silent
        return {job_id: found.get(job_id) for job_id in wanted}

    def failed_nodes(self, names: Collection[str], since: float) -> tuple[str, ...]:
        """Which of these nodes are down, or were started again after `since` (epoch seconds)."""
        if not names:
            return ()
        return answers.failed_nodes(self._run("scontrol", "--oneliner", "show", "node", ",".join(names)), since)

    def start_estimate(self, job_id: str) -> int | None:
        """When SLURM expects a pending job to start, in seconds since the epoch; None when it doesn't foresee it."""
        options = ("--noheader", "--all", "--array", "--start", "--format=%S")  # --start overrules a --Format
        try:
            answer = self._run("squeue", *options, f"--jobs={_checked(job_id)}")
        except UnknownJobError:
            return None
        times = [fields.moment(value) for value in answer.splitlines()]
        return min((time for time in times if time is not None), default=None)

    def cancel(self, job_id: str) -> None:
        """Take a job out of the queue, or end it; nothing happens to one that is over."""
        try:
            self._run("scancel", _checked(job_id))
        except UnknownJobError:
            return

    def requeue(self, job_id: str, restarts: int | None = None) -> None:
        """Put a running or finished job back into the queue under its id; this revives a cancelled job, too.

        An array's own id would requeue all of its tasks, the completed ones included: give the task's.

        Args:
            job_id: of the job.
            restarts: how often it had been requeued before. Given that, a refusal isn't an error if SLURM has requeued
                the job since.

        Raises:
            SchedulerError: the job can't be requeued.
        """
        try:
            self._run("scontrol", "requeue", _checked(job_id))
        except SchedulerMissingError:
            raise
        except SchedulerError:
            # SLURM refuses where it has requeued the job itself, as after a preemption without grace time
            record = None if restarts is None else self.show(job_id)
            if record is None or not (record.state.is_pending or (record.restarts or 0) > (restarts or 0)):
                raise

    def _remembered(self, job_ids: list[str]) -> dict[str, JobRecord]:
        """What the controller remembers, by scontrol where squeue is missing."""
        try:
            found = self.queue(job_ids)
        except SchedulerSilentError:
            raise  # a controller that doesn't answer squeue doesn't answer scontrol either
        except SchedulerMissingError:
            shown = {job_id: self.show(job_id) for job_id in job_ids}
            return {job_id: record for job_id, record in shown.items() if record is not None}
        return found | self._cancelled_in_queue([job_id for job_id in job_ids if job_id not in found])

    def _cancelled_in_queue(self, tasks: list[str]) -> dict[str, JobRecord]:
        """Tasks of arrays that were cancelled before they started: SLURM then remembers the array, but no task."""
        arrays = {task: task.partition("_")[0] for task in tasks if "_" in task}
        found = self.queue(sorted(set(arrays.values())))
        return {
            task: replace(found[array], job_id=task)
            for task, array in arrays.items()
            if array in found and found[array].state.is_finished
        }

    def _sacct(self, *ids: str, duplicates: bool = False) -> list[JobRecord]:
        options = ["--noheader", "--parsable2", "--allocations", f"--delimiter={answers.FIELD_END}"]
        options += ["--duplicates"] if duplicates else []
        return answers.sacct(
            self._run("sacct", *options, f"--format={answers.SACCT_FORMAT}", f"--jobs={','.join(ids)}")
        )

    def _run(self, *arguments: str) -> str:
        return self._run_command(arguments, os.environ if self._environ is None else self._environ, self._timeout_s)


def _checked(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise SchedulerError(f"expected a job id such as 12 or 12_3, found {job_id!r}")
    return job_id


def _all_checked(job_ids: Iterable[str]) -> list[str]:
    return [_checked(job_id) for job_id in dict.fromkeys(job_ids)]
