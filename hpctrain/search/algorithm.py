"""Algorithms by which sweeps find their runs: the base classes, and all kinds but Optuna's samplers.

To add a kind, derive a class from `Algorithm` or, if its tasks ask for runs, from `SearchAlgorithm`, and enter it in

- `ALGORITHMS` of `hpctrain.search.search`;
- `KINDS` of `hpctrain.config.sweep`, with its keys, and `SEARCHES` there if its tasks ask;
- `SWEEP_KEYS` and `_REQUIRED_OF_KIND` of `hpctrain.run.sweep_record`, with a field for each of its keys;
- ``conf/sweep``.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hydra.core.override_parser.types import IntervalSweep, Override

from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.config.overrides import value_as_typed
from hpctrain.config.root import Config, RunConfig
from hpctrain.config.sweep import MAX_RUNS
from hpctrain.config.task_checks import may_be_evaluated, may_have_mode
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.distribution import Distribution, Values, distribution_of, draws, number_of_values, values_of
from hpctrain.search.journal import SearchDecision, SearchState
from hpctrain.search.runs import SweepRun, place, runs_in, with_progress
from hpctrain.streams import print_warning

NEW_COMMAND = "type a new command with -m and another run_dir"
"""What to do about a change that a sweep can't take."""
PAUSE = "trainer.pause_at_step"
EXAMPLE = "give a key several values, such as 'optimizer.lr=tag(log,interval(1e-5,1e-1))'"


@dataclass(frozen=True, slots=True)
class ComposedSweep:
    """The runs for which a command asks.

    Attributes:
        record: of the sweep, with what the configuration of the runs decides.
        runs: checked; for optuna, which knows none yet, samples of the space.
    """

    record: SweepRecord
    runs: Sequence[SweepRun]


@dataclass(frozen=True, slots=True)
class Space:
    """The overrides of a command, sorted.

    Attributes:
        fixed: those with one value.
        fixed_keys: their keys.
        distributions: of the other keys.
    """

    fixed: Sequence[str]
    fixed_keys: Sequence[str]
    distributions: Mapping[str, Distribution]

    def compose(self, composer: Composer, values: Values, *also_fixed: str) -> SweepRun:
        """Compose the run with these values; of their keys, those in ``also_fixed`` don't vary either."""
        drawn = [f"{key}={value}" for key, value in values]
        return SweepRun.compose(composer, [*self.fixed, *drawn], [*self.fixed_keys, *also_fixed])


