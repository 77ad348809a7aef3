"""What has become of a run, from its directory and from what the scheduler says about its jobs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hpctrain.run.bottleneck import Bottleneck, last_bottleneck
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.owner import Owner
from hpctrain.run.times import read_times
from hpctrain.status.accounting import Account, account
from hpctrain.status.state import Evidence, JobPhase, JobView, RunState, judge

TAIL_BYTES = 64 * 2**10
"""How much of the end of metrics.jsonl is read; a few hundred records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as a person wants to know it; times are epoch seconds.

    Attributes:
        name: the run's name in its configuration.
        path: its directory.
        state: where it stands.
        note: why, in one line; empty where there is nothing to say.
        step: the last step known to be completed.
        total_steps: where the run ends; None where only its epochs are known.
        metrics: the last value of each metric; NaN and infinities as they were.
        metrics_time: when the last of them was logged.
        checkpoint_step: of the newest published checkpoint.
        attempts: oldest first; an open one with the times that it has kept so far.
        account: where the wall time went.
        verdict: what holds its training back, as its newest attempt found out; None where none did.
        job_ids: all that it ever had, oldest first.
        may_start: when a queued run is expected to start.
    """

    name: str
    path: Path
    state: RunState
    note: str = ""
    step: int = 0
    total_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_time: float | None = None
    checkpoint_step: int | None = None
    attempts: tuple[Attempt, ...] = ()
    account: Account
    verdict: Bottleneck | None = None
    job_ids: tuple[str, ...] = ()
    may_start: float | None = None


def job_ids(directory: RunDirectory) -> list[str]:
    """The jobs of a run, from its submissions and its attempts, oldest first.

    The id of a whole array is left out where one of its tasks is known: it stands for the other runs as well.
    """
    submitted = [record.get("job_id") for record in directory.job_records()]
    started = [attempt.job_id for attempt in Ledger(directory).attempts()]
    ids = list(dict.fromkeys(str(job_id) for job_id in [*submitted, *started] if job_id))
    arrays = {job_id.partition("_")[0] for job_id in ids if "_" in job_id}
    return [job_id for job_id in ids if job_id not in arrays]


def read_status(
    directory: RunDirectory, jobs: Mapping[str, JobView | None] | None, clock: Callable[[], float] = time.time
) -> RunStatus:
    """The status of a run; reads the run directory.

    Args:
        directory: the run.
        jobs: the scheduler's view by job id, None for one that it doesn't know (any more); None altogether where it
            can't be asked from here.
        clock: epoch seconds.
    """
    ledger = Ledger(directory)
    attempts = [_with_times(attempt, directory) for attempt in ledger.attempts()]
    number, ids = ledger.last_claim(), tuple(job_ids(directory))
    evidence = Evidence(
        attempt=attempts[-1] if attempts and attempts[-1].attempt >= number else Attempt(attempt=number),
        owner=Owner.read(directory.claim(number)) if number else None,
        cancelled_at=_cancelled_at(directory),
        job_ids=ids,
        jobs=jobs,
    )
    state, note = judge(evidence)
    metrics_step, metrics_time, metrics = _last_metrics(directory.metrics)
    saved = next(reversed(directory.checkpoint_steps()), None)
    config = _config(directory.config)
    last = attempts[-1] if attempts else Attempt(attempt=0)
    # what was logged after the step that a resume started from is void, until the resume logs it again
    step = last.end_step if last.end_step is not None else max(metrics_step, last.start_step or 0)
    pending = list(evidence.in_phase(JobPhase.PENDING).values())
    return RunStatus(
        name=str(config.get("name") or directory.path.name),
        path=directory.path,
        state=state,
        note=note,
        step=step,
        total_steps=_total_steps(attempts, config),
        metrics=metrics,
        metrics_time=metrics_time,
        checkpoint_step=saved,
        attempts=tuple(attempts),
        account=account(attempts, directory.job_records(), state=state, saved_step=saved or 0, now=clock()),
        verdict=last_bottleneck(directory),
        job_ids=ids,
        may_start=pending[-1].may_start if pending and state is RunState.QUEUED else None,
    )


def _with_times(attempt: Attempt, directory: RunDirectory) -> Attempt:
    """An open attempt's times aren't in the ledger yet."""
    if not attempt.open:
        return attempt
    return replace(attempt, extra={**attempt.extra, **read_times(directory.claim(attempt.attempt))})


def _cancelled_at(directory: RunDirectory) -> float | None:
    """When the run was cancelled, if that is the last thing that was done with its jobs."""
    records = directory.job_records()
    if not records or not records[-1].get("cancelled"):
        return None
    when = records[-1].get("time")
    return float(when) if isinstance(when, int | float) else None


def _total_steps(attempts: list[Attempt], config: Mapping[str, Any]) -> int | None:
    told = [attempt.extra.get("total_steps") for attempt in attempts]
    trainer = config.get("trainer")
    total = next((steps for steps in reversed(told) if steps), trainer.get("max_steps") if trainer else None)
    return total if isinstance(total, int) else None


def _config(path: Path) -> Mapping[str, Any]:
    """The configuration as plain values; OmegaConf would take longer to import than everything else here."""
    try:
        config = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _last_metrics(path: Path) -> tuple[int, float | None, dict[str, float]]:
    """Step and time of the last record, and the last value of each metric in the file's tail."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0, None, {}
    step, when = 0, None
    values: dict[str, float] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            continue
        step, when = record.pop("step"), record.pop("time", None)
        values |= {name: value for name, value in record.items() if isinstance(value, int | float)}
        values |= {name: float(word) for name, word in (record.get("nonfinite") or {}).items()}
    return step, when, values
