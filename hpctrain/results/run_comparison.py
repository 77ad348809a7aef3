"""How two runs differ: configuration, code, environment and results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.config.identity import decides_the_weights
from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json_or_empty
from hpctrain.results.divergence import Divergence, find_divergence
from hpctrain.results.metric_choice import judging_metric
from hpctrain.results.metric_value import MetricValue, metric_value
from hpctrain.results.recorded_code import RecordedCode
from hpctrain.results.run_result import RunResult
from hpctrain.results.varied_keys import comparable
from hpctrain.run.code import CodeFile, current_code, read_files
from hpctrain.run.directory import RunDirectory

NOT_COMPARED = ("run_dir", "name")
Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """What differs between two runs; a value that one lacks is None.

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
    divergence: Divergence | None

    @property
    def should_be_equal(self) -> bool:
        """Whether the keys that decide the weights are the same, and no difference of the code is known."""
        return self.divergence is not None

    @property
    def diverges(self) -> bool:
        """Whether the runs should be equal and are not."""
        return self.divergence is not None and self.divergence.exists


def compare_runs(one: RunResult, other: RunResult) -> RunComparison:
    """Compare two runs by their records; no tensor is read."""
    config = _differences(one.config, other.config)
    config = {key: pair for key, pair in config.items() if key not in NOT_COMPARED}
    deciding = {key: pair for key, pair in config.items() if decides_the_weights(key)}
    codes = RecordedCode.read(one.directory), RecordedCode.read(other.directory)
    code = codes[0].differences(codes[1])
    equal = not deciding and not code and bool(one.config) and bool(other.config)
    mine, theirs = one.status.metrics, other.status.metrics
    bests = _best(one), _best(other)
    common = sorted(mine.keys() & theirs.keys())
    return RunComparison(
        deciding=deciding,
        others={key: pair for key, pair in config.items() if key not in deciding},
        code=code,
        code_unknown=(codes[0].is_unknown_beside(codes[1]), codes[1].is_unknown_beside(codes[0])),
        files=_file_changes(_files(one.directory), _files(other.directory)),
        environment=_differences(_environment(one), _environment(other)),
        metrics={name: (mine[name], theirs[name]) for name in common},
        best={name: (bests[0].get(name), bests[1].get(name)) for name in common if any(name in best for best in bests)},
        divergence=find_divergence(one.directory, other.directory) if equal else None,
    )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Pair]:
    keys = sorted(one.keys() | other.keys())
    pairs = {key: (one.get(key), other.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if comparable(pair[0]) != comparable(pair[1])}


def _best(result: RunResult) -> dict[str, MetricValue]:
    """Return the values of the metric by which the run is judged, by its name; nothing without one."""
    try:
        metric = judging_metric([result])
    except RunDirectoryError:
        return {}
    return {metric.name: metric_value(result, metric)}


def _files(directory: RunDirectory) -> Iterable[CodeFile]:
    with contextlib.suppress(OSError, RunDirectoryError):
        if (copy := current_code(directory)) is not None:
            return read_files(copy.list)
    return ()


def _file_changes(one: Iterable[CodeFile], other: Iterable[CodeFile]) -> dict[str, str]:
    before, after = ({file.path: file for file in files} for files in (one, other))
    if not before or not after:
        return {}
    found = dict.fromkeys(before.keys() - after.keys(), "removed")
    found |= dict.fromkeys(after.keys() - before.keys(), "added")
    found |= {path: "changed" for path in before.keys() & after.keys() if before[path] != after[path]}
    return dict(sorted(found.items()))


def _environment(result: RunResult) -> dict[str, Any]:
    manifest = read_json_or_empty(result.directory.manifest)
    versions = manifest.get("versions")
    found = {str(name): value for name, value in versions.items()} if isinstance(versions, dict) else {}
    found |= {name: manifest.get(name) for name in ("host", "executable")}
    attempts = result.status.attempts
    found["nodes"] = sorted({node for attempt in attempts for node in attempt.nodes})
    found["world sizes"] = sorted({one.world_size for one in attempts if one.world_size is not None})
    found["GPUs"] = sorted({one.gpu for one in attempts if one.gpu is not None})
    return found
