"""asha: draw at random, and continue the best part of the runs that have passed a rung."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpctrain.run.directory import RunDirectory
from hpctrain.run.reason import Reason
from hpctrain.search.promotion import loss, pause_step, promotable
from hpctrain.search.state import SearchState


class Asha:
    """Chooses among prepared runs.

    Args:
        home: the folder of the sweep, with the runs as folders 0, 1, ...
        min_steps: the step of the first rung.
        reduction_factor: of the runs that have passed a rung, one in this many continues.
    """

    counts_best_value = False

    def __init__(self, home: RunDirectory, *, min_steps: int, reduction_factor: int) -> None:
        self._home = home
        self._min_steps = min_steps
        self._reduction_factor = reduction_factor

    def next_rungs(self, state: SearchState) -> Iterable[tuple[int, int]]:
        """See `Chooser`."""
        found = promotable(state.ends.values(), state.begun, reduction_factor=self._reduction_factor)
        return found or self._last_one(state)

    def new_run(self, state: SearchState) -> int | None:
        """See `Chooser`."""
        return next(iter(self._waiting(state)), None)

    def num_new(self, state: SearchState) -> int:
        """See `Chooser`."""
        return sum(1 for _ in self._waiting(state))

    def draw(self, run: int, state: SearchState) -> Mapping[str, Any]:  # noqa: ARG002 - see `Chooser`
        """See `Chooser`."""
        return {}

    def pause_at_step(self, rung: int) -> int:
        """See `Chooser`."""
        return pause_step(rung, min_steps=self._min_steps, reduction_factor=self._reduction_factor)

    def _last_one(self, state: SearchState) -> list[tuple[int, int]]:
        """Return the best run of the highest rung, once nothing else is left and no run has completed.

        A few runs may never fill a rung, and a search is to end with a run that is trained to its end. A run that has
        begun its next rung isn't begun again: if it failed there, the next best one is trained to its end.
        """
        passed = [end for end in state.ends.values() if end.value is not None]
        is_over = any(end.reason == Reason.COMPLETED for end in passed)
        left = [end for end in passed if (end.run, end.rung + 1) not in state.begun]
        if not left or is_over or state.given or state.released or self.num_new(state):
            return []
        highest = max(end.rung for end in left)
        best = min((end for end in left if end.rung == highest), key=lambda end: (loss(end), end.run))
        return [(best.run, highest + 1)]

    def _waiting(self, state: SearchState) -> Iterator[int]:
        numbers = sorted(int(path.name) for path in self._home.path.iterdir() if path.name.isdecimal())
        for run in numbers:
            # a run that is still being prepared has its configuration last
            if run not in state.first and RunDirectory.at(self._home.path / str(run)).config.is_file():
                yield run
