"""Show how two runs differ.

examples:
  python -m hpctrain compare lr/0 lr/1
  python -m hpctrain compare lr/0 again --json

Two runs should be equal if the keys that decide the weights are the same, and the code as far as it was recorded. If
so, compare shows the first step at which they differ: in a metric that both logged, and in a checkpoint's weights.

Exit code 0; 1 if two runs that should be equal differ; 2 if RUN is not a run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.cli.arguments import add_runs, command_parser
from hpctrain.cli.status import fields_as_json
from hpctrain.errors import ExitCode
from hpctrain.phrases import aligned, counted
from hpctrain.results.ranking import MetricValue
from hpctrain.results.run_comparison import FirstDifference, RunComparison, compare_runs
from hpctrain.results.run_result import RunResult, read_results
from hpctrain.run.ledger import Attempt
from hpctrain.run.manifest import value_text
from hpctrain.status.runs import run_of

MOST_CHARS = 60


def main(arguments: list[str]) -> int:
    """Compare two runs; ``arguments`` are those after `compare`."""
    parser = command_parser("compare", __doc__)
    add_runs(parser, nargs=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(arguments)
    directories = [run_of(name, Path(options.runs_dir)) for name in options.run]
    first, second = (read_results([directory])[0] for directory in directories)
    comparison = compare_runs(first, second)
    if options.json:
        print(json.dumps(_as_json(comparison, [str(directory.path) for directory in directories]), indent=2))
    else:
        print("\n".join(_report(comparison, (first, second))))
    return ExitCode.FAILED if comparison.diverges else ExitCode.FINISHED


def _report(comparison: RunComparison, runs: tuple[RunResult, RunResult]) -> Iterator[str]:
    for mark, run in zip("AB", runs, strict=True):
        yield f"{mark}  {os.path.relpath(run.status.path)}  {run.status.state}, step {run.status.step}"
    yield from _section("keys that decide the weights", comparison.deciding)
    yield from _section("other keys", comparison.others)
    yield from _code(comparison)
    yield from (f"  {change:<8} {path}" for path, change in comparison.files.items())
    yield from _section("environment", comparison.environment)
    yield from _metrics(comparison)
    if comparison.divergence is None:
        unreadable = " and ".join(mark for mark, run in zip("AB", runs, strict=True) if not run.config)
        if unreadable:
            yield f"whether they should be equal isn't known: config.yaml of {unreadable} can't be read"
        else:
            yield "the runs differ in what decides the weights, so their results aren't expected to be equal"
        return
    divergence = comparison.divergence
    if not divergence.exists:
        yield _equal(divergence)
        return
    if divergence.step is not None:
        claim = "their code may differ" if any(comparison.code_unknown) else "they should be equal"
        yield f"{claim}; the first difference of metrics is at step {divergence.step}:"
        yield from (f"  {name}  {mine!r}  {theirs!r}" for name, (mine, theirs) in divergence.metrics.items())
    if divergence.checkpoint is not None:
        before = divergence.equal_checkpoint
        unchanged = "" if before is None else f"; those of step {before} are the same"
        yield f"the weights of the checkpoints of step {divergence.checkpoint} differ{unchanged}"
    step = min(differing for differing in (divergence.step, divergence.checkpoint) if differing is not None)
    for mark, run in zip("AB", runs, strict=True):
        yield from _attempts(mark, run.status.attempts, step)


def _equal(divergence: FirstDifference) -> str:
    parts = []
    if divergence.num_metrics:
        parts.append(f"{counted(divergence.num_metrics, 'metric')} at {counted(divergence.num_steps, 'step')}")
    if divergence.num_checkpoints:
        parts.append(f"the weights of {counted(divergence.num_checkpoints, 'checkpoint')}")
    if not parts:
        return "nothing to compare: they have no metric and no checkpoint of the same step"
    return f"equal, to the last bit: {' and '.join(parts)}"


def _code(comparison: RunComparison) -> Iterator[str]:
    unknown = " and ".join(mark for mark, is_unknown in zip("AB", comparison.code_unknown, strict=True) if is_unknown)
    if comparison.code or not unknown:
        yield from _section("code", comparison.code)
    else:
        yield f"code: unknown for {unknown}, so it may differ"


def _metrics(comparison: RunComparison) -> Iterator[str]:
    if not comparison.metrics:
        yield "last values of metrics: none in common"
        return
    yield "last values of metrics:"
    heading = ("  ", "A", "B", *(("BEST OF A", "BEST OF B") if comparison.best else ()))
    rows = [heading]
    for name, (first, second) in comparison.metrics.items():
        best = (_best(value) for value in comparison.best.get(name, (None, None))) if comparison.best else ()
        rows.append((f"  {name}", _cell(first), _cell(second), *best))
    yield from aligned(rows)


def _best(value: MetricValue | None) -> str:
    if value is None or value.best is None:
        return ""
    return _cell(value.best) if value.step is None else f"{_cell(value.best)} at step {value.step}"


def _attempts(mark: str, attempts: Sequence[Attempt], step: int) -> Iterator[str]:
    """Describe the attempt that trained the step, and the one before if that one resumed; count the others."""
    neighbours = _around(attempts, step)
    for attempt in neighbours:
        end = "?" if attempt.end_step is None else str(attempt.end_step)
        world = "-" if attempt.world_size is None else str(attempt.world_size)
        where = ",".join(attempt.nodes) or "-"
        steps = f"steps {attempt.actual_start_step or 0} to {end}, {attempt.reason or 'no end'}"
        yield f"{mark}  attempt {attempt.attempt}: {steps}, world size {world}, on {where}"
    if num_hidden := len(attempts) - len(neighbours):
        yield f"{mark}  {counted(num_hidden, 'other attempt')} not shown"


def _around(attempts: Sequence[Attempt], step: int) -> Sequence[Attempt]:
    # the last one that trained the step, because its record replaces those of steps that were lost
    places = [
        place
        for place, attempt in enumerate(attempts)
        if (attempt.actual_start_step or 0) < step and (attempt.end_step is None or step <= attempt.end_step)
    ]
    # without one, the ledger is torn, or the step is 0
    place = places[-1] if places else (len(attempts) - 1 if step else 0)
    first = place - 1 if place > 0 and attempts[place].actual_start_step else place
    return attempts[first : place + 1]


def _section(title: str, pairs: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    if not pairs:
        yield f"{title}: no difference"
        return
    yield f"{title}:"
    yield from aligned([("  ", "A", "B"), *((f"  {key}", _cell(a), _cell(b)) for key, (a, b) in pairs.items())])


def _cell(value: object) -> str:
    text = "-" if value is None else value_text(value)
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}..."


def _as_json(comparison: RunComparison, paths: list[str]) -> dict[str, Any]:
    conclusion = {"should_be_equal": comparison.should_be_equal, "diverges": comparison.diverges}
    return {"runs": paths, **conclusion, **fields_as_json(comparison)}
