"""Launch a sweep: its runs one after another on this machine, or as job arrays; or the tasks that ask for them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hpctrain.config.checks import warnings_of
from hpctrain.config.cluster import Slurm
from hpctrain.config.root import ProgramConfig, RunConfig
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, HpctrainError, RunDirectoryError
from hpctrain.launch.after import require_others, start_options
from hpctrain.launch.existing_run import nothing_left
from hpctrain.launch.launch_code import LaunchCode, importing_code_of
from hpctrain.launch.launcher import launch_here, print_plan
from hpctrain.launch.prepare import RunPlan, default_path, plan, prepare, refuse_other_files, rollback_on_error
from hpctrain.launch.sbatch import (
    SubmitLimitError,
    TaskArray,
    describe_unsubmitted,
    largest_array,
    print_excess,
    require_sbatch,
    task_arrays,
)
from hpctrain.launch.submission import sbatch_parameters, script, submit, submit_search
from hpctrain.phrases import counted, listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import describe_gone
from hpctrain.run.ledger import Ledger
from hpctrain.run.manifest import manifest, varied_text
from hpctrain.run.sweep_record import SweepRecord, sweep_is_over
from hpctrain.search.algorithm import ComposedSweep
from hpctrain.search.runs import SweepRun, place, with_progress
from hpctrain.search.search import algorithm_of, is_search, is_stopped, train_search_here
from hpctrain.status.before_launch import statuses_before_launch
from hpctrain.status.follow import wait_for
from hpctrain.status.state import RunState
from hpctrain.streams import print_warning

SHOWN = 20
"""Runs that a submission or a dry run lists; it only counts the others."""


@dataclass(frozen=True)
class Sweep:
    """A sweep; its runs are the folders 0, 1, ... in its own.

    Args:
        home: the sweep's directory.
        command: the command line as typed, for the manifests.
        force: launch runs although SLURM can't be asked whether their jobs are over.
        code_now: take today's code for existing runs, too.
        record: how the runs were found, written before they are launched; None leaves the one that is there.
        retry_failed: also launch runs that failed.
    """

    home: RunDirectory
    command: Sequence[str]
    force: bool = False
    code_now: bool = False
    record: SweepRecord | None = None
    retry_failed: bool = True
    # of the launches of each run, when it was decided which runs are left alone
    _records_before: dict[RunDirectory, tuple[bool, int, int]] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def code(self) -> LaunchCode:
        """The code of all runs, taken once, though a sweeper may launch many batches."""
        # runs of a search are compared with each other, so they have the same code
        asks = self.record is not None and is_search(self.record)
        return LaunchCode(self.home, now=self.code_now and not asks)

    def launch(self, runs: Sequence[SweepRun]) -> list[int]:
        """Launch those runs that are neither completed nor running.

        Args:
            runs: placed, all for the same kind of cluster.

        Returns:
            One `ExitCode` per run: 0 for a completed run, and for a submitted or running one that isn't waited for.

        Raises:
            RunDirectoryError: one of them may be running, and SLURM can't be asked; nothing is written then.
        """
        by_directory = self._skip(runs)
        # a crash in this process ends the whole sweep: runs that have crashed come last
        missing = [run for run in runs if run.directory not in by_directory]
        missing.sort(key=lambda run: Ledger(run.directory).num_unrecorded_ends())
        if missing:
            self.print_warnings(missing)
            is_dry = runs[0].config.cluster.dry_run
            codes: Sequence[int | None] = self._dry_run(missing) if is_dry else self._launch(missing)
            by_directory |= {run.directory: code for run, code in zip(missing, codes, strict=True)}
        return self._exit_codes(runs, [by_directory[run.directory] for run in runs])

    def launch_composed(self, composed: ComposedSweep) -> list[int]:
        """Launch what a command asks for; return the exit codes of the runs, or that of the command for a search."""
        if not is_search(composed.record):
            return self.launch(place(composed.runs, self.home))
        first = composed.runs[0]
        if first.config.cluster.dry_run:
            self._print_search(template_of(first, self.home), composed.record.num_runs or 1)
            return [ExitCode.FINISHED]
        is_slurm = isinstance(first.config.cluster, Slurm)
        if is_slurm:
            require_sbatch()
        # the others get their folders when they are drawn
        placed = place(composed.runs, self.home) if algorithm_of(composed.record).knows_runs else []
        self.print_warnings(placed or [first])
        with self.prepared(placed, mode=first.config.mode):
            # for the runs that are made later: those that are drawn, and those that a resume adds
            self.code.assign_to(self.home, first.config)
            if is_slurm:
                return [submit_tasks(self.home, template_of(first, self.home), composed.record.num_runs or 1)]
        return [train_search_here(self.home)]

    def print_warnings(self, runs: Sequence[SweepRun]) -> None:
        """Print each warning once, with the runs that it is about if those aren't all."""
        about: dict[str, list[str]] = {}
        for run in runs:
            for warning in self._warnings(run):
                about.setdefault(warning, []).append(os.path.relpath(run.directory.path))
        for warning, names in sorted(about.items()):
            print_warning(warning if len(names) == len(runs) else f"{listed(names)}: {warning}")

    def _warnings(self, run: SweepRun) -> list[str]:
        with importing_code_of(run.config.run_dir, now=self.code_now):
            warnings = warnings_of(run.config)
        if isinstance(run.config, ProgramConfig) and run.config.code.snapshot == "none":
            warnings.append("code.snapshot=none: all runs have the same working directory, and share its files")
        return warnings

    def _exit_codes(self, runs: Sequence[SweepRun], codes: Sequence[int | None]) -> list[int]:
        """Return the exit codes of runs; None stands for a run that may be waited for."""
        cluster = runs[0].config.cluster
        if not isinstance(cluster, Slurm) or not cluster.wait or cluster.dry_run:
            return [ExitCode.FINISHED if code is None else code for code in codes]
        try:
            return [wait_for(run.directory) if code is None else code for run, code in zip(runs, codes, strict=True)]
        except KeyboardInterrupt:
            print(f"\nthe jobs continue; to cancel them: python -m hpctrain cancel {self.home.as_typed}")
            return [ExitCode.INTERRUPTED] * len(runs)

    def _launch(self, runs: Sequence[SweepRun]) -> Sequence[int | None]:
        is_slurm = isinstance(runs[0].config.cluster, Slurm)
        if is_slurm:
            require_sbatch()
        # the runs of a command wait for the same ones; those that are resumed may not
        for run in {tuple(run.config.after): run for run in runs}.values():
            require_others(run.config, run.directory)
        return self._submit(runs) if is_slurm else self._one_after_another(runs)

    def _skip(self, runs: Sequence[SweepRun]) -> dict[RunDirectory, int | None]:
        """Return the exit codes of the runs that aren't launched, None for live ones, and print a line on each."""
        self._records_before.update((run.directory, _launch_records(run.directory)) for run in runs)
        existing = [run for run in runs if run.directory.config.is_file()]
        statuses = statuses_before_launch([run.directory for run in existing], force=self.force)
        codes: dict[RunDirectory, int | None] = {}
        for run, status in zip(existing, statuses, strict=True):
            where = os.path.relpath(run.directory.path)
            done = nothing_left(status, run.config)
            if status.state is RunState.UNREADABLE:
                print(f"{ERROR_PREFIX}{where}: {status.note}; skipped", file=sys.stderr)
                codes[run.directory] = ExitCode.BAD_CONFIGURATION
            elif done or status.state.may_change:
                state = f"already completed{status.at_step}" if done else f"{status.state}: left alone"
                print(f"{where}: {state}")
                codes[run.directory] = ExitCode.FINISHED if done else None
            elif not run.config.resume.from_scratch and (problem := describe_gone(run.directory)):
                print(f"{ERROR_PREFIX}{where}: {problem}; skipped", file=sys.stderr)
                codes[run.directory] = ExitCode.BAD_CONFIGURATION
            elif status.state is RunState.FAILED and not status.unstarted and not self.retry_failed:
                print(f"{where}: failed{status.at_step}; to run it again, add --retry-failed")
                codes[run.directory] = ExitCode.FAILED
        return codes

    def _one_after_another(self, runs: Sequence[SweepRun]) -> Sequence[int | None]:
        # all are prepared first, so that `resume` finds those that were never started
        with self.prepared(runs, runs[0].config.mode) as plans:
            pass
        codes: list[int | None] = []
        late = 0
        for number, (run, prepared) in enumerate(zip(runs, plans, strict=True), 1):
            if self.home.sweep_stop_file.exists():
                return self._stop("cancelled", runs, codes, ExitCode.CANCELLED)
            if _is_new(run) and sweep_is_over(run.directory, time.time()):
                codes.append(ExitCode.INTERRUPTED)
                late += 1
                continue
            if skipped_codes := self._skip([run]):  # another process may have taken it meanwhile
                codes += skipped_codes.values()
                continue
            print(f"run {number} of {len(runs)}: {run.heading}")
            codes.append(code := launch_here(prepared))
            if is_stopped(run.directory, code):
                return self._stop("stopped", runs, codes, ExitCode.INTERRUPTED)
        if late:
            what = f"the time of the sweep is over (sweep.time_limit_min): {counted(late, 'run')} not started"
            print(f"{what}; for as much time again: {self._resume}", file=sys.stderr)
        return codes

    def _stop(self, how: str, runs: Sequence[SweepRun], codes: list[int | None], code: ExitCode) -> list[int | None]:
        """Print that no further run is launched; return the exit codes of all runs."""
        new = sum(map(_is_new, runs))
        new_runs_note = f"; {counted(new, 'run')} not started" if new else ""
        print(f"{how}{new_runs_note}; to resume: {self._resume}", file=sys.stderr)
        return codes + [code] * (len(runs) - len(codes))

    @property
    def _resume(self) -> str:
        return f"python -m hpctrain resume {self.home.as_typed}"

    @contextlib.contextmanager
    def prepared(self, runs: Sequence[SweepRun], mode: int) -> Iterator[list[RunPlan]]:
        """Prepare runs and record the sweep; an error inside the context leaves what isn't submitted as it was.

        Args:
            runs: placed.
            mode: permissions of the sweep's folder.
        """
        for run in runs:  # before the sweep's mark, which stands for its runs
            refuse_other_files(run.directory)
        with contextlib.ExitStack() as undo:
            undo.enter_context(rollback_on_error(self.home.path, command=self.command))
            for run in runs:
                now = _launch_records(run.directory)
                if self._records_before.get(run.directory, now) != now:
                    problem = "another command has just launched this run; type the command again for what it left"
                    raise RunDirectoryError(f"{run.directory.path}: {problem}")
            self.home.create_for_sweep(mode)
            # of an earlier launch; `cancel` takes the folder for a sweep's once it has a record
            self.home.sweep_stop_file.unlink(missing_ok=True)
            if self.record is not None:
                self.record.write(self.home, mode)
            for run in runs:
                undo.enter_context(rollback_on_error(run.directory.path))
            origin = manifest(self.command, Path.cwd())  # the same for all, and git takes a while
            yield [
                prepare(run.config, self.command, run.varied, origin, code=self.code)
                for run in with_progress(runs, "written")
            ]

    def _submit(self, runs: Sequence[SweepRun]) -> list[int | None]:
        # every directory is written before the first job is submitted, which may start at once
        with self.prepared(runs, runs[0].config.mode) as plans:
            submitted, refusal = self._submit_arrays(plans)
        print("run directories" if len(runs) > 1 else "run directory", _listing(runs, "\n  "), sep="\n  ")
        print(f"  python -m hpctrain status --runs-dir {self.home.as_typed}")
        print(f"  python -m hpctrain logs {runs[0].directory.as_typed} --follow")
        print(f"  python -m hpctrain cancel {self.home.as_typed}", flush=True)
        if refusal is not None:
            missing = describe_unsubmitted(len(runs) - len(submitted), len(runs), "run", self.home, refusal)
            print(f"{ERROR_PREFIX}{missing}", file=sys.stderr)
        return [None if n in submitted else ExitCode.FAILED for n in range(len(runs))]

    def _submit_arrays(self, plans: Sequence[RunPlan]) -> tuple[set[int], SubmitLimitError | None]:
        """Submit runs until SLURM takes no more; return the positions of those that it took, and its refusal."""
        arrays = _arrays(plans)
        print_excess(plans[0].slurm.max_parallel_runs, len(arrays))
        submitted: set[int] = set()
        for array in arrays:
            try:
                job_ids = submit([plans[n] for n in array.tasks], self.home, array.max_parallel)
            except SubmitLimitError as error:
                if not submitted:
                    raise
                return submitted, error  # the others stay as they are prepared, for `resume`
            except HpctrainError:
                if submitted:
                    cancel = f"python -m hpctrain cancel {self.home.as_typed}"
                    count = f"{len(submitted)} of {len(plans)} runs were submitted before the error"
                    print(f"{count}; to cancel: {cancel}", file=sys.stderr)
                raise
            array_id, _, task = job_ids[0].partition("_")
            what = f"job array {array_id} with {len(job_ids)} runs" if task else f"job {array_id}"
            print(f"submitted {what}")
            submitted.update(array.tasks)
        return submitted, None

    def _print_search(self, run: RunPlan, count: int) -> None:
        """Print what a command would submit for a search, or launch on this machine."""
        if not isinstance(run.config.cluster, Slurm):
            print_plan(run, f"the first of {counted(count, 'run')}")
            return
        arrays = task_arrays([range(count)], run.slurm.max_parallel_runs, largest_array(count))
        for array in arrays:
            print(script(run, self.home, len(array.tasks), array.max_parallel))
        what = "array" if len(arrays) == 1 else f"{len(arrays)} arrays"
        print(f"# nothing was submitted; the {what} would train {counted(count, 'run')}")

    def _dry_run(self, runs: Sequence[SweepRun]) -> list[int]:
        plans = [plan(run.config) for run in runs]
        if isinstance(runs[0].config.cluster, Slurm):
            for array in _arrays(plans):
                first = plans[array.tasks[0]]
                start = start_options(first.config)
                print(script(first, self.home, len(array.tasks), array.max_parallel, start))
                what = "array" if len(array.tasks) > 1 else "job"
                listing = _listing([runs[n] for n in array.tasks], "\n#   ")
                print(f"# nothing was submitted; the {what} would train", listing, sep="\n#   ")
        else:
            for run, run_plan in zip(runs, plans, strict=True):
                print_plan(run_plan, varied_text(run.varied))
        return [ExitCode.FINISHED] * len(runs)


