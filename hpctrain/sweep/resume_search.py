"""Continue a search: what its tasks left, what it has not begun, and what was added to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hpctrain.config.cluster import Slurm
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.launch.prepare import RunPlan
from hpctrain.phrases import counted, listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launcher import CLOCK_SLACK_S
from hpctrain.run.process import process_start
from hpctrain.run.reason import Reason
from hpctrain.search.journal import Decision
from hpctrain.search.open_search import open_search
from hpctrain.search.record import SweepRecord
from hpctrain.search.state import SearchState
from hpctrain.status.before_launch import statuses_before_launch
from hpctrain.status.report import ask_slurm, job_ids
from hpctrain.sweep.launch_search import submit_tasks
from hpctrain.sweep.worker import work_here

FAILURES = (Reason.FAILED, Reason.STALLED, Reason.HANG, Reason.INFRASTRUCTURE, Reason.OUT_OF_MEMORY)
"""Reasons with which a run has failed."""


@dataclass(frozen=True, slots=True)
class SearchWork:
    """What is left of a search.

    Attributes:
        num_tasks: tasks to submit; 0 if nothing is left, or if the tasks that wait or run will do it.
        num_live: tasks that wait or run.
        failed: runs that failed, which are tried again only on request.
    """

    num_tasks: int
    num_live: int
    failed: Sequence[RunDirectory]


def resume_search(
    home: RunDirectory, record: SweepRecord, template: RunPlan, *, retry_failed: bool = False, force: bool = False
) -> int:
    """Continue a search: release what its tasks left, and submit tasks for that and for what was added.

    Args:
        home: the folder of the sweep.
        record: of the sweep, as it is stored.
        template: any run of the search, from which the request to SLURM is read.
        retry_failed: also train runs again that failed.
        force: release runs although SLURM can't be asked whether their jobs are over.

    Returns:
        An `ExitCode`.

    Raises:
        RunDirectoryError: a run may be running, and SLURM can't be asked.
    """
    work = release_search(home, record, retry_failed=retry_failed, force=force)
    if work.failed:
        names = listed([os.path.relpath(run.path) for run in work.failed])
        resume = f"python -m hpctrain resume {home.as_typed} --retry-failed"
        print(f"{counted(len(work.failed), 'run')} failed ({names}); to train them again: {resume}")
    if work.num_live:
        print(f"{counted(work.num_live, 'task')} of the search queued or running: left alone")
    if not work.num_tasks:
        if work.failed and not work.num_live:
            print("nothing else is left of the search")
            return ExitCode.FAILED
        print("nothing is left to begin" if work.num_live else "the search is complete")
        return ExitCode.FINISHED
    if not isinstance(template.config.cluster, Slurm):
        return work_here(home)
    return submit_tasks(home, template, work.num_tasks)


def release_search(home: RunDirectory, record: SweepRecord, *, retry_failed: bool, force: bool) -> SearchWork:
    """Release the runs whose task is gone, and count the tasks that the search needs.

    Args:
        home: the folder of the sweep.
        record: of the sweep.
        retry_failed: also train runs again that failed.
        force: release runs although SLURM can't be asked whether their jobs are over.

    Raises:
        RunDirectoryError: a run may be running, and SLURM can't be asked.
    """
    search = open_search(home, record)
    search.create()
    state = search.state()
    live = _live_tasks(home, force=force)
    live += _live_processes(home, state, force=force)
    failed = [end for end in state.ends.values() if end.reason in FAILURES]
    cancelled = [end for end in state.ends.values() if end.reason == Reason.CANCELLED]
    search.release([*_lost(home, state, live, force=force), *cancelled, *(failed if retry_failed else ())])
    state = search.state()
    # a task that waits in the queue begins one new run; one that runs has begun its own
    waiting = sum(task not in {begin.task for begin in state.first.values()} for task in live)
    new = max(0, search.chooser.num_new(state) - waiting)
    promoted = 0 if live else len(list(search.chooser.next_rungs(state)))
    return SearchWork(
        num_tasks=new + len(state.released) or promoted,
        num_live=len(live),
        failed=() if retry_failed else [search.directory(run) for run in sorted({end.run for end in failed})],
    )


def _lost(home: RunDirectory, state: SearchState, live: Collection[str], *, force: bool) -> list[Decision]:
    """The decisions that gave runs to tasks which are gone."""
    given = [begin for begin in state.given.values() if begin.task not in live]
    directories = [RunDirectory.at(home.path / str(begin.run)) for begin in given]
    statuses = statuses_before_launch(directories, force=force)
    return [begin for begin, status in zip(given, statuses, strict=True) if not status.state.may_change]


def _live_processes(home: RunDirectory, state: SearchState, *, force: bool) -> list[str]:
    """The processes that were given a run without a job, and still work for the search."""
    live = []
    for begin in state.given.values():
        host, colon, pid = begin.task.rpartition(":")
        if not colon:
            continue
        if host != socket.gethostname():
            if not force:
                raise RunDirectoryError(
                    f"{home.path}: process {pid} on {host} may still train run {begin.run}; run this there, or insist: "
                    f"`python -m hpctrain resume {home.as_typed} --force`"
                )
            continue
        started = process_start(int(pid)) if pid.isdecimal() else None
        if started is not None and started <= begin.time + CLOCK_SLACK_S:
            live.append(begin.task)
    return live


def _live_tasks(home: RunDirectory, *, force: bool) -> list[str]:
    """The array tasks of the search that wait or run."""
    ids = job_ids(home)
    jobs = ask_slurm(ids)
    if jobs is None:
        if ids and not force:
            raise RunDirectoryError(
                f"{home.path}: its tasks may still be queued or running, and SLURM can't be asked; run this where "
                f"squeue works, or insist: `python -m hpctrain resume {home.as_typed} --force`"
            )
        return []
    return [job_id for job_id in ids if (job := jobs.get(job_id)) is not None and not job.state.is_finished]
