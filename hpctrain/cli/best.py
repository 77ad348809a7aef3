"""Show the runs of a sweep, best first, with what they vary.

examples:
  python -m hpctrain best lr                                       # the runs under runs/lr, best first
  python -m hpctrain best lr more_lr --top 5                       # those of two folders together
  python -m hpctrain best lr --metric train/loss                   # by another metric that was logged
  python -m hpctrain best lr --metric perplexity --mode min --csv
  python -m hpctrain best lr --export conf/experiment/best.yaml    # then: python -m hpctrain experiment=best

The metric is the one by which the runs are judged: checkpoint.metric, or the task's own. The table has the keys by
which the runs differ. Runs that differ in nothing but seed are one row: BEST is the mean of their best values, STD
their sample standard deviation. Queued and training runs are ranked by their best value so far; failed, paused, stopped
and never started runs come last, without a rank.

--export writes the winner's configuration. `python -m hpctrain export RUN` writes a run's weights.

Exit code 0; 2 if SWEEP has no runs, or they have no metric in common.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.cli.arguments import add_runs_dir, chosen_runs, command_parser, number, typed_name
from hpctrain.cli.screen import cut_to_width
from hpctrain.cli.status import plain
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.phrases import aligned, counted, duration, listed, spreadsheet_text
from hpctrain.results.ranking import RankedRow, Ranking, judging_metric, named_metric, rank
from hpctrain.results.run_result import SEED, RunResult, read_results
from hpctrain.run.evaluation import MODES
from hpctrain.run.manifest import value_text


def main(arguments: list[str]) -> int:
    """Rank runs; ``arguments`` are those after `best`."""
    options = _parser().parse_args(arguments)
    runs = chosen_runs(options)
    results = read_results(runs)
    ranking = _ranked(results, options)
    if options.export is not None:
        return _export_winner(ranking, Path(options.export), force=options.force, config_dir=options.config_dir)
    rows = ranking.rows if options.top is None else ranking.rows[: options.top]
    if options.json:
        print(json.dumps(_plain_json(_as_json(ranking, rows)), indent=2, allow_nan=False))
    elif options.csv:
        _write_csv(ranking, rows)
    else:
        print("\n".join(_table(ranking, rows, Path(options.runs_dir))))
    return ExitCode.FINISHED


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("best", __doc__)
    what = "a sweep or any folder with runs, or its path below --runs-dir"
    parser.add_argument("run", nargs="+", metavar="SWEEP", help=what)
    add_runs_dir(parser)
    parser.add_argument("--metric", metavar="NAME", help="a logged metric, with or without eval/")
    parser.add_argument("--mode", choices=MODES, help="whether the lowest or the highest value is best")
    parser.add_argument("--top", type=number(1, 1e9, int), metavar="N", help="show the first N rows")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    form.add_argument("--csv", action="store_true", help="print CSV instead of the table")
    meaning = "write the winner as an experiment file, FOLDER/experiment/NAME.yaml"
    form.add_argument("--export", metavar="FILE", help=meaning)
    parser.add_argument("--force", action="store_true", help="with --export: replace a file")
    parser.add_argument("--config-dir", metavar="FOLDER", help="with --export: your own groups and options")
    return parser


def _ranked(results: Sequence[RunResult], options: argparse.Namespace) -> Ranking:
    if options.metric is not None:
        return rank(results, named_metric(results, options.metric, options.mode))
    metric = judging_metric(results)
    return rank(results, metric if options.mode is None else named_metric(results, metric.name, options.mode))


def _table(ranking: Ranking, rows: Sequence[RankedRow], runs_dir: Path) -> list[str]:
    assert ranking.metric is not None
    over_seeds = any(len(row.runs) > 1 for row in rows)
    spread = ("STD", "LOWEST", "HIGHEST", "RUNS") if over_seeds else ()
    head = ("RANK", *ranking.keys, "BEST", *spread, "AT STEP", "LAST", "STEPS", "TIME", "STATE", "RUN")
    cells = [head, *(_cells(ranking, row, runs_dir, over_seeds=over_seeds) for row in rows)]
    better = "lower" if ranking.metric.mode == "min" else "higher"
    lines = cut_to_width([f"by {ranking.metric.name}, {better} is better", *aligned(cells)])
    if len(rows) < len(ranking.rows):
        lines.append(f"{counted(len(ranking.rows) - len(rows), 'more row')}: leave out --top to see all")
    if live := sum(run.is_live for row in rows for run in row.runs):
        lines.append(f"{counted(live, 'run')} still queued or training, with the values so far")
    if ranking.winner is not None and ranking.winner in rows:
        lines += [
            f"warning: {typed_name(run.status.path, runs_dir)}: {run.status.best_warning}"
            for run in ranking.winner.runs
            if run.status.best_warning
        ]
    return lines


def _cells(ranking: Ranking, row: RankedRow, runs_dir: Path, *, over_seeds: bool) -> tuple[str, ...]:
    numbers = _numbers(row)
    spread = (*(_brief(numbers[name]) for name in ("standard_deviation", "lowest", "highest")), str(len(row.runs)))
    return (
        "-" if row.rank is None else str(row.rank),
        *(_value(row, key) for key in ranking.keys),
        _brief(row.best),
        *(spread if over_seeds else ()),
        "-" if row.best_step is None else str(row.best_step),
        _brief(row.last),
        str(row.step) if row.total_steps is None else f"{row.step}/{row.total_steps}",
        duration(row.seconds),
        row.state,
        listed((typed_name(run.status.path, runs_dir) for run in row.runs), max_names=3),
    )


def _value(row: RankedRow, key: str) -> str:
    if key == SEED and len(row.runs) > 1:
        return listed(row.seeds, max_names=4, separator=",")
    return value_text(row.values[key]) if key in row.values else "-"


def _brief(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _as_json(ranking: Ranking, rows: Sequence[RankedRow]) -> dict[str, Any]:
    assert ranking.metric is not None
    return {
        "metric": ranking.metric.name,
        "mode": ranking.metric.mode,
        "keys": list(ranking.keys),
        "rows": [{"rank": row.rank, "values": dict(row.values), **_numbers(row), "runs": _runs(row)} for row in rows],
    }


def _plain_json(record: Mapping[str, Any]) -> Any:
    """The record with NaN, infinities and dates of configurations, which JSON lacks, as text."""
    return json.loads(json.dumps(record, default=str, skipkeys=True), parse_constant=str)


def _numbers(row: RankedRow) -> dict[str, Any]:
    spread = row.spread
    return {
        "best": row.best,
        "best_step": row.best_step,
        "last": plain(row.last),
        "standard_deviation": None if spread is None else spread.deviation,
        "lowest": None if spread is None else spread.lowest,
        "highest": None if spread is None else spread.highest,
        "num_runs": len(row.runs),
        "step": row.step,
        "total_steps": row.total_steps,
        "training_s": row.seconds,
        "state": row.state,
    }


def _runs(row: RankedRow) -> list[dict[str, Any]]:
    return [
        {
            "path": str(run.status.path),
            "seed": seed,
            "best": metric_value.best,
            "best_step": metric_value.step,
            "last": plain(metric_value.last),
            "best_warning": run.status.best_warning,
            "state": run.status.state,
        }
        for run, metric_value, seed in zip(row.runs, row.metric_values, row.seeds, strict=True)
    ]


def _write_csv(ranking: Ranking, rows: Sequence[RankedRow]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for place, row in enumerate(rows):
        cells = {**_numbers(row), "last": row.last, "runs": ";".join(str(run.status.path) for run in row.runs)}
        if place == 0:
            writer.writerow(["rank", *map(spreadsheet_text, ranking.keys), *cells])
        writer.writerow([row.rank, *(_csv_value(row, key) for key in ranking.keys), *cells.values()])


def _csv_value(row: RankedRow, key: str) -> str:
    if key == SEED and len(row.runs) > 1:
        return " ".join(map(str, row.seeds))
    return spreadsheet_text(value_text(row.values[key])) if key in row.values else ""


def _export_winner(ranking: Ranking, path: Path, *, force: bool, config_dir: str | None) -> ExitCode:
    """Write the best row's configuration as an experiment file, and print the command that trains it.

    Raises:
        RunDirectoryError: no run has completed or is running.
        ConfigError: the file exists, or an experiment can't express the configuration.
    """
    from hpctrain.results.experiment_file import ExperimentFile, export  # Hydra is slow to import

    file = ExperimentFile.at(path)
    winner = ranking.winner
    if winner is None or ranking.metric is None:
        problem = "there is no winner to export: no run that has completed, or is running, has a value"
        raise RunDirectoryError(f"{problem}; `python -m hpctrain best` without --export lists the others")
    where = listed((os.path.relpath(run.status.path) for run in winner.runs), max_names=3)
    at = f"mean of {len(winner.runs)} runs" if len(winner.runs) > 1 else f"step {winner.best_step}"
    summary = f"{ranking.metric.name} {winner.best:.6g} ({at}), {where}"
    command = export(ranking, file, f"The best of a sweep: {summary}.", force=force, config_dir=config_dir)
    print(f"wrote {os.path.relpath(file.path)}: {winner.label}")
    print(f"  {summary}")
    print("to train it:")
    print(f"  {command}")
    return ExitCode.FINISHED
