"""optuna: draw each run's values by the results of those before."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_atomic
from hpctrain.run.directory import RunDirectory
from hpctrain.run.reason import Reason
from hpctrain.search.distribution import Choice, Distribution, Floats, Integers
from hpctrain.search.journal import FOLDER, Decision
from hpctrain.search.sampler_state import restore_sampler, sampler_state
from hpctrain.search.state import SearchState

if TYPE_CHECKING:
    import optuna

PREFIX = "sampler-"
"""Of the files with the sampler's state after a draw."""
RECORD_ERRORS = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
"""What Optuna, numpy and torch raise for a record that someone has edited."""
UNUSED_S = 3600.0
"""Age at which the file of a draw that lost the race is removed."""


class OptunaChooser:
    """Chooses by one of Optuna's samplers; runs are trained to their end.

    The study is made anew for each draw, from the journal. So Optuna needs no storage, and no process keeps it.

    Args:
        home: the folder of the sweep.
        space: of the keys that vary.
        sampler: `tpe`, `cmaes`, `gp` or `random`.
        num_startup_runs: runs that are drawn at random first.
        seed: of the sampler.
        num_runs: of the search.
    """

    counts_best_value = True

    def __init__(
        self,
        home: RunDirectory,
        space: Mapping[str, Distribution],
        *,
        sampler: str,
        num_startup_runs: int,
        seed: int,
        num_runs: int,
    ) -> None:
        self._home = home
        self._folder = home.path / FOLDER
        self._space = space
        self._sampler = sampler
        self._num_startup_runs = num_startup_runs
        self._seed = seed
        self._num_runs = num_runs

    def next_rungs(self, state: SearchState) -> Iterable[tuple[int, int]]:  # noqa: ARG002 - see `Chooser`
        """See `Chooser`."""
        return ()

    def new_run(self, state: SearchState) -> int | None:
        """See `Chooser`."""
        number = max(state.first, default=-1) + 1
        return number if number < self._num_runs else None

    def num_new(self, state: SearchState) -> int:
        """See `Chooser`."""
        return max(0, self._num_runs - len(state.first))

    def pause_at_step(self, rung: int) -> None:  # noqa: ARG002 - see `Chooser`
        """See `Chooser`."""
        return

    def draw(self, run: int, state: SearchState) -> Mapping[str, Any]:
        """Draw the values of a run.

        Returns:
            `params`: by key, as Optuna has them; `distributions`: by key, in Optuna's JSON; `attributes`: what the
            sampler keeps with the run; `sampler`: the name of the file with its state.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            # warm-up messages about experimental samplers would fill the batch script's log
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self._made_sampler()
            newest = state.first[max(state.first)] if state.first else None
            self._restore(sampler, newest)
            mode = next((end.mode for end in state.ends.values() if end.mode), "min")
            study = optuna.create_study(sampler=sampler, direction="maximize" if mode == "max" else "minimize")
            for number in range(run):
                study.add_trial(_readable_trial(state, number))
            trial = study.ask({key: to_optuna(one) for key, one in self._space.items()})
        frozen = study.trials[-1]
        name = f"{PREFIX}{secrets.token_hex(8)}.json"
        with self._home.permissions():
            write_atomic(self._folder / name, json.dumps(sampler_state(sampler)))
        self._remove_unused(state)
        known = optuna.distributions.distribution_to_json
        return {
            "params": dict(trial.params),
            "distributions": {key: known(one) for key, one in frozen.distributions.items()},
            "attributes": dict(frozen.system_attrs),
            "sampler": name,
        }

    def _made_sampler(self) -> optuna.samplers.BaseSampler:
        import optuna

        samplers, seed, startup = optuna.samplers, self._seed, self._num_startup_runs
        if self._sampler == "tpe":
            # runs that still train count as bad ones, so that parallel tasks don't draw next to each other
            return samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
        if self._sampler == "cmaes":
            return samplers.CmaEsSampler(seed=seed, n_startup_trials=startup)
        if self._sampler == "gp":
            return samplers.GPSampler(seed=seed, n_startup_trials=startup)
        return samplers.RandomSampler(seed=seed)

    def _restore(self, sampler: optuna.samplers.BaseSampler, newest: Decision | None) -> None:
        name = "" if newest is None else str(newest.drawn.get("sampler", ""))
        if not name or Path(name).name != name:
            return
        # without the file, whose disk may be damaged, the search goes on with other random numbers
        with contextlib.suppress(OSError, RunDirectoryError, *RECORD_ERRORS):
            restore_sampler(sampler, read_json(self._folder / name))
            return
        sampler.reseed_rng()

    def _remove_unused(self, state: SearchState) -> None:
        used = {str(decision.drawn.get("sampler")) for _, decision in sorted(state.first.items())[-2:]}
        for path in self._folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if path.name not in used and time.time() - path.stat().st_mtime > UNUSED_S:
                    path.unlink()


def to_optuna(distribution: Distribution) -> optuna.distributions.BaseDistribution:
    """Return Optuna's distribution for one of ours."""
    from optuna import distributions

    match distribution:
        case Choice():
            return distributions.CategoricalDistribution(list(distribution.values))
        case Integers():
            return distributions.IntDistribution(
                distribution.low, distribution.high, log=distribution.log, step=distribution.step
            )
        case Floats():
            return distributions.FloatDistribution(
                distribution.low, distribution.high, log=distribution.log, step=distribution.step
            )


def overrides_of(drawn: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a run that was drawn."""
    return [
        f"{key}={repr(value) if isinstance(value, float) else value}" for key, value in drawn.get("params", {}).items()
    ]


def _readable_trial(state: SearchState, number: int) -> optuna.trial.FrozenTrial:
    """Return a run as Optuna's trial; if the record of its draw is damaged, a failed trial without values."""
    import optuna

    try:
        return _trial(state, number)
    except RECORD_ERRORS:
        return optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL)


def _trial(state: SearchState, number: int) -> optuna.trial.FrozenTrial:
    """Return a run as Optuna has it, with what is known of its result."""
    import optuna

    begin, end = state.first.get(number), state.ends.get((number, 0))
    drawn = {} if begin is None else begin.drawn
    value = None if end is None or end.reason != Reason.COMPLETED else end.value
    states = optuna.trial.TrialState
    is_open = end is None and begin is not None
    return optuna.trial.create_trial(
        state=states.COMPLETE if value is not None else states.RUNNING if is_open else states.FAIL,
        params=drawn.get("params", {}),
        distributions={
            key: optuna.distributions.json_to_distribution(text) for key, text in drawn.get("distributions", {}).items()
        },
        system_attrs=drawn.get("attributes", {}),
        value=value,
    )
