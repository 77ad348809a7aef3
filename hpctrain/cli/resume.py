"""Continue stopped runs from their newest intact checkpoints.

examples:
  python -m hpctrain resume runs/digits/2026-01-31_12-00-00
  python -m hpctrain resume RUN trainer.max_steps=2000        # train longer
  python -m hpctrain resume RUN cluster=slurm nodes=2         # continue somewhere else
  python -m hpctrain resume sweep                             # every unfinished run under runs/sweep
  python -m hpctrain resume sweep --retry-failed              # also those that failed
  python -m hpctrain resume sweep sweep.num_runs=80           # draw more runs
  python -m hpctrain resume sweep optimizer.lr=1e-3,1e-4      # add values, or another range with sweep.num_runs
  python -m hpctrain resume RUN --code=now                    # after a correction of your code

With several runs, `resume` skips those that are completed or running, or whose files it can't read. It submits the
runs of a sweep as job arrays. A value of a key that the sweep varies adds runs. If the new attempt trains no step,
because it fails or none is left, hpctrain restores the run's configuration. If you stop or cancel it before it starts,
your changes are kept for the next resume.

A run continues with the copy of the code that was made when it was launched. With --code=now, it gets a new one: type
that in the folder from which the run was launched, or in the same one of a clone. A search keeps its code.

Exit code: the run's, or that of the first run that didn't finish; 0 once the run is submitted, and for a completed run;
2 if RUN is not a run, can't be read, is or may be running, or if an override is invalid.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cli.arguments import add_config_dir, add_runs_dir, command_parser
from hpctrain.config.program import split_command
from hpctrain.config.root import RunConfig, decides_the_weights, flat
from hpctrain.config.stored import load_run
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, RunDirectoryError
from hpctrain.launch.existing_run import changed_config, changed_keys, revert_failed_changes
from hpctrain.launch.launch_code import require_original_folder
from hpctrain.launch.launcher import launch
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launch_mark import LaunchMark
from hpctrain.run.manifest import value_text
from hpctrain.status.runs import runs_of

if TYPE_CHECKING:
    from hpctrain.run.sweep_record import SweepRecord
    from hpctrain.search.resume import SweepResume


REMEDY = "name the runs to change, or start new ones in another run_dir"


def main(arguments: list[str]) -> int:
    """Launch runs again with their own configurations; ``arguments`` are those after `resume`.

    Raises:
        RunDirectoryError: a run doesn't exist, or may be running; or the only one is running.
        ConfigError: an override is invalid.
    """
    if "--" in arguments:
        program = shlex.join(split_command(arguments)[1])
        remedy = "start another run with python -m hpctrain run -- COMMAND, or change args.NAME=VALUE"
        raise ConfigError("run.command", program, "a run keeps its command", remedy)
    options = _parse(arguments)
    command = ["python", "-m", "hpctrain", "resume", *arguments]
    runs_dir = Path(options.runs_dir)
    names, overrides = _split_words(options.words)
    _refuse_unfinished(names, runs_dir)
    if (of_sweep := _sweep_of(names, overrides, options, command)) is not None:
        from hpctrain.search.resume import resume_sweep  # submitit takes a tenth of a second to import

        return resume_sweep(*of_sweep)
    directories = list(dict.fromkeys(run for name in names for run in runs_of(name, runs_dir)))
    # each name is that of a run, and not of a folder of several
    are_runs = all(_places(name, runs_dir)[0].config.is_file() for name in names)
    now = options.code == "now"
    if now:
        require_original_folder(directories)
    revert_failed_changes(directories)
    if len(directories) > 1:
        return _resume_all(directories, overrides, options, command, are_runs=are_runs)
    (directory,) = directories
    config = changed_config(directory, overrides, options.config_dir, code_now=now)
    if overrides and not are_runs:
        _refuse_common_change(directory, config)
    return launch(config, command, force=options.force, code_now=now)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = command_parser("resume", __doc__)
    meaning = "run directories, or their names in the folder that contains the runs; and the keys to change"
    parser.add_argument("words", nargs="+", metavar="RUN | KEY=VALUE", help=meaning)
    add_runs_dir(parser)
    add_config_dir(parser)
    meaning = "resume even though SLURM can't confirm that the run's job has ended"
    parser.add_argument("--force", action="store_true", help=meaning)
    parser.add_argument("--retry-failed", action="store_true", help="of a sweep, run those again that failed, too")
    meaning = "now: take the code as it is in this folder now, in place of the run's own copy"
    parser.add_argument("--code", choices=["now"], help=meaning)
    return parser.parse_intermixed_args(arguments)


def _split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of runs, each once, and the overrides: words with an equals sign that aren't folders.

    Raises:
        RunDirectoryError: there is no name.
    """
    are_names = {word: ("=" not in word and not word.startswith("~")) or _is_folder(Path(word)) for word in words}
    names = [word for word, is_name in are_names.items() if is_name]
    if not names:
        raise RunDirectoryError("resume: expected a run, got none; `python -m hpctrain status` lists the runs")
    return names, [word for word in words if not are_names[word]]


