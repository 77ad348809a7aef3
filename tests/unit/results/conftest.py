"""Runs with results, written by what writes those of real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.files import write_json
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.ledger import Ledger, StartFacts
from hpctrain.run.reason import Reason

MakeRun = Callable[..., RunDirectory]
"""Make a run; see `make_run`."""


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a run in the folder `sweep`: its number or name, then its configuration by groups.

    `accuracy` are its evaluations by step, or None; `reason` is that of the end of its only attempt, None for none;
    `varied` are the keys that its sweep varied.
    """

    def make(
        name: object,
        config: Mapping[str, Any],
        accuracy: Mapping[int, float] | None = None,
        *,
        reason: Reason | None = Reason.COMPLETED,
        varied: Mapping[str, str] | None = None,
    ) -> RunDirectory:
        directory = RunDirectory.at(tmp_path / "sweep" / str(name))
        directory.create(0o750)
        directory.config.write_text(yaml.safe_dump({"name": "digits", "run_dir": str(directory.path), **config}))
        write_json(directory.manifest, {"command": "python -m hpctrain", "varied": dict(varied or {}), "time": 1.0})
        if accuracy is None:
            return directory
        ledger = Ledger(directory, clock=lambda: 10.0)
        number = ledger.claim()
        ledger.start(number, StartFacts(launched=1.0), job_id=None, nodes=["n1"], world_size=1, step=0)
        sink = JsonLinesSink(directory.metrics, 0, clock=lambda: 5.0)
        for step, value in accuracy.items():
            sink.log(step, {"train/loss": 1 - value, "eval/accuracy": value, "eval/loss": 2 - value})
        sink.close()
        finite = {step: value for step, value in accuracy.items() if abs(value) < 2}
        if finite:
            top = max(finite, key=lambda step: finite[step])
            best = Score("accuracy", "max", finite[top])
            means = {"eval/accuracy": list(accuracy.values())[-1]}
            record = EvaluationRecord(step=max(accuracy), means=means, best=best, best_step=top)
            record.write(directory.attempt(number))
        if reason is not None:
            write_json(ledger.directory.attempt(number) / "times.json", {"first_step_s": 1.0, "train_s": 4.0})
            ledger.end(number, reason=reason, step=max(accuracy, default=0))
        return directory

    return make
