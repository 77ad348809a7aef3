"""One run in detail: its state, its attempts, where its time went, and what to type next."""

from __future__ import annotations

import os
import shlex

from hpctrain.attempt.requeue import NO_PROGRESS_REPORTED
from hpctrain.phrases import aligned, duration, listed, local_time, on_one_line
from hpctrain.run.bottleneck import Bottleneck
from hpctrain.run.config_change import changed_values
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import first_cause, read_exit_records
from hpctrain.run.ledger import Attempt
from hpctrain.run.manifest import varied_text
from hpctrain.run.saves import unreported_files
from hpctrain.status.accounting import Account, AttemptAccount, WallTime
from hpctrain.status.run_status import RunStatus
from hpctrain.status.state import RunState

_MEASURED = (
    "memory/peak_gb",
    "throughput/mfu",
    "throughput/samples_per_s_per_device",
    "throughput/slowest_rank",
    "throughput/slowest_ratio",
    "throughput/waiting_for_data",
)
"""Metrics that `bottleneck_lines` shows in another way."""
NOTEWORTHY_RATIO = 1.1
"""Ranks differ by less in any run: the slowest one isn't shown then."""
_HEAD = ("", "BEGAN", "STEPS", "LOST", "QUEUED", "START", "RANKS", "JOB", "END")
_RIGHT_ALIGNED = (0, 3, 4, 5)


def run_details(status: RunStatus, now: float) -> str:
    """Describe a run; ``now`` is in epoch seconds."""
    lines = [
        f"run         {os.path.relpath(status.path)}",
        *([f"command     {on_one_line(status.command)}"] if status.command else []),
        *([f"varied      {varied_text(status.varied)}"] if status.varied else []),
        *(f"changed     {key}={text}" for key, text in changed_values(RunDirectory(status.path)).items()),
        f"state       {status.state}" + (f": {status.note}" if status.note else ""),
    ]
    if status.may_start is not None:
        wait = duration(status.may_start - now)
        lines.append(f"may start   {local_time(status.may_start)}, in {wait}, by SLURM's estimate")
    lines.append(f"step        {progress_text(status)}")
    lines.append(f"checkpoint  {_checkpoint(status, now)}")
    if status.set_aside:
        lines.append(f"set aside   {' '.join(status.set_aside)}: damaged, skipped by a resume")
    if status.metrics:
        when = "" if status.metrics_time is None else f"  ({duration(now - status.metrics_time)} ago)"
        names = (name for name in sorted(status.metrics) if name not in _MEASURED)
        values = (f"{name} {status.metrics[name]:.4g}" for name in names)
        lines.append(f"metrics     {'  '.join(values)}{when}")
    if status.best is not None:
        lines.append(f"best        {status.best.name} {status.best.value:.4g} at step {status.best_step}")
    if status.best_warning:
        lines.append(f"warning     {status.best_warning}")
    if status.job_ids:
        lines.append(f"jobs        {' '.join(status.job_ids)}")
    if status.attempts:
        lines.append("attempts")
        lines += [f"  {line}" for line in attempts_table(status, now)]
    lines += [f"not exact   {text}" for text in status.not_exact]
    if spent := _shares_of_time(status.account, with_ratio=status.knows_step):
        lines.append(f"time        {spent}")
    if status.bottleneck is not None:
        lines += bottleneck_lines(status.bottleneck)
    if status.state is not RunState.UNREADABLE:
        lines.append("next")
        lines += [f"  python -m hpctrain {command}" for command in _next_commands(status)]
    return "\n".join(lines)


def bottleneck_lines(bottleneck: Bottleneck) -> list[str]:
    """Describe the newest attempt's training: where the time went, its speed, and what to change."""
    lines = []
    if bottleneck.shares:
        shares = "  ".join(f"{part.replace('_', ' ')} {share:.0%}" for part, share in bottleneck.shares.items())
        lines.append(f"training    {shares}")
    if bottleneck.figures:
        lines.append(f"speed       {'  '.join(bottleneck.figures)}")
    if bottleneck.slowest_rank is not None and (bottleneck.slowest_ratio or 0.0) >= NOTEWORTHY_RATIO:
        ratio_text = f"{bottleneck.slowest_ratio:.2f} times the others' own time of a step"
        lines.append(f"slowest     rank {bottleneck.slowest_rank} on {bottleneck.slowest_host}: {ratio_text}")
    lines.append(f"bottleneck  {bottleneck.text}")
    return lines + [f"also        {text}" for text in bottleneck.also]


def progress_text(status: RunStatus) -> str:
    """The last step, how many there are, and the time that is left, as far as they are known."""
    if not status.knows_step:
        return f"-  ({NO_PROGRESS_REPORTED})" if status.attempts and status.state is not RunState.COMPLETED else "-"
    total = "" if status.total_steps is None else f" of {status.total_steps}"
    time_left = "" if status.left_s is None else f", about {duration(status.left_s)} left"
    return f"{status.step}{total}{time_left}"


