"""Resolve `after`: which runs must complete first, and sbatch's dependency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.config.cluster import Slurm
from hpctrain.config.plain_yaml import read_plain_values
from hpctrain.config.root import RunConfig
from hpctrain.config.sweep import SEARCHES
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.files import read_json_or_empty
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.slurm import dependency_on
from hpctrain.status.before_launch import OtherRuns
from hpctrain.status.run_status import RunStatus
from hpctrain.status.runs import runs_of

LOOK_EVERY_S = 300.0
LOOK_AT_LEAST_EVERY_S = 3600.0
"""Seconds after which a job looks again at runs that have no job whose end SLURM could wait for; each time twice as
many, up to the second number."""
LATER: Mapping[str, str] = {"begin": f"now+{LOOK_EVERY_S:.0f}"}
"""sbatch's option for a job that looks again later."""
NONE = "after=[] waits for none"
"""What to type for a run that doesn't wait."""
RUNS = Path("runs")
"""The folder in which the names of runs are looked up."""


def resolved(config: RunConfig, directory: RunDirectory) -> list[str]:
    """Return `after` as the absolute paths of run directories, as it is stored.

    Args:
        config: of the run.
        directory: the run's directory.

    Raises:
        ConfigError: one of them isn't a run, or waits for this run.
    """
    paths: dict[str, str] = {}
    for name in config.after:
        try:
            runs = runs_of(name, RUNS)
        except RunDirectoryError as error:
            if (stored := str(RunDirectory.at(name).path)) in _read_after(directory.path):
                # removed since: what that means is decided when the run looks at the others
                paths[stored] = name
                continue
            problem = str(error).removeprefix(f"{name}: ")
            raise ConfigError("after", name, f"is not a run: {problem}", NONE) from error
        _refuse_collection(name, runs)
        for run in sorted(runs, key=lambda run: (len(str(run.path)), str(run.path))):
            if _waits_for(run, directory):
                raise ConfigError("after", run.path, f"waits for this run, {directory.path}", "name other runs")
            # a link such as `latest` may lead elsewhere by then
            target = run.path.parent / run.path.readlink() if run.path.is_symlink() else run.path
            paths[str(RunDirectory.at(target).path)] = name
    return list(paths)


def _refuse_collection(name: str, runs: Sequence[RunDirectory]) -> None:
    """Refuse several runs that aren't those of a sweep, and those of a search, whose runs pause."""
    home = RunDirectory(runs[0].path.parent)
    kind = read_json_or_empty(home.sweep).get("kind")
    if len(runs) > 1 and kind is None:
        names = listed(sorted(run.path.name for run in runs), max_names=4)
        raise ConfigError("after", name, f"contains {len(runs)} runs, and isn't a sweep", f"name one of them: {names}")
    if len(runs) > 1 and kind in SEARCHES:
        raise ConfigError("after", name, "is a search, of which some runs never complete", "name one of its runs")


def _read_after(path: Path) -> list[str]:
    names = read_plain_values(path / "config.yaml", ["after"]).get("after")
    return list(map(str, names)) if isinstance(names, list) else []


def _waits_for(run: RunDirectory, directory: RunDirectory) -> bool:
    """Whether a run is this run, or waits for it, directly or through others."""
    visited: set[Path] = set()
    pending = [run.path]
    while pending:
        path = pending.pop()
        if (real := path.resolve()) in visited:
            continue
        if real == directory.path.resolve():
            return True
        visited.add(real)
        pending += map(Path, _read_after(path))
    return False


def require_others(config: RunConfig, directory: RunDirectory) -> None:
    """Refuse a launch that the runs before it would end at once: on this machine, all of them must have completed.

    Args:
        config: of the run.
        directory: the run's directory.

    Raises:
        ConfigError: one of them is not a run; or has stopped, or on this machine hasn't completed.
    """
    if not config.after:
        return
    other_runs = OtherRuns.read(resolved(config, directory))
    waits = isinstance(config.cluster, Slurm)
    if other_runs.stopped and (config.after_failure == "end" or (config.after_failure == "wait" and not waits)):
        remedies = ["resume it first", "set after_failure=start to start anyway"]
        remedies += ["after_failure=wait to wait until it is resumed and completes"] if waits else []
        raise _refused(other_runs.stopped[0], ", ".join(remedies[:-1]) + f", or {remedies[-1]}")
    if other_runs.going and not waits:
        remedy = "a run on this machine doesn't wait: start it once that one has completed, or leave after out"
        raise _refused(other_runs.going[0], remedy)


def _refused(status: RunStatus, remedy: str) -> ConfigError:
    return ConfigError("after", status.path, f"is {status.described}", remedy)


def start_options(config: RunConfig) -> Mapping[str, str]:
    """Return sbatch's options with which a job starts after other runs, as far as SLURM can wait for them.

    Whether they have completed is decided when the job starts.

    Args:
        config: of the run, with `after` resolved.
    """
    if not config.after:
        return {}
    other_runs = OtherRuns.read(config.after)
    if other_runs.job_ids:
        return {"dependency": dependency_on(other_runs.job_ids)}
    return LATER if other_runs.going or (other_runs.stopped and config.after_failure == "wait") else {}
