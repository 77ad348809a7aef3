"""The runs of a sweep, launched together."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.config.checks import warnings_of
from hpctrain.config.cluster import Slurm
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError, ExitCode, HpctrainError
from hpctrain.launch.launcher import launch, print_plan
from hpctrain.launch.prepare import RunPlan, discard_unstarted, plan, prepare
from hpctrain.launch.submission import sbatch_parameters, script, submit, submitit_folder
from hpctrain.run.directory import RunDirectory
from hpctrain.status.follow import wait_for
from hpctrain.status.report import require_stopped
from hpctrain.status.search import find_runs


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep's home: its runs are the folders 0, 1, ... in it.

    Args:
        home: the sweep's directory.
        command: the words that were typed, for the manifests.
    """

    home: RunDirectory
    command: Sequence[str]

    def run(self, number: int) -> RunDirectory:
        """The directory of a run, by its number in the sweep."""
        return RunDirectory.at(self.home.path / str(number))

    def launch(self, configs: Sequence[Config], first: int = 0) -> list[int]:
        """Launch the runs.

        Args:
            configs: checked, all of the same kind of cluster.
            first: the number of the first run in the sweep.

        Returns:
            One `ExitCode` per run: 0 for a submitted one that isn't waited for.
        """
        placed = [replace(config, run_dir=str(self.run(n).path)) for n, config in enumerate(configs, first)]
        for warning in sorted({warning for config in placed for warning in warnings_of(config)}):
            print(f"hpctrain: warning: {warning}", file=sys.stderr)
        if placed[0].cluster.dry_run:
            return self._dry_run(placed)
        for number in range(first, first + len(configs)):
            if self.run(number).config.is_file():
                require_stopped(self.run(number))
        if isinstance(placed[0].cluster, Slurm):
            return self._submit(placed)
        return self._one_after_another(placed)

    def _one_after_another(self, configs: Sequence[Config]) -> list[int]:
        codes = []
        for number, config in enumerate(configs):
            print(f"run {number + 1} of {len(configs)}")
            codes.append(launch(config, self.command))
            if codes[-1] == ExitCode.INTERRUPTED:
                print(f"stopped; {len(configs) - number - 1} runs were not started", file=sys.stderr)
                break
        return codes

    def _submit(self, configs: Sequence[Config]) -> list[int]:
        runs = [prepare(config, self.command) for config in configs]
        try:
            for group in by_resources(runs):
                submitted = submit([runs[n] for n in group], self.home)
                print(_submission(submitted))
        except HpctrainError:
            self._discard_unstarted(runs)
            raise
        last = len(runs) - 1
        print(
            f"run directories {self.home.path}/0 to {self.home.path}/{last}"
            if last
            else f"run directory {runs[0].directory.path}"
        )
        print(f"  python -m hpctrain status --runs-dir {self.home.as_typed}")
        print(f"  python -m hpctrain logs {runs[0].directory.as_typed} --follow")
        print(f"  python -m hpctrain cancel {self.home.as_typed}", flush=True)
        if not configs[0].cluster.wait:
            return [ExitCode.FINISHED] * len(configs)
        return self._follow(runs)

    def _discard_unstarted(self, runs: Sequence[RunPlan]) -> None:
        for run in runs:
            discard_unstarted(run.directory)
        if not find_runs(self.home.path):
            shutil.rmtree(submitit_folder(self.home), ignore_errors=True)
            with contextlib.suppress(OSError):
                # whatever else is there is somebody's
                self.home.logs.rmdir()
                self.home.path.rmdir()

    def _follow(self, runs: Sequence[RunPlan]) -> list[int]:
        try:
            return [wait_for(run.directory) for run in runs]
        except KeyboardInterrupt:
            print(f"\nthe jobs continue; to cancel them: python -m hpctrain cancel {self.home.as_typed}")
            return [ExitCode.INTERRUPTED] * len(runs)

    def _dry_run(self, configs: Sequence[Config]) -> list[int]:
        runs = [plan(config) for config in configs]
        if isinstance(configs[0].cluster, Slurm):
            for group in by_resources(runs):
                print(script(runs[group[0]], self.home, runs=len(group)))
                print(f"# nothing was submitted; runs {', '.join(map(str, group))} in {self.home.path}")
        else:
            for run in runs:
                print_plan(run)
        return [ExitCode.FINISHED] * len(configs)


def _submission(job_ids: Sequence[str]) -> str:
    if len(job_ids) == 1:
        return f"submitted job {job_ids[0]}"
    return f"submitted array {job_ids[0].partition('_')[0]} of {len(job_ids)} runs"


def by_resources(runs: Sequence[RunPlan]) -> list[list[int]]:
    """The positions of the runs that can share an array, since they request the same from SLURM."""
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(repr(sbatch_parameters(run, "")), []).append(number)
    return list(groups.values())


def refuse_mixed(configs: Sequence[Config]) -> None:
    """A sweep is launched in one way.

    Raises:
        ConfigError: its runs ask for several kinds of cluster.
    """
    kinds = sorted({config.cluster.kind for config in configs})
    if len(kinds) > 1:
        raise ConfigError("cluster", ",".join(kinds), "can't be swept over", "type one command for each cluster")
