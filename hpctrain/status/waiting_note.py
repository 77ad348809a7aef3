"""Say for which runs a queued run waits (`after`)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from hpctrain.errors import RunDirectoryError
from hpctrain.phrases import all_of
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason


def waiting_note(paths: Sequence[str]) -> str:
    """Name the runs that haven't completed, by their ledgers alone; empty if all have, or can't be read."""
    named = []
    for path in paths:
        newest = _newest_attempt(path)
        if newest is None or newest.reason is Reason.COMPLETED:
            continue
        has_stopped = newest.reason is not None and not newest.reason.meaning.requeued
        named.append(f"{_name(path)} ({newest.reason})" if has_stopped else _name(path))
    shown = named if len(named) <= 4 else [*named[:3], f"{len(named) - 3} more"]
    return f"it waits for {all_of(shown)} to complete" if named else ""


def _newest_attempt(path: str) -> Attempt | None:
    """The newest attempt, number 0 before the first; None if it can't be read."""
    with contextlib.suppress(OSError, RunDirectoryError):
        attempts = Ledger(RunDirectory.at(path)).attempts()
        return attempts[-1] if attempts else Attempt(attempt=0)
    return None


def _name(path: str) -> str:
    return RunDirectory.at(path).as_typed