class Algorithm(abc.ABC):
    """One kind of sweep: composes its runs, and finds those that a resume adds.

    Args:
        record: of the sweep.
    """

    knows_runs: ClassVar[bool] = True
    """Whether all runs are known when the command is typed, and not made one by one when tasks ask for them."""

    def __init__(self, record: SweepRecord) -> None:
        self.record = record

    @abc.abstractmethod
    def compose(self, composer: Composer, overrides: Sequence[Override]) -> ComposedSweep:
        """Compose and check the runs of the sweep.

        Args:
            composer: of the command line's folders.
            overrides: parsed; all but those of the sweep.

        Raises:
            ConfigError: a run is invalid, or the space can't be searched in this way.
        """

    def added_runs(self, home: RunDirectory, sweep: ComposedSweep) -> list[SweepRun]:
        """Return the runs of an extended sweep that it doesn't have yet, with their directories."""
        if not self.knows_runs:
            return []
        # run k is the k-th draw, whatever today's files would make of it
        runs = [run.at(home.path / str(number)) for number, run in enumerate(sweep.runs)]
        return [run for run in runs if not run.directory.config.is_file()]

    def earlier_spaces(self, new_record: SweepRecord) -> list[Mapping[str, Any]]:
        """Return the spaces from which the runs that exist were drawn, if a resume gives the sweep another one."""
        was_drawn = self.knows_runs and self.record.num_runs is not None
        changed = was_drawn and self.record.space != new_record.space
        drawn = [{"space": dict(self.record.space), "num_runs": self.record.num_runs}] if changed else []
        return [*map(dict, self.record.earlier), *drawn]

    def require_extension(self, new_record: SweepRecord) -> None:
        """Refuse an extension that the sweep can't take.

        Args:
            new_record: the record of the extended sweep.

        Raises:
            ConfigError: it has fewer runs than the sweep, or would change some of them.
        """
        old_num_runs, new_num_runs = self.record.num_runs or 0, new_record.num_runs or 0
        if new_num_runs < old_num_runs:
            problem = f"is less than the {counted(old_num_runs, 'run')} that the sweep already has"
            raise ConfigError("sweep.num_runs", new_num_runs, problem, "give the total number of runs")
        if self.knows_runs and self.record.space != new_record.space and new_num_runs == old_num_runs:
            key = next(key for key, text in new_record.space.items() if self.record.space.get(key) != text)
            problem = f"is a new range, but all {old_num_runs} runs have been drawn"
            raise ConfigError(key, new_record.space[key], problem, f"add sweep.num_runs=N, with N above {old_num_runs}")

    def _space(self, composer: Composer, overrides: Sequence[Override]) -> Space:
        """Sort the overrides of a command, and refuse spaces that this kind can't have."""
        last = {override.get_key_element(): override for override in overrides}
        swept = {key: override for key, override in last.items() if override.is_sweep_override()}
        if not swept:
            kind = self.record.kind
            raise ConfigError("sweep", kind, "there is nothing to search: every key has one value", EXAMPLE)
        self._refuse_swept(composer, swept.values())
        fixed = [override for override in last.values() if not override.is_sweep_override()]
        distributions = {key: distribution_of(override) for key, override in swept.items()}
        for key, override in swept.items():
            if isinstance(override.value(), IntervalSweep) and distributions[key].size == 2:
                low, high = distributions[key].all()
                problem = f"{key}={value_as_typed(override)} draws {low} or {high}"
                print_warning(f"{problem}; for the numbers between them, write interval({low}.0,{high}.0)")
        return Space(expand(fixed)[0], [override.get_key_element() for override in fixed], distributions)

    def _refuse_swept(self, composer: Composer, swept: Iterable[Override]) -> None:  # noqa: B027 - most kinds have any
        """Refuse keys with several values that this kind can't have."""

    def _draw_values(self, composer: Composer, space: Space) -> list[Values]:
        """Draw the values of all runs: those of the first ones from earlier spaces."""
        record = self.record
        values: list[Values] = []
        for earlier in record.earlier:
            parsed = composer.parse([f"{key}={text}" for key, text in earlier["space"].items()])
            before = {override.get_key_element(): distribution_of(override) for override in parsed}
            missing = earlier["num_runs"] - len(values)
            values += draws(before, record.seed or 0, missing, existing=values, first=len(values))
        missing = (record.num_runs or 0) - len(values)
        return values + draws(space.distributions, record.seed or 0, missing, existing=values, first=len(values))

    def _with_record(self, runs: Sequence[SweepRun], **decided: Any) -> ComposedSweep:
        """Return the drawn runs with the record, and warn if they are fewer than were asked for."""
        if len(runs) < (self.record.num_runs or 0):
            problem = f"the listed values have only {counted(len(runs), 'combination')}: {counted(len(runs), 'run')}"
            print_warning(f"{problem}, not sweep.num_runs={self.record.num_runs}")
        return ComposedSweep(dataclasses.replace(self.record, num_runs=len(runs), **decided), runs)


class Grid(Algorithm):
    """Every combination of the values."""

    def compose(self, composer: Composer, overrides: Sequence[Override]) -> ComposedSweep:
        """See `Algorithm`."""
        fixed = [override.get_key_element() for override in overrides if not override.is_sweep_override()]
        runs = [SweepRun.compose(composer, run, fixed) for run in with_progress(expand(overrides), "composed")]
        return ComposedSweep(self.record, runs)

    def added_runs(self, home: RunDirectory, sweep: ComposedSweep) -> list[SweepRun]:
        """See `Algorithm`."""
        if self.record.space == sweep.record.space:  # it is only continued, and all of its runs are there
            return []
        return [run for run in place(sweep.runs, home) if not run.directory.config.is_file()]

    def require_extension(self, new_record: SweepRecord) -> None:
        """A grid takes any further value."""