def _places(name: str, runs_dir: Path) -> list[RunDirectory]:
    """The folders that a name may mean: of the two, those that exist."""
    return [RunDirectory.at(path) for path in (Path(name), runs_dir / name) if _is_folder(path)]


def _refuse_unfinished(names: Sequence[str], runs_dir: Path) -> None:
    """Refuse a sweep whose launch was killed: it has only some of its runs."""
    for name in names:
        for place in _places(name, runs_dir):
            if unfinished := LaunchMark(place).describe_unfinished():
                raise RunDirectoryError(f"{name}: {unfinished}")


def _sweep_of(
    names: Sequence[str], overrides: Sequence[str], options: argparse.Namespace, command: Sequence[str]
) -> tuple[SweepResume, SweepRecord] | None:
    """The sweep that was named, if its record decides what is to be done; None for runs."""
    from hpctrain.run.sweep_record import SweepRecord

    places = [place for name in names for place in _places(name, Path(options.runs_dir))]
    homes = [place for place in places if place.sweep.is_file()]
    if not homes or (record := SweepRecord.read(homes[0])) is None:
        return None
    from hpctrain.search.resume import SweepResume, needs_record

    if not needs_record(record, overrides):
        return None
    if len(names) > 1:
        problem = f"expected one sweep, got {len(names)} names; resume each alone"
        raise RunDirectoryError(f"resume {' '.join(names)}: {problem}")
    if options.code is not None:
        raise ConfigError("--code", options.code, "can't be used with a whole sweep", "name the runs to resume")
    resume = SweepResume(homes[0], overrides, command, options.config_dir, options.force, options.retry_failed)
    return resume, record


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # an override may be longer than a file's name
        return False


def _resume_all(
    directories: Sequence[RunDirectory],
    overrides: Sequence[str],
    options: argparse.Namespace,
    command: Sequence[str],
    *,
    are_runs: bool,
) -> int:
    from hpctrain.search.runs import SweepRun
    from hpctrain.search.sweep import Sweep  # submitit takes a tenth of a second to import

    now = options.code == "now"
    groups: dict[tuple[Path, str], list[SweepRun]] = {}
    codes: list[int] = []
    for directory in sorted(directories, key=_place):
        try:
            config = changed_config(directory, overrides, options.config_dir, code_now=now)
        except ConfigError:
            if (problem := _problem_without_changes(directory)) is None:
                raise  # by an override, which is given to all runs
            print(f"{ERROR_PREFIX}{os.path.relpath(directory.path)}: {problem}; skipped", file=sys.stderr)
            codes.append(ExitCode.BAD_CONFIGURATION)
            continue
        if overrides and not are_runs:
            _refuse_common_change(directory, config)
        group = groups.setdefault((_home(directory), config.cluster.kind), [])
        group.append(SweepRun(config, trained_varied(directory)))
    for (home, kind), runs in groups.items():
        retry = options.retry_failed or are_runs
        sweep = Sweep(RunDirectory.at(home), command, force=options.force, code_now=now, retry_failed=retry)
        codes += sweep.launch(runs)
        if kind == "local" and ExitCode.INTERRUPTED in codes:
            break  # by Ctrl-C, which is meant for all of them
    return next((code for code in codes if code != ExitCode.FINISHED), ExitCode.FINISHED)


def _refuse_common_change(directory: RunDirectory, config: RunConfig) -> None:
    """Refuse a value for all runs of a folder, such as a sweep's, if it would change what decides their weights."""
    stored = load_run(directory.config)
    changed = [key for key in changed_keys(flat(stored), config) if decides_the_weights(key)]
    if changed:
        key, run = changed[0], os.path.relpath(directory.path)
        problem = f"would change the existing runs: {run} has {value_text(flat(stored).get(key))}"
        raise ConfigError(key, value_text(flat(config).get(key)), problem, REMEDY)


def _problem_without_changes(directory: RunDirectory) -> ConfigError | None:
    try:
        changed_config(directory, (), None)
    except ConfigError as error:
        return error
    return None


def _home(directory: RunDirectory) -> Path:
    """The folder for the logs of the batch scripts: the sweep's, whose runs have numbers as names, or the run's own."""
    return directory.path.parent if directory.path.name.isdecimal() else directory.path


def _place(directory: RunDirectory) -> tuple[Path, int]:
    name = directory.path.name
    return _home(directory), int(name) if name.isdecimal() else 0
