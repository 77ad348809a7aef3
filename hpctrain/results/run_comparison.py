"""Differences of two runs: configuration, code, environment, results, and the first step at which equal runs part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hpctrain.config.root import decides_the_weights
from hpctrain.errors import CheckpointDamagedError, RunDirectoryError
from hpctrain.files import read_json_or_empty
from hpctrain.results.ranking import MetricValue, judging_metric, metric_value
from hpctrain.results.run_result import RunResult, comparable
from hpctrain.run.checkpoint_manifest import read_manifest
from hpctrain.run.code import CodeFile, current_code, read_files
from hpctrain.run.directory import RunDirectory
from hpctrain.status.metrics import LoggedMetrics, read_metrics

MACHINE_METRICS = ("throughput/*", "memory/*", "*_per_second", "*_runtime")
"""Patterns of metrics of the machine, which differ from run to run; the last two are those of transformers."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference of two runs in their metrics and in their checkpoints.

    Attributes:
        step: the first step that both logged, and at which a metric differs; None without one.
        metrics: at that step, both values by name, exactly.
        checkpoint: the first step whose checkpoints have different weights; None without one.
        equal_checkpoint: the last step before it whose checkpoints have the same weights; None without one.
        num_metrics: metrics that both logged at the same steps.
        num_steps: those steps.
        num_checkpoints: steps of which both have a checkpoint with a digest.
    """

    step: int | None
    metrics: Mapping[str, tuple[float, float]]
    checkpoint: int | None
    equal_checkpoint: int | None
    num_metrics: int = 0
    num_steps: int = 0
    num_checkpoints: int = 0

    @property
    def exists(self) -> bool:
        """Whether anything differs."""
        return self.step is not None or self.checkpoint is not None


def find_first_difference(first: RunDirectory, second: RunDirectory) -> FirstDifference:
    """Compare the metrics that both runs logged at the same steps, and the digests of their checkpoints' weights."""
    mine, theirs = _readable_metrics(first), _readable_metrics(second)
    common = {name: mine[name].keys() & theirs[name].keys() for name in mine.keys() & theirs.keys()}
    places = {(step, name) for name, steps in common.items() for step in steps}
    # as text, which is exact, because NaN isn't equal to itself
    differences = [(step, name) for step, name in places if repr(mine[name][step]) != repr(theirs[name][step])]
    first_step = min((step for step, _ in differences), default=None)
    metrics = {name: (mine[name][step], theirs[name][step]) for step, name in sorted(differences) if step == first_step}
    compared = [(step, name) for step, name in places if first_step is None or step <= first_step]
    num_metrics = len({name for _, name in compared})
    num_steps = len({step for step, _ in compared})
    equal = differing = None
    num_checkpoints = 0
    for saved_step in sorted(set(first.checkpoint_steps()) & set(second.checkpoint_steps())):
        digests = {_digest(run, saved_step) for run in (first, second)}
        if None in digests:
            continue
        num_checkpoints += 1
        if len(digests) > 1:
            differing = saved_step
            break
        equal = saved_step
    return FirstDifference(first_step, metrics, differing, equal, num_metrics, num_steps, num_checkpoints)


def logged_metrics(directory: RunDirectory, ignored: Sequence[str] = ()) -> dict[str, dict[int, float]]:
    """Read a run's metrics: name -> step -> value, without those of the machine.

    Args:
        directory: of the run.
        ignored: patterns of the names of further metrics to leave out.

    Raises:
        OSError: metrics.jsonl exists and can't be read.
    """
    return _by_name(read_metrics(directory.metrics), ignored)


def _readable_metrics(directory: RunDirectory) -> dict[str, dict[int, float]]:
    records: list[LoggedMetrics] = []
    with contextlib.suppress(OSError):
        records.extend(read_metrics(directory.metrics))  # keeps those before an error
    metrics = _by_name(records)
    return {name: {step: float(value) for step, value in values.items()} for name, values in metrics.items()}


def _by_name(records: Iterable[LoggedMetrics], ignored: Sequence[str] = ()) -> dict[str, dict[int, float]]:
    metrics: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.values.items():
            if not any(fnmatchcase(name, pattern) for pattern in (*MACHINE_METRICS, *ignored)):
                metrics.setdefault(name, {})[record.step] = value
    return metrics


def _digest(directory: RunDirectory, step: int) -> str | None:
    with contextlib.suppress(CheckpointDamagedError):
        return str(read_manifest(directory.checkpoint(step))["weights_digest"]) or None
    return None