class Random(Algorithm):
    """Values that are drawn before the first run begins."""

    def compose(self, composer: Composer, overrides: Sequence[Override]) -> ComposedSweep:
        """See `Algorithm`."""
        space = self._space(composer, overrides)
        drawn = self._draw_values(composer, space)
        return self._with_record([space.compose(composer, values) for values in with_progress(drawn, "composed")])


class SearchAlgorithm(Algorithm):
    """A kind of sweep whose tasks ask for their runs, one after another."""

    counts_best_value: ClassVar[bool] = False
    """Whether a run counts with its best value, and not with that of its last evaluation."""

    @abc.abstractmethod
    def new_runs(self, state: SearchState) -> Iterator[int]:
        """Yield the numbers of the runs that no task has had yet; the first one is taken."""

    def next_rungs(self, state: SearchState) -> Sequence[tuple[int, int]]:  # noqa: ARG002 - of a search with rungs
        """Return runs that may continue, each with the rung that it is to pass; the first one is taken."""
        return ()

    def draw(self, state: SearchState) -> Mapping[str, Any]:  # noqa: ARG002 - of a search that knows no runs
        """Draw the values of the next new run; empty if they are known already.

        Returns:
            `params`: the values by key; and what the algorithm keeps with the run.
        """
        return {}

    def pause_at_step(self, rung: int) -> int | None:  # noqa: ARG002 - of a search with rungs
        """Return the step of a rung; None in a search without rungs."""
        return None

    def _refuse_swept(self, composer: Composer, swept: Iterable[Override]) -> None:
        kind = self.record.kind
        if isinstance(composer, ProgramComposer):
            problem = "pauses or ranks runs by their evaluations, which programs don't have"
            raise ConfigError("sweep", kind, problem, "use sweep=random")
        for override in swept:
            key = override.key_or_group
            if key == "nodes" or key.partition(".")[0] == "cluster":
                problem = f"changes what the jobs request from SLURM, but all tasks of sweep={kind} request the same"
                raise ConfigError(key, value_as_typed(override), problem, "give it one value, or use sweep=random")

    def _require_searchable(self, config: RunConfig) -> Config:
        """Return a configuration, unless a search can't train or rank its runs."""
        assert isinstance(config, Config)  # `_refuse_swept` refuses programs
        kind = self.record.kind
        if config.after:
            problem = f"can't delay the tasks of sweep={kind}, which take one run after another"
            raise ConfigError("after", ",".join(config.after), problem, "use sweep=random, or submit it later")
        if config.cluster.wait:
            remedy = "leave it out; `python -m hpctrain status --watch` shows how far the search is"
            raise ConfigError("cluster.wait", True, "can't wait for a search, whose runs begin one by one", remedy)
        if not may_be_evaluated(config):
            problem = f"ranks runs by their evaluations, but the task {config.task['_target_']} has no eval_dataset"
            raise ConfigError("sweep", kind, problem, "define eval_dataset(self), or use sweep=random")
        if not may_have_mode(config):
            problem = "is not the task's own metric, and nothing defines whether lower or higher values are better"
            remedy = "check its name, and add checkpoint.metric_mode=min or checkpoint.metric_mode=max"
            raise ConfigError("checkpoint.metric", config.checkpoint.metric, problem, remedy)
        return config