def submit_tasks(home: RunDirectory, run: RunPlan, num_tasks: int) -> ExitCode:
    """Submit tasks of a search, and print what to type next; FAILED if SLURM took only some of them.

    Args:
        home: the folder of the sweep.
        run: any run of the search, from which the request to SLURM is read.
        num_tasks: of the arrays.
    """
    job_ids = submit_search(run, home, num_tasks)
    for array, count in Counter(job_id.partition("_")[0] for job_id in job_ids).items():
        print(
            f"submitted job array {array} with {counted(count, 'task')}; each takes the next run of the search when it "
            "starts"
        )
    print(f"run directories {home.path}/0, {home.path}/1, ...")
    print(f"  python -m hpctrain status --runs-dir {home.as_typed}")
    print(f"  python -m hpctrain cancel {home.as_typed}", flush=True)
    return ExitCode.FINISHED if len(job_ids) == num_tasks else ExitCode.FAILED


def template_of(run: SweepRun, home: RunDirectory) -> RunPlan:
    """Plan a run of a search that may not exist yet, from which the request of its tasks to SLURM is read."""
    return plan(run.at(home.path / "0").config)


@contextlib.contextmanager
def sweep_home(config: RunConfig) -> Iterator[RunDirectory]:
    """The sweep's directory; an error inside the context leaves it as it was, or absent."""
    if config.cluster.dry_run:
        yield RunDirectory.at(config.run_dir or default_path(str(config.name)))
        return
    with rollback_on_error(config.run_dir, config.name) as home:
        if config.run_dir is None:
            home.create_for_sweep(config.mode)  # here, because a sweeper may write into it before the first launch
        yield home