NOT_COMPARED = ("run_dir", "name")
Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The differences between two runs; a value that one lacks is None.

    Attributes:
        deciding: keys that decide the weights.
        others: other keys of the configuration.
        code: the digest of the copy, or git's commit and changes, as far as both recorded them.
        code_unknown: by run, whether too little of its code was recorded to tell that it is the same.
        files: the files of the copies that differ: `changed`, `added` or `removed` by path.
        environment: versions, host and executable; nodes, world sizes and GPUs of the attempts.
        metrics: the last values of the metrics that both logged, equal ones included.
        best: of those by which a run is judged, the best value of each run that it judges.
        divergence: the first difference, if the runs should be equal; else None.
    """

    deciding: Mapping[str, Pair]
    others: Mapping[str, Pair]
    code: Mapping[str, Pair]
    code_unknown: tuple[bool, bool]
    files: Mapping[str, str]
    environment: Mapping[str, Pair]
    metrics: Mapping[str, Pair]
    best: Mapping[str, tuple[MetricValue | None, MetricValue | None]]
    divergence: FirstDifference | None

    @property
    def should_be_equal(self) -> bool:
        """Whether the keys that decide the weights are the same, and no difference of the code is known."""
        return self.divergence is not None

    @property
    def diverges(self) -> bool:
        """Whether the runs should be equal and are not."""
        return self.divergence is not None and self.divergence.exists


def compare_runs(first: RunResult, second: RunResult) -> RunComparison:
    """Compare two runs by their records; no tensor is read."""
    config = _differences(first.config, second.config)
    config = {key: pair for key, pair in config.items() if key not in NOT_COMPARED}
    deciding = {key: pair for key, pair in config.items() if decides_the_weights(key)}
    codes = [_code(run.directory) for run in (first, second)]
    # copies tell more than commits, if both runs have one
    names = ["digest"] if all(code["digest"] for code in codes) else ["commit", "uncommitted changes"]
    pairs = {name: (codes[0][name], codes[1][name]) for name in names}
    code = {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}
    equal = not deciding and not code and bool(first.config) and bool(second.config)
    mine, theirs = first.status.metrics, second.status.metrics
    bests = _best(first), _best(second)
    common_names = sorted(mine.keys() & theirs.keys())
    best_names = [name for name in common_names if any(name in best for best in bests)]
    return RunComparison(
        deciding=deciding,
        others={key: pair for key, pair in config.items() if key not in deciding},
        code=code,
        code_unknown=(None in [codes[0][name] for name in names], None in [codes[1][name] for name in names]),
        files=_file_changes(_files(first.directory), _files(second.directory)),
        environment=_differences(_environment(first), _environment(second)),
        metrics={name: (mine[name], theirs[name]) for name in common_names},
        best={name: (bests[0].get(name), bests[1].get(name)) for name in best_names},
        divergence=find_first_difference(first.directory, second.directory) if equal else None,
    )


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Pair]:
    keys = sorted(first.keys() | second.keys())
    pairs = {key: (first.get(key), second.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if comparable(pair[0]) != comparable(pair[1])}


def _best(result: RunResult) -> dict[str, MetricValue]:
    """Return the values of the metric by which the run is judged, by its name; nothing without one."""
    try:
        metric = judging_metric([result])
    except RunDirectoryError:
        return {}
    return {metric.name: metric_value(result, metric)}


def _code(directory: RunDirectory) -> dict[str, str | None]:
    """The digest of the copy, git's commit, and the uncommitted changes; None for what wasn't recorded."""
    copy = None
    with contextlib.suppress(OSError, RunDirectoryError):
        copy = current_code(directory)
    git = read_json_or_empty(directory.manifest).get("git")
    git = git if isinstance(git, dict) else {}
    commit, changes = (git[name] if isinstance(git.get(name), str) else None for name in ("commit", "diff"))
    # a copy that a resume took later has a commit of its own, and its changes weren't recorded
    if git.get("diff_left_out") or (copy is not None and copy.commit and copy.commit != commit):
        changes = None
    if copy is None:
        return {"digest": None, "commit": commit, "uncommitted changes": changes}
    return {"digest": copy.digest, "commit": copy.commit or commit, "uncommitted changes": changes}


def _files(directory: RunDirectory) -> dict[str, CodeFile]:
    with contextlib.suppress(OSError, RunDirectoryError):
        if (copy := current_code(directory)) is not None:
            return {file.path: file for file in read_files(copy.list)}
    return {}


def _file_changes(before: Mapping[str, CodeFile], after: Mapping[str, CodeFile]) -> dict[str, str]:
    if not before or not after:
        return {}
    changes = dict.fromkeys(before.keys() - after.keys(), "removed")
    changes |= dict.fromkeys(after.keys() - before.keys(), "added")
    changes |= {path: "changed" for path in before.keys() & after.keys() if before[path] != after[path]}
    return dict(sorted(changes.items()))


def _environment(result: RunResult) -> dict[str, Any]:
    manifest = read_json_or_empty(result.directory.manifest)
    versions = manifest.get("versions")
    facts = {str(name): value for name, value in versions.items()} if isinstance(versions, dict) else {}
    facts |= {name: manifest.get(name) for name in ("host", "executable")}
    attempts = result.status.attempts
    facts["nodes"] = sorted({node for attempt in attempts for node in attempt.nodes})
    facts["world sizes"] = sorted({attempt.world_size for attempt in attempts if attempt.world_size is not None})
    facts["GPUs"] = sorted({attempt.gpu for attempt in attempts if attempt.gpu is not None})
    return facts
