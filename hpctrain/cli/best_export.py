"""`best SWEEP --export FILE`: the winner as an experiment file."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.phrases import listed
from hpctrain.results.experiment_file import ExperimentFile, export
from hpctrain.results.ranking import Ranking


def export_winner(ranking: Ranking, path: Path, *, force: bool, config_dir: str | None) -> ExitCode:
    """Write the best row's configuration, and print the command that trains it.

    Raises:
        RunDirectoryError: no run has completed or is running.
        ConfigError: the file exists, or an experiment can't express the configuration.
    """
    file = ExperimentFile.at(path)
    winner = ranking.winner
    if winner is None or ranking.metric is None:
        problem = "there is no winner to export: no run that has completed, or is running, has a value"
        raise RunDirectoryError(f"{problem}; `python -m hpctrain best` without --export lists the others")
    where = listed((os.path.relpath(directory.path) for directory in winner.directories), shown=3)
    at = f"mean of {len(winner.runs)} runs" if len(winner.runs) > 1 else f"step {winner.best_step}"
    achieved = f"{ranking.metric.name} {winner.best:.6g} ({at}), {where}"
    command = export(winner, ranking, file, f"The best of a sweep: {achieved}.", force=force, config_dir=config_dir)
    print(f"wrote {os.path.relpath(file.path)}: {winner.label}")
    print(f"  {achieved}")
    print("to train it:")
    print(f"  {command}")
    return ExitCode.FINISHED