def _checkpoint(status: RunStatus, now: float) -> str:
    gone = "" if status.gone_step is None else f"; the one of step {status.gone_step}, which the run saved, is gone"
    if status.checkpoint_step is not None:
        where = "" if status.saved_path is None else f": {os.path.relpath(status.saved_path)}"
        return f"step {status.checkpoint_step}{where}{gone}"
    if status.command and (files := unreported_files(RunDirectory(status.path))):
        path, when = files[0]
        return f"not reported; newest in {path.parent.name}/: {path.name}, {duration(now - when)} ago"
    is_over = gone or status.state in (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)
    return f"none{gone}" if is_over else "none yet"


def _next_commands(status: RunStatus) -> list[str]:
    run = shlex.quote(os.path.relpath(status.path))
    if status.state.may_change:
        return [f"logs {run} --follow", f"cancel {run}"]
    if status.state is RunState.COMPLETED:
        return [f"inspect {run}", f"logs {run}"]
    if status.state is RunState.PREPARED:
        return [f"resume {run}"]
    # the log of rank zero is the default, but another rank may have been the first to fail
    logs = f"logs {run}"
    if status.attempts:
        directory = RunDirectory(status.path)
        cause = first_cause(read_exit_records(directory.attempt(status.attempts[-1].attempt)))
        logs += f" --rank {cause.rank}" if cause is not None and cause.rank else ""
    over = " resume.from_scratch=true" if status.gone_step is not None and status.checkpoint_step is None else ""
    # a run whose state can't be determined here may be running
    return [logs] if status.state is RunState.UNKNOWN else [logs, f"resume {run}{over}"]


def attempts_table(status: RunStatus, now: float) -> list[str]:
    """Format a header and one line per attempt; empty columns are left out, such as the times of a brief status."""
    accounts = {account.attempt: account for account in status.account.attempts}
    rows = [_row(attempt, accounts.get(attempt.attempt), status, now) for attempt in status.attempts]
    columns = [column for column in range(len(_HEAD)) if any(row[column] != "-" for row in rows)]
    right = [place for place, column in enumerate(columns) if column in _RIGHT_ALIGNED]
    return aligned([[row[column] for column in columns] for row in (_HEAD, *rows)], right=right)


def _shares_of_time(account: Account, *, with_ratio: bool) -> str:
    """Format the shares of the wall time, largest first, and the effective training time ratio; empty at first.

    A program's time without known steps may be spent on anything, also on work that it repeats: it has no such ratio.
    """
    spent = account.spent
    if spent.ratio is None:
        return ""
    shares = sorted(spent.shares.items(), key=lambda item: -item[1])
    text = "  ".join(f"{name} {_percent(share)}" for name, share in shares if share > 0)
    ratio = f"; effective training time ratio {spent.ratio:.2f}" if with_ratio else ""
    return f"{text}  of {duration(spent.total_s)}{ratio}"


def _row(attempt: Attempt, account: AttemptAccount | None, status: RunStatus, now: float) -> tuple[str, ...]:
    nodes = listed(attempt.nodes, max_names=4, separator=" ")
    spent = WallTime() if account is None else account.spent
    steps, ended = _steps_and_end(attempt, status, now)
    return (
        str(attempt.attempt),
        "never" if attempt.start_time is None else local_time(attempt.start_time),
        steps,
        str((account is not None and account.steps_lost) or "-"),
        duration(spent.queued_s) if spent.queued_s else "-",
        duration(spent.starting_s) if spent.starting_s else "-",
        "?" if attempt.world_size is None else f"{attempt.world_size} on {nodes or '?'}",
        attempt.job_id or "-",
        ended,
    )


def _steps_and_end(attempt: Attempt, status: RunStatus, now: float) -> tuple[str, str]:
    """The attempt's steps, and how it ended."""
    began = attempt.start_time
    if attempt.reason is not None:
        took = "0 s" if began is None else duration((attempt.end_time or 0) - began)
        ended = f"{attempt.reason} after {took}" + (f": {attempt.detail}" if attempt.detail else "")
        return _from_to(attempt, _known(attempt.end_step), status), ended
    if status.state in (RunState.RUNNING, RunState.STARTING) and attempt is status.attempts[-1]:
        return _from_to(
            attempt, f"{status.step} so far", status
        ), f"{status.state} for {duration(now - (began or now))}"
    return _from_to(attempt, "?", status), "no end was recorded"


def _from_to(attempt: Attempt, end: str, status: RunStatus) -> str:
    if not status.knows_step:
        return "-"
    # without reported saves, nothing shows from which step a program resumed
    begin = "?" if status.command and status.checkpoint_step is None else _known(attempt.start_step)
    return f"{begin} -> {end}"


def _known(step: int | None) -> str:
    return "?" if step is None else str(step)


def _percent(share: float) -> str:
    return "<1%" if share < 0.005 else f"{share:.0%}"
