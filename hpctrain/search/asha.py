"""asha: draw at random, and continue the best part of the runs that have passed a rung."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from hpctrain.config.compose import Composer
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError
from hpctrain.run.reason import Reason
from hpctrain.search.algorithm import ComposedSweep, SearchAlgorithm, Space, as_overrides
from hpctrain.search.journal import Decision, SearchState
from hpctrain.search.runs import runs_in, with_progress

PAUSE = "trainer.pause_at_step"


class Asha(SearchAlgorithm):
    """Promote the best runs from rung to rung (asynchronous successive halving)."""

    def compose(self, composer: Composer, overrides: Sequence[Override]) -> ComposedSweep:
        """See `Algorithm`."""
        space = self._space(composer, overrides)
        drawn = [as_overrides(values) for values in self._drawn(composer, space)]
        # the steps of the first rung may be those of the first run's evaluations
        first = self._checked(space.compose(composer, drawn[0]).config)
        if first.trainer.pause_at_step is not None:
            problem = "conflicts with sweep=asha, which decides where each run pauses"
            raise ConfigError(PAUSE, first.trainer.pause_at_step, problem, "leave it out, and set sweep.min_steps")
        steps = self._first_rung(first, space)
        pause = f"{PAUSE}={steps}"
        runs = [space.compose(composer, [*run, pause], PAUSE) for run in with_progress(drawn, "composed")]
        return self._composed(runs, min_steps=steps)

    def _first_rung(self, config: Config, space: Space) -> int:
        min_steps = self.record.min_steps
        steps = min_steps or config.trainer.eval_every_steps
        if steps is None or (min_steps is None and "trainer.eval_every_steps" in space.distributions):
            problem = "is required: the runs have no common trainer.eval_every_steps to use as the first rung"
            raise ConfigError("sweep.min_steps", None, problem, "set it to the first step at which runs may pause")
        if config.trainer.max_steps is not None and steps >= config.trainer.max_steps:
            problem = f"is not below trainer.max_steps={config.trainer.max_steps}, so no run would pause"
            raise ConfigError("sweep.min_steps", steps, problem, "lower it, or use sweep=random")
        return steps

    def next_rungs(self, state: SearchState) -> Iterable[tuple[int, int]]:
        """See `SearchAlgorithm`."""
        promoted = promotable(state.ends.values(), state.begun, reduction_factor=self._reduction_factor)
        return promoted or self._last_one(state)

    def new_run(self, state: SearchState) -> int | None:
        """See `SearchAlgorithm`."""
        return next(iter(self._waiting(state)), None)

    def num_new(self, state: SearchState) -> int:
        """See `SearchAlgorithm`."""
        return sum(1 for _ in self._waiting(state))

    def draw(self, run: int, state: SearchState) -> Mapping[str, Any]:  # noqa: ARG002 - see `SearchAlgorithm`
        """See `SearchAlgorithm`."""
        return {}

    def pause_at_step(self, rung: int) -> int:
        """See `SearchAlgorithm`: ``min_steps``, and `reduction_factor` times as many for each further rung."""
        assert self.record.min_steps is not None
        steps: int = self.record.min_steps * self._reduction_factor**rung
        return steps

    @property
    def _reduction_factor(self) -> int:
        assert self.record.reduction_factor is not None
        return self.record.reduction_factor

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
        best = min((end for end in left if end.rung == highest), key=lambda end: (_loss(end), end.run))
        return [(best.run, highest + 1)]

    def _waiting(self, state: SearchState) -> Iterator[int]:
        for run, directory in runs_in(state.home).items():
            # a run that is still being prepared has its configuration last
            if run not in state.first and directory.config.is_file():
                yield run


def promotable(
    ends: Iterable[Decision], begun: Collection[tuple[int, int]], *, reduction_factor: int
) -> list[tuple[int, int]]:
    """Return the runs that may continue, each with the rung that it is to pass next.

    The most advanced come first, and among those the best.

    Of the runs that have passed a rung, the best one in `reduction_factor` may continue (Li et al., A System for
    Massively Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2). Ties go to the lower number.

    Args:
        ends: of runs, at any rung. A run without a value counts for nothing.
        begun: run and rung of what was begun already.
        reduction_factor: at least 2.
    """
    by_rung: dict[int, list[Decision]] = {}
    for end in ends:
        if end.value is not None and end.reason in (Reason.PAUSED, Reason.COMPLETED):
            by_rung.setdefault(end.rung, []).append(end)
    promoted = []
    for rung, passed in sorted(by_rung.items(), reverse=True):
        best = sorted(passed, key=lambda end: (_loss(end), end.run))[: len(passed) // reduction_factor]
        # a run that has completed stays among the best, and has nothing left to train
        waiting = [end.run for end in best if end.reason == Reason.PAUSED]
        promoted += [(run, rung + 1) for run in waiting if (run, rung + 1) not in begun]
    return promoted


def _loss(end: Decision) -> float:
    """Return the value of a run at a rung, negated if larger values are better."""
    assert end.value is not None
    return -end.value if end.mode == "max" else end.value