def _launch_records(run: RunDirectory) -> tuple[bool, int, int]:
    """The traces that a launch of a run changes: whether it exists, the size of its jobs' records, its newest claim."""
    jobs_bytes = run.jobs.stat().st_size if run.jobs.is_file() else 0
    return run.config.is_file(), jobs_bytes, max(run.claimed_attempts(), default=0)


def _is_new(run: SweepRun) -> bool:
    return not Ledger(run.directory).last_claim()


def _listing(runs: Sequence[SweepRun], separator: str) -> str:
    """The directories of runs, each with what the sweep varies."""
    lines = [f"{run.directory.path}  {varied_text(run.varied)}".rstrip() for run in runs]
    return listed(lines, max_names=SHOWN, separator=separator)


def by_resources(runs: Sequence[RunPlan]) -> list[list[int]]:
    """Group runs that request the same from SLURM, and so can share an array; return their positions by group."""
    groups: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        request = repr((sbatch_parameters(run, ""), run.config.after, run.config.after_failure))
        groups.setdefault(request, []).append(position)
    return list(groups.values())


def _arrays(plans: Sequence[RunPlan]) -> list[TaskArray]:
    by_limit: dict[int | None, list[list[int]]] = {}
    for group in by_resources(plans):
        by_limit.setdefault(plans[group[0]].slurm.max_parallel_runs, []).append(group)
    largest = largest_array(len(plans))
    return [array for limit, groups in by_limit.items() for array in task_arrays(groups, limit, largest)]


def require_one_cluster(configs: Sequence[RunConfig]) -> None:
    """Check that a sweep can be launched in one way.

    Raises:
        ConfigError: its runs ask for several kinds of cluster.
    """
    kinds = sorted({config.cluster.kind for config in configs})
    if len(kinds) > 1:
        raise ConfigError("cluster", ",".join(kinds), "can't be swept over", "type one command for each cluster")
