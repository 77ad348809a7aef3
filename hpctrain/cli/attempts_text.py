"""The attempts of a run, and what its time went for, as text for people."""

from __future__ import annotations

import time

from hpctrain.run.ledger import Attempt
from hpctrain.status.accounting import Account, AttemptAccount
from hpctrain.status.report import RunStatus
from hpctrain.status.state import RunState

_HEAD = ("", "BEGAN", "STEPS", "LOST", "QUEUED", "START", "RANKS", "JOB", "END")
_RIGHT = (0, 3, 4, 5)
"""Columns of numbers."""
_SHOWN_NODES = 4


def attempts_table(status: RunStatus, now: float) -> list[str]:
    """One line per attempt below a line of heads; a column in which nothing stands is left out.

    Args:
        status: of a run.
        now: epoch seconds.
    """
    accounts = {one.attempt: one for one in status.account.attempts}
    rows = [_row(attempt, accounts[attempt.attempt], status, now) for attempt in status.attempts]
    shown = [column for column in range(len(_HEAD)) if any(row[column] != "-" for row in rows)]
    widths = {column: max(len(row[column]) for row in (_HEAD, *rows)) for column in shown}
    return [
        "  ".join(_cell(row[column], column, widths[column]) for column in shown).rstrip() for row in (_HEAD, *rows)
    ]


def time_line(account: Account) -> str:
    """Shares of the wall time, the largest first, and the ratio; empty where no time has passed."""
    spent = account.spent
    if spent.ratio is None:
        return ""
    shares = sorted(spent.shares.items(), key=lambda item: -item[1])
    listed = "  ".join(f"{name} {_percent(share)}" for name, share in shares if share > 0)
    return f"{listed}  of {span(spent.total_s)}; effective training time ratio {spent.ratio:.2f}"


def _row(attempt: Attempt, account: AttemptAccount, status: RunStatus, now: float) -> tuple[str, ...]:
    nodes = " ".join(attempt.nodes[:_SHOWN_NODES]) + (" ..." if len(attempt.nodes) > _SHOWN_NODES else "")
    spent = account.spent
    steps, ended = _course(attempt, status, now)
    return (
        str(attempt.attempt),
        "never" if attempt.start_time is None else moment(attempt.start_time),
        steps,
        str(account.steps_lost or "-"),
        span(spent.queued_s) if spent.queued_s else "-",
        span(spent.starting_s) if spent.starting_s else "-",
        f"{attempt.world_size} on {nodes or '?'}",
        attempt.job_id or "-",
        ended,
    )


def _course(attempt: Attempt, status: RunStatus, now: float) -> tuple[str, str]:
    """Its steps, and what became of it."""
    began = attempt.start_time
    if attempt.reason is not None:
        took = "0 s" if began is None else span((attempt.end_time or 0) - began)
        ended = f"{attempt.reason} after {took}" + (f": {attempt.detail}" if attempt.detail else "")
        return f"{_known(attempt.start_step)} -> {_known(attempt.end_step)}", ended
    if status.state in (RunState.RUNNING, RunState.STARTING) and attempt is status.attempts[-1]:
        steps = f"{_known(attempt.start_step)} -> {status.step} so far"
        return steps, f"{status.state} for {span(now - (began or now))}"
    return f"{_known(attempt.start_step)} -> ?", "no end was recorded"


def _cell(text: str, column: int, width: int) -> str:
    return text.rjust(width) if column in _RIGHT else text.ljust(width)


def _known(step: int | None) -> str:
    return "?" if step is None else str(step)


def _percent(share: float) -> str:
    return "<1%" if share < 0.005 else f"{share:.0%}"


def moment(when: float) -> str:
    """Epoch seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def span(seconds: float) -> str:
    """A length of time in its largest unit: ``12 s``, ``5 min``, ``3 h``, ``2 days``."""
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