class Asha(SearchAlgorithm):
    """Promote the best runs from rung to rung (asynchronous successive halving).

    A rung is a pause, and a promotion a plain resume: that starts new ranks, but serves every loop and any number of
    ranks, and is as exact as any resume.
    """

    def compose(self, composer: Composer, overrides: Sequence[Override]) -> ComposedSweep:
        """See `Algorithm`."""
        space = self._space(composer, overrides)
        drawn = self._draw_values(composer, space)
        # the steps of the first rung may be those of the first run's evaluations
        first = self._require_searchable(space.compose(composer, drawn[0]).config)
        if first.trainer.pause_at_step is not None:
            problem = "conflicts with sweep=asha, which decides where each run pauses"
            raise ConfigError(PAUSE, first.trainer.pause_at_step, problem, "leave it out, and set sweep.min_steps")
        steps = self._first_rung(first, space)
        pause = (PAUSE, str(steps))
        runs = [space.compose(composer, (*values, pause), PAUSE) for values in with_progress(drawn, "composed")]
        return self._with_record(runs, min_steps=steps)

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

    def new_runs(self, state: SearchState) -> Iterator[int]:
        """See `SearchAlgorithm`."""
        for run, directory in runs_in(state.home).items():
            # a run that is still being prepared has its configuration last
            if run not in state.first and directory.config.is_file():
                yield run

    def next_rungs(self, state: SearchState) -> Sequence[tuple[int, int]]:
        """See `SearchAlgorithm`."""
        promoted = promotable(state.ends.values(), state.begun, reduction_factor=self._reduction_factor)
        return promoted or self._best_of_highest_rung(state)

    def pause_at_step(self, rung: int) -> int:
        """See `SearchAlgorithm`: ``min_steps``, and `reduction_factor` times as many for each further rung."""
        assert self.record.min_steps is not None
        steps: int = self.record.min_steps * self._reduction_factor**rung
        return steps

    @property
    def _reduction_factor(self) -> int:
        assert self.record.reduction_factor is not None
        return self.record.reduction_factor

    def _best_of_highest_rung(self, state: SearchState) -> list[tuple[int, int]]:
        """Return the best run of the highest rung, once nothing else is left and no run has completed.

        A few runs may never fill a rung, and a search is to end with a run that is trained to its end. A run that has
        begun its next rung isn't begun again: if it failed there, the next best one is trained to its end.
        """
        passed = [end for end in state.ends.values() if end.value is not None]
        is_over = any(end.reason == Reason.COMPLETED for end in passed)
        candidates = [end for end in passed if (end.run, end.rung + 1) not in state.begun]
        if not candidates or is_over or state.active or state.released or any(True for _ in self.new_runs(state)):
            return []
        highest = max(end.rung for end in candidates)
        best = min((end for end in candidates if end.rung == highest), key=lambda end: (_loss(end), end.run))
        return [(best.run, highest + 1)]


def promotable(
    ends: Iterable[SearchDecision], begun: Collection[tuple[int, int]], *, reduction_factor: int
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
    by_rung: dict[int, list[SearchDecision]] = {}
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


def _loss(end: SearchDecision) -> float:
    """Return the value of a run at a rung, negated if larger values are better."""
    assert end.value is not None
    return -end.value if end.mode == "max" else end.value


def expand(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of each run: the product of all values, the last key's varying fastest.

    If a key is given twice, the last one wins, as in Hydra's basic sweeper.

    Args:
        overrides: parsed.

    Raises:
        ConfigError: a key has no values or infinitely many, or the runs are more than `MAX_RUNS`.
    """
    values: dict[str, list[str]] = {}
    count = 1
    last = {override.get_key_element(): override for override in overrides}
    for key, override in last.items():
        if not override.is_sweep_override():
            values[key] = [f"{key}={override.get_value_element_as_str()}"]
            continue
        if not override.is_discrete_sweep():
            remedy = "add sweep=random, which draws values from it; or write a,b or range(...)"
            raise ConfigError(override.key_or_group, value_as_typed(override), "is a continuous range", remedy)
        count *= number_of_values(override)
        if count > MAX_RUNS:
            problem = f"makes {count:,} runs, more than {MAX_RUNS:,}"
            raise ConfigError(override.key_or_group, value_as_typed(override), problem, "split the sweep")
        values[key] = [f"{key}={value}" for value in values_of(override)]
    return [list(run) for run in itertools.product(*values.values())]
