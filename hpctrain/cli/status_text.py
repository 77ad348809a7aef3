"""Statuses of runs as text for people."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain.cli.attempts_text import attempts_table, moment, span, time_line
from hpctrain.run.bottleneck import Bottleneck
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import first_cause, read_exit_records
from hpctrain.status.report import RunStatus
from hpctrain.status.state import RunState

_MEASURED = (
    "memory/peak_gb",
    "throughput/mfu",
    "throughput/samples_per_s_per_device",
    "throughput/waiting_for_data",
)
"""Metrics that `bottleneck_lines` shows in another way."""
_HEAD = ("RUN", "STATE", "STEP", "LOSS", "ACCURACY", "ATTEMPTS", "JOB", "LAST")


def table(statuses: Sequence[RunStatus], runs_dir: Path, now: float, columns: int | None) -> str:
    """One line per run; a state that needs a reason has it at the end, as far as it fits.

    Args:
        statuses: in the order in which they are shown.
        runs_dir: runs under it are named from there, as the commands take them.
        now: epoch seconds.
        columns: the width of the terminal; None is no bound.
    """
    rows = [_HEAD, *(_row(status, runs_dir, now) for status in statuses)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = ["", *(status.note for status in statuses)]
    lines = [f"{line}  {note}".rstrip() for line, note in zip(lines, notes, strict=True)]
    return "\n".join(line if columns is None or len(line) <= columns else line[: columns - 3] + "..." for line in lines)


def _row(status: RunStatus, runs_dir: Path, now: float) -> tuple[str, ...]:
    name = os.path.relpath(status.path, runs_dir)
    loss = status.metrics.get("train/loss", status.metrics.get("eval/loss"))
    accuracy = status.metrics.get("eval/accuracy")
    last = last_sign(status)
    return (
        os.path.relpath(status.path) if name.startswith("..") else name,
        status.state,
        str(status.step) if status.total_steps is None else f"{status.step}/{status.total_steps}",
        "-" if loss is None else f"{loss:.4g}",
        "-" if accuracy is None else f"{accuracy:.4f}",
        str(len(status.attempts)),
        status.job_ids[-1] if status.job_ids else "-",
        "-" if last is None else f"{span(now - last)} ago",
    )


def detail(status: RunStatus, now: float) -> str:
    """Everything about one run, and what to type next."""
    of_total = "" if status.total_steps is None else f" of {status.total_steps}"
    lines = [
        f"run         {os.path.relpath(status.path)}",
        f"state       {status.state}" + (f": {status.note}" if status.note else ""),
        f"step        {status.step}{of_total}",
        f"checkpoint  {'none yet' if status.checkpoint_step is None else f'step {status.checkpoint_step}'}",
    ]
    if status.may_start is not None:
        lines.insert(2, f"may start   {moment(status.may_start)}, in {span(status.may_start - now)}, says SLURM")
    if status.metrics:
        when = "" if status.metrics_time is None else f"  ({span(now - status.metrics_time)} ago)"
        shown = (name for name in sorted(status.metrics) if name not in _MEASURED)
        values = (f"{name} {status.metrics[name]:.4g}" for name in shown)
        lines.append(f"metrics     {'  '.join(values)}{when}")
    if status.job_ids:
        lines.append(f"jobs        {' '.join(status.job_ids)}")
    if status.attempts:
        lines.append("attempts")
        lines += [f"  {line}" for line in attempts_table(status, now)]
    if spent := time_line(status.account):
        lines.append(f"time        {spent}")
    if status.verdict is not None:
        lines += bottleneck_lines(status.verdict)
    lines.append("next")
    lines += [f"  python -m hpctrain {command}" for command in _next_commands(status)]
    return "\n".join(lines)


def bottleneck_lines(found: Bottleneck) -> list[str]:
    """Lines on the newest attempt's training: where the time went, how fast it was, and what to change."""
    lines = []
    if found.shares:
        shares = "  ".join(f"{part.replace('_', ' ')} {share:.0%}" for part, share in found.shares.items())
        lines.append(f"training    {shares}")
    if figures := _figures(found):
        lines.append(f"speed       {figures}")
    if found.slowest_rank is not None and found.slowest_ratio is not None:
        own = f"{found.slowest_ratio:.2f} times the others' own time of a step"
        lines.append(f"slowest     rank {found.slowest_rank} on {found.slowest_host}: {own}")
    lines.append(f"verdict     {found.text}")
    return lines + [f"also        {text}" for text in found.also]


def _figures(found: Bottleneck) -> str:
    figures = []
    if found.samples_per_s_per_device is not None:
        figures.append(f"{found.samples_per_s_per_device:.4g} samples/s per device")
    if found.mfu is not None:
        figures.append(f"MFU {found.mfu:.1%}")
    if found.memory_peak_bytes:
        figures.append(f"memory peak {found.memory_peak_bytes / 1e9:.2f} GB")
    return "  ".join(figures)


def last_sign(status: RunStatus) -> float | None:
    """When the run was last heard of; epoch seconds."""
    times = [status.metrics_time, *(attempt.start_time for attempt in status.attempts)]
    times += [attempt.end_time for attempt in status.attempts]
    return max((moment for moment in times if moment is not None), default=None)


def _next_commands(status: RunStatus) -> list[str]:
    run = shlex.quote(os.path.relpath(status.path))
    if status.state.may_change:
        return [f"logs {run} --follow", f"cancel {run}"]
    if status.state is RunState.COMPLETED:
        return [f"inspect {run}", f"logs {run}"]
    logs = f"logs {run}"
    if status.attempts:
        directory = RunDirectory(status.path)
        cause = first_cause(read_exit_records(directory.claim(status.attempts[-1].attempt)))
        logs += f" --rank {cause.rank}" if cause is not None and cause.rank else ""
    return [logs, f"resume {run}"]
