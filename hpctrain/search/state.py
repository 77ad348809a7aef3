"""The state of a search: what its journal adds up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.search.journal import Decision, Event


@dataclass(slots=True)
class SearchState:
    """What follows from the decisions of a search.

    Attributes:
        given: by number, the runs that a task trains, or will continue after a requeue.
        released: by number, the rungs that runs without a task are to pass.
        ends: by run and rung.
        begun: every run and rung that was given to a task.
        first: by number, the decision with which a run was begun.
    """

    given: dict[int, Decision] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)
    ends: dict[tuple[int, int], Decision] = field(default_factory=dict)
    begun: set[tuple[int, int]] = field(default_factory=set)
    first: dict[int, Decision] = field(default_factory=dict)

    def add(self, decision: Decision) -> None:
        """Add the next decision."""
        run, key = decision.run, (decision.run, decision.rung)
        if decision.event is Event.BEGIN:
            self.first.setdefault(run, decision)
            self.begun.add(key)
            self.released.pop(run, None)
            self.given[run] = decision
        elif decision.event is Event.END:
            self.given.pop(run, None)
            self.ends.setdefault(key, decision)
        else:
            self.given.pop(run, None)
            self.ends.pop(key, None)
            self.released[run] = decision.rung
