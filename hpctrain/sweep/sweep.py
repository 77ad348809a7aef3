"""The runs of a sweep, launched one after another on this machine, or as job arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.config.checks import warnings_of
from hpctrain.config.cluster import Slurm
from hpctrain.config.identity import decides_the_weights, flat
from hpctrain.config.root import Config
from hpctrain.config.stored import load
from hpctrain.errors import ConfigError, ExitCode, HpctrainError
from hpctrain.launch.launcher import launch_here, print_plan
from hpctrain.launch.prepare import RunPlan, discard_unstarted, has_more_to_train, plan, prepare
from hpctrain.launch.rollback import run_restored_on_error
from hpctrain.launch.submission import require_commands, sbatch_parameters, script, submit, submitit_folder
from hpctrain.phrases import counted, listed
from hpctrain.run.config_change import trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import manifest, varied_text
from hpctrain.status.follow import wait_for
from hpctrain.status.report import statuses_before_launch
from hpctrain.status.search import find_runs
from hpctrain.status.state import RunState
from hpctrain.sweep.progress import with_progress
from hpctrain.sweep.stored_values import stored_values

SHOWN = 20
"""Runs that a submission or a dry run lists; it only counts the others."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        config: checked; with a `run_dir` once the run has a place in the sweep.
        varied: the keys that the sweep varies, with this run's values as typed.
    """

    config: Config
    varied: Mapping[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return RunDirectory.at(str(self.config.run_dir))

    @property
    def heading(self) -> str:
        """What the sweep varies, or the directory if that isn't known."""
        return varied_text(self.varied) or os.path.relpath(self.directory.path)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep; its runs are the folders 0, 1, ... in its own.

    Args:
        home: the sweep's directory.
        command: the command line as typed, for the manifests.
        force: launch runs although SLURM can't be asked whether their jobs are over.
    """

    home: RunDirectory
    command: Sequence[str]
    force: bool = False
    _stored: dict[RunDirectory, Mapping[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The values of the sweep's runs: a sweeper places batch after batch, and each run is read once."""

    def place(self, runs: Sequence[SweepRun]) -> list[SweepRun]:
        """Give each run its directory: that of the same run if the sweep has it already, else the next free number.

        The number of a run whose configuration can't be read is taken.
        """
        names = {name for run in runs for name in run.varied}
        numbers = self._numbers()
        read = {number: self._values(self._run(number)) for number in with_progress(numbers, "read")}
        stored = {number: values for number, values in read.items() if values}
        known: dict[str, list[int]] = {}
        for number, values in stored.items():
            known.setdefault(_identity(values, names), []).append(number)
        free = itertools.count(max(numbers, default=-1) + 1)
        placed = []
        for run in with_progress(runs, "placed"):
            values, varied = flat(run.config), dict(run.varied)
            same = known.get(_identity(values, names), [])
            while same and not self._loads(self._run(same[0])):
                same.pop(0)
            if same:
                number = same.pop(0)  # a value that is given twice makes two runs
            else:
                number = next(free)
                if stored:
                    varied |= _differences(next(iter(stored.values())), values, names)
            path = str(self._run(number).path)
            placed.append(SweepRun(dataclasses.replace(run.config, run_dir=path), varied))
        return placed

    def launch(self, runs: Sequence[SweepRun]) -> list[int]:
        """Launch those runs that are neither completed nor running.

        Args:
            runs: placed, all for the same kind of cluster.

        Returns:
            One `ExitCode` per run: 0 for a completed run, and for a submitted or running one that isn't waited for.

        Raises:
            RunDirectoryError: one of them may be running, and SLURM can't be asked; nothing is written then.
        """
        # runs that differ in a learning rate have the same warnings: one of each is enough
        for warning in sorted({warning for run in runs for warning in warnings_of(run.config)}):
            print(f"hpctrain: warning: {warning}", file=sys.stderr)
        by_directory = self._left_alone(runs)
        if missing := [run for run in runs if run.directory not in by_directory]:
            codes = self._dry_run(missing) if runs[0].config.cluster.dry_run else self._launch(missing)
            by_directory |= {run.directory: code for run, code in zip(missing, codes, strict=True)}
        for run in missing:
            self._stored.pop(run.directory, None)  # its configuration may have changed
        return [by_directory[run.directory] for run in runs]

    def _launch(self, runs: Sequence[SweepRun]) -> list[int]:
        if isinstance(runs[0].config.cluster, Slurm):
            require_commands("sbatch", "srun")
        self.home.create_for_sweep(runs[0].config.mode)
        return self._submit(runs) if isinstance(runs[0].config.cluster, Slurm) else self._one_after_another(runs)

    def _run(self, number: int) -> RunDirectory:
        return RunDirectory.at(self.home.path / str(number))

    def _numbers(self) -> list[int]:
        """The numbers that are taken, sorted."""
        entries = self.home.path.iterdir() if self.home.path.is_dir() else ()
        return sorted(int(entry.name) for entry in entries if entry.name.isdecimal())

    def _values(self, directory: RunDirectory) -> Mapping[str, Any]:
        """The stored values of a run by their full keys; empty if there is no run, or it can't be read."""
        if directory not in self._stored and directory.config.is_file():
            self._stored[directory] = stored_values(directory.config)
            if not self._stored[directory]:
                self._loads(directory)  # prints why not
        return self._stored.get(directory, {})

    @staticmethod
    def _loads(directory: RunDirectory) -> bool:
        try:
            load(directory.config)
        except ConfigError as error:
            where = os.path.relpath(directory.path)
            print(f"hpctrain: warning: {where}: {error}; its number stays taken", file=sys.stderr)
            return False
        return True

    def _left_alone(self, runs: Sequence[SweepRun]) -> dict[RunDirectory, int]:
        """Return the exit codes of the runs that aren't launched, and print a line on each."""
        existing = [run for run in runs if run.directory.config.is_file()]
        statuses = statuses_before_launch([run.directory for run in existing], force=self.force)
        codes: dict[RunDirectory, int] = {}
        for run, status in zip(existing, statuses, strict=True):
            where = os.path.relpath(run.directory.path)
            completed = status.state is RunState.COMPLETED
            done = completed and not has_more_to_train(stored_values(trained_config(run.directory)), run.config)
            if status.state is RunState.UNREADABLE:
                print(f"hpctrain: error: {where}: {status.note}; skipped", file=sys.stderr)
                codes[run.directory] = ExitCode.BAD_CONFIGURATION
            elif done or status.state.may_change:
                state = f"already completed, at step {status.step}" if done else f"{status.state}: left alone"
                print(f"{where}: {state}")
                codes[run.directory] = ExitCode.FINISHED
        return codes

    def _one_after_another(self, runs: Sequence[SweepRun]) -> list[int]:
        # all are prepared first, so that `resume` finds those that were never started
        with self._prepared(runs) as plans:
            pass
        codes: list[int] = []
        for number, (run, prepared) in enumerate(zip(runs, plans, strict=True), 1):
            print(f"run {number} of {len(runs)}: {run.heading}")
            codes.append(launch_here(prepared))
            if codes[-1] == ExitCode.INTERRUPTED:
                if left := len(runs) - number:
                    resume = f"python -m hpctrain resume {self.home.as_typed}"
                    print(f"stopped; {counted(left, 'run')} not started; to resume: {resume}", file=sys.stderr)
                break
        return codes + [ExitCode.INTERRUPTED] * (len(runs) - len(codes))

    @contextlib.contextmanager
    def _prepared(self, runs: Sequence[SweepRun]) -> Iterator[list[RunPlan]]:
        """Prepare runs; an error inside the context, or of one of them, leaves no new run and changes none."""
        plans: list[RunPlan] = []
        with contextlib.ExitStack() as undo:
            for run in runs:
                undo.enter_context(run_restored_on_error(run.directory))
            try:
                origin = manifest(self.command, Path.cwd())  # the same for all, and git takes a while
                plans += [
                    prepare(run.config, self.command, run.varied, origin) for run in with_progress(runs, "written")
                ]
                yield plans
            except HpctrainError:
                self._discard_unstarted([run.directory for run in runs if run.directory.config.is_file()])
                raise

    def _submit(self, runs: Sequence[SweepRun]) -> list[int]:
        # every directory is written before the first job is submitted, which may start at once
        with self._prepared(runs) as plans:
            for group in by_resources(plans):
                print(_submission(submit([plans[n] for n in group], self.home)))
        print("run directories" if len(runs) > 1 else "run directory", _listing(runs, "\n  "), sep="\n  ")
        print(f"  python -m hpctrain status --runs-dir {self.home.as_typed}")
        print(f"  python -m hpctrain logs {runs[0].directory.as_typed} --follow")
        print(f"  python -m hpctrain cancel {self.home.as_typed}", flush=True)
        if not runs[0].config.cluster.wait:
            return [ExitCode.FINISHED] * len(runs)
        try:
            return [wait_for(run.directory) for run in runs]
        except KeyboardInterrupt:
            print(f"\nthe jobs continue; to cancel them: python -m hpctrain cancel {self.home.as_typed}")
            return [ExitCode.INTERRUPTED] * len(runs)

    def _discard_unstarted(self, directories: Sequence[RunDirectory]) -> None:
        for directory in directories:
            discard_unstarted(directory)
        if not find_runs(self.home.path):
            shutil.rmtree(submitit_folder(self.home), ignore_errors=True)
            # rmdir, because the folder may hold the user's files
            with contextlib.suppress(OSError):
                self.home.logs.rmdir()
                self.home.path.rmdir()

    def _dry_run(self, runs: Sequence[SweepRun]) -> list[int]:
        plans = [plan(run.config) for run in runs]
        if isinstance(runs[0].config.cluster, Slurm):
            for group in by_resources(plans):
                print(script(plans[group[0]], self.home, runs=len(group)))
                what = "array" if len(group) > 1 else "job"
                listing = _listing([runs[n] for n in group], "\n#   ")
                print(f"# nothing was submitted; the {what} would train", listing, sep="\n#   ")
        else:
            for run, made in zip(runs, plans, strict=True):
                print_plan(made, varied_text(run.varied))
        return [ExitCode.FINISHED] * len(runs)


