"""The runs of a sweep, launched one after another on this machine, or as job arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.checks import warnings_of
from hpctrain.config.cluster import Slurm
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError, ExitCode, HpctrainError
from hpctrain.launch.launcher import launch, print_plan
from hpctrain.launch.prepare import RunPlan, discard_unstarted, plan, prepare
from hpctrain.launch.submission import sbatch_parameters, script, submit, submitit_folder
from hpctrain.launch.undo import undone_on_error
from hpctrain.phrases import counted, numbered
from hpctrain.run.directory import RunDirectory
from hpctrain.status.follow import wait_for
from hpctrain.status.report import require_stopped
from hpctrain.status.search import find_runs


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep; its runs are the folders 0, 1, ... in its own.

    Args:
        home: the sweep's directory.
        command: the command line as typed, for the manifests.
    """

    home: RunDirectory
    command: Sequence[str]

    def run_directory(self, number: int) -> RunDirectory:
        """The directory of a run, counted from 0."""
        return RunDirectory.at(self.home.path / str(number))

    def launch(self, configs: Sequence[Config], first: int = 0) -> list[int]:
        """Launch runs.

        Args:
            configs: checked, all for the same kind of cluster.
            first: the number of the first run in the sweep.

        Returns:
            One `ExitCode` per run: 0 for a submitted run that isn't waited for.

        Raises:
            RunDirectoryError: one of them is running; nothing is written then.
        """
        placed = [
            dataclasses.replace(config, run_dir=str(self.run_directory(number).path))
            for number, config in enumerate(configs, first)
        ]
        # runs that differ in a learning rate have the same warnings: one of each is enough
        for warning in sorted({warning for config in placed for warning in warnings_of(config)}):
            print(f"hpctrain: warning: {warning}", file=sys.stderr)
        if placed[0].cluster.dry_run:
            return self._dry_run(placed, first)
        for number in range(first, first + len(placed)):
            directory = self.run_directory(number)
            if directory.config.is_file():
                require_stopped(directory)
        self.home.create_for_sweep(placed[0].mode)
        if isinstance(placed[0].cluster, Slurm):
            return self._submit(placed)
        return self._one_after_another(placed)

    def _one_after_another(self, configs: Sequence[Config]) -> list[int]:
        codes: list[int] = []
        for number, config in enumerate(configs):
            print(f"run {number + 1} of {len(configs)}")
            codes.append(launch(config, self.command))
            if codes[-1] == ExitCode.INTERRUPTED:
                left = counted(len(configs) - number - 1, "run")
                print(f"stopped; {left} not started", file=sys.stderr)
                break
        return codes

    def _submit(self, configs: Sequence[Config]) -> list[int]:
        # every directory is written before the first job is submitted, which may start at once
        with contextlib.ExitStack() as undo:
            for config in configs:
                undo.enter_context(undone_on_error(RunDirectory.at(str(config.run_dir))))
            runs = [prepare(config, self.command) for config in configs]
            try:
                for group in by_resources(runs):
                    submitted = submit([runs[n] for n in group], self.home)
                    print(_submission(submitted))
            except HpctrainError:
                self._discard_unstarted(runs)
                raise
        directories = [run.directory for run in runs]
        first = directories[0]
        last = directories[-1]
        print(f"run directories {first.path} to {last.path}" if last != first else f"run directory {first.path}")
        print(f"  python -m hpctrain status --runs-dir {self.home.as_typed}")
        print(f"  python -m hpctrain logs {first.as_typed} --follow")
        print(f"  python -m hpctrain cancel {self.home.as_typed}", flush=True)
        if not configs[0].cluster.wait:
            return [ExitCode.FINISHED] * len(configs)
        try:
            return [wait_for(directory) for directory in directories]
        except KeyboardInterrupt:
            print(f"\nthe jobs continue; to cancel them: python -m hpctrain cancel {self.home.as_typed}")
            return [ExitCode.INTERRUPTED] * len(runs)

    def _discard_unstarted(self, runs: Sequence[RunPlan]) -> None:
        for run in runs:
            discard_unstarted(run.directory)
        if not find_runs(self.home.path):
            shutil.rmtree(submitit_folder(self.home), ignore_errors=True)
            # rmdir, because the folder may hold the user's files
            with contextlib.suppress(OSError):
                self.home.logs.rmdir()
                self.home.path.rmdir()

    def _dry_run(self, configs: Sequence[Config], first: int) -> list[int]:
        runs = [plan(config) for config in configs]
        if isinstance(configs[0].cluster, Slurm):
            for group in by_resources(runs):
                print(script(runs[group[0]], self.home, runs=len(group)))
                names = numbered("run", [first + n for n in group])
                print(f"# nothing was submitted; {names} in {self.home.path}")
        else:
            for run in runs:
                print_plan(run)
        return [ExitCode.FINISHED] * len(configs)


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