def _listing(runs: Sequence[SweepRun], separator: str) -> str:
    """The directories of runs, each with what the sweep varies."""
    lines = [f"{run.directory.path}  {varied_text(run.varied)}".rstrip() for run in runs]
    return listed(lines, shown=SHOWN, separator=separator)


def _covered(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _identity(values: Mapping[str, Any], names: Collection[str]) -> str:
    """What tells a run of a sweep from the others: what decides the weights, and what the sweep varies."""
    chosen = {key: value for key, value in values.items() if decides_the_weights(key) or _covered(key, names)}
    # a file that was edited by hand may have 1 for 1.0
    whole = {key: int(value) for key, value in chosen.items() if isinstance(value, float) and value.is_integer()}
    return repr(sorted((chosen | whole).items()))


def _differences(first: Mapping[str, Any], values: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """What decides the weights and differs from the sweep's first run, beyond what this command varies."""
    keys = sorted(key for key in first.keys() | values.keys() if decides_the_weights(key) and not _covered(key, names))
    return {key: str(values.get(key)) for key in keys if first.get(key) != values.get(key)}


def by_resources(runs: Sequence[RunPlan]) -> list[list[int]]:
    """Group runs that request the same from SLURM, and so can share an array; return their positions by group."""
    groups: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        groups.setdefault(repr(sbatch_parameters(run, "")), []).append(position)
    return list(groups.values())


def require_one_cluster(configs: Sequence[Config]) -> None:
    """Check that a sweep can be launched in one way.

    Raises:
        ConfigError: its runs ask for several kinds of cluster.
    """
    kinds = sorted({config.cluster.kind for config in configs})
    if len(kinds) > 1:
        raise ConfigError("cluster", ",".join(kinds), "can't be swept over", "type one command for each cluster")


def _submission(job_ids: Sequence[str]) -> str:
    if len(job_ids) == 1:
        return f"submitted job {job_ids[0]}"
    return f"submitted array {job_ids[0].partition('_')[0]} of {len(job_ids)} runs"
