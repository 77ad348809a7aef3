"""Draw each run's values with an Optuna sampler, from the results of earlier runs."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.files import read_json, write_atomic
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.algorithm import NEW_COMMAND, ComposedSweep, SearchAlgorithm
from hpctrain.search.distribution import Choice, Distribution, Floats, Integers, Values, distributions_of
from hpctrain.search.journal import FOLDER, SearchDecision, SearchState

if TYPE_CHECKING:
    import optuna

PREFIX = "sampler-"
"""Of the files with the sampler's state after a draw."""
RECORD_ERRORS = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
"""Errors of Optuna, numpy and torch about a record that a user has edited."""
RANDOM = "random"
KERNELS = "kernels"
KERNEL_FIELDS = ("inverse_squared_lengthscales", "kernel_scale", "noise_var")
"""What GPSampler (Optuna 5.0) starts from when it fits the next kernel; tensors of float64."""
_KEY = 624
"""Words of the state of a Mersenne Twister (MT19937)."""
KERNEL_LISTS = ("_gprs_cache_list", "_constraints_gprs_cache_list")


class OptunaStudy(SearchAlgorithm):
    """Chooses by one of Optuna's samplers; runs are trained to their end.

    The study is made anew for each draw, from the journal. So Optuna needs no storage, and no process keeps it: SQLite
    is corrupted on NFS, and `JournalStorage` takes a lock and has no heartbeat.
    """

    knows_runs = False
    counts_best_value = True

    def compose(self, composer: Composer, overrides: Sequence[Override]) -> ComposedSweep:
        """See `Algorithm`."""
        space = self._space(composer, overrides)
        samples = [space.compose(composer, values) for values in _samples(space.distributions)]
        self._require_searchable(samples[0].config)
        return ComposedSweep(self.record, samples)

    def require_extension(self, new_record: SweepRecord) -> None:
        """Refuse also what Optuna refuses for each further run: of what a key is drawn from, only bounds may change."""
        super().require_extension(new_record)
        before, after = distributions_of(self.record), distributions_of(new_record)
        for key, distribution in after.items():
            if key in before and not _differs_in_bounds_alone(before[key], distribution):
                problem = "Optuna takes other bounds of an interval, and nothing else"
                before_text = self.record.space[key]
                raise ConfigError(key, new_record.space[key], f"can't continue {before_text}: {problem}", NEW_COMMAND)

    def _refuse_swept(self, composer: Composer, swept: Iterable[Override]) -> None:
        super()._refuse_swept(composer, swept)
        # looked for, not imported: the batch script imports it
        if importlib.util.find_spec("optuna") is None:
            problem = "needs the package optuna, which isn't installed"
            raise ConfigError("sweep", "optuna", problem, 'pip install "hpctrain[optuna]"')

    def new_runs(self, state: SearchState) -> Iterator[int]:
        """See `SearchAlgorithm`."""
        return iter(range(max(state.first, default=-1) + 1, self.record.num_runs or 0))

    def draw(self, state: SearchState) -> Mapping[str, Any]:
        """Draw the values of the next new run.

        Returns:
            `params`: by key, as Optuna has them; `distributions`: by key, in Optuna's JSON; `attributes`: what the
            sampler keeps with the run; `sampler`: the name of the file with its state.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            # warm-up messages about experimental samplers would fill the batch script's log
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self._make_sampler()
            newest = state.first[max(state.first)] if state.first else None
            self._restore(sampler, state.home.path / FOLDER, newest)
            mode = next((end.mode for end in state.ends.values() if end.mode), "min")
            study = optuna.create_study(sampler=sampler, direction="maximize" if mode == "max" else "minimize")
            for number in range(next(self.new_runs(state))):
                study.add_trial(_trial(state, number))
            trial = study.ask({key: to_optuna(source) for key, source in distributions_of(self.record).items()})
        frozen = study.trials[-1]
        # the decision names the file: a draw that loses the race to publish leaves one that nobody reads
        name = f"{PREFIX}{secrets.token_hex(8)}.json"
        with state.home.permissions():
            write_atomic(state.home.path / FOLDER / name, json.dumps(sampler_state(sampler)))
        to_json = optuna.distributions.distribution_to_json
        return {
            "params": dict(trial.params),
            "distributions": {key: to_json(source) for key, source in frozen.distributions.items()},
            "attributes": dict(frozen.system_attrs),
            "sampler": name,
        }

    def _make_sampler(self) -> optuna.samplers.BaseSampler:
        from optuna import samplers

        seed, startup = self.record.seed or 0, self.record.startup_runs or 1
        if self.record.sampler == "tpe":
            # runs that still train count as bad ones, so that parallel tasks don't draw next to each other
            return samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
        if self.record.sampler == "cmaes":
            return samplers.CmaEsSampler(seed=seed, n_startup_trials=startup)
        if self.record.sampler == "gp":
            return samplers.GPSampler(seed=seed, n_startup_trials=startup)
        return samplers.RandomSampler(seed=seed)

    @staticmethod
    def _restore(sampler: optuna.samplers.BaseSampler, folder: Path, newest: SearchDecision | None) -> None:
        name = "" if newest is None else str(newest.drawn.get("sampler", ""))
        if not name or Path(name).name != name:
            return
        # without the file, whose disk may be damaged, the search continues with other random numbers
        with contextlib.suppress(OSError, RunDirectoryError, *RECORD_ERRORS):
            restore_sampler(sampler, read_json(folder / name))
            return
        sampler.reseed_rng()


def to_optuna(distribution: Distribution) -> optuna.distributions.BaseDistribution:
    """Return Optuna's distribution for one of ours."""
    from optuna import distributions

    match distribution:
        case Choice(values):
            return distributions.CategoricalDistribution(list(values))
        case Integers(low, high, log, step):
            return distributions.IntDistribution(low, high, log=log, step=step)
        case Floats(low, high, log, interval):
            return distributions.FloatDistribution(low, high, log=log, step=interval)


def _trial(state: SearchState, number: int) -> optuna.trial.FrozenTrial:
    """Return a run as Optuna has it, with what is known of its result; failed if the record of its draw is damaged."""
    import optuna

    begin, end = state.first.get(number), state.ends.get((number, 0))
    drawn = {} if begin is None else begin.drawn
    value = None if end is None or end.reason != Reason.COMPLETED else end.value
    states, from_json = optuna.trial.TrialState, optuna.distributions.json_to_distribution
    is_open = end is None and begin is not None
    with contextlib.suppress(*RECORD_ERRORS):
        return optuna.trial.create_trial(
            state=states.COMPLETE if value is not None else states.RUNNING if is_open else states.FAIL,
            params=drawn.get("params", {}),
            distributions={key: from_json(text) for key, text in drawn.get("distributions", {}).items()},
            system_attrs=drawn.get("attributes", {}),
            value=value,
        )
    return optuna.trial.create_trial(state=states.FAIL)


def _samples(space: Mapping[str, Distribution]) -> list[Values]:
    """The ends of each interval and each of a choice's values, so that a mistake shows before anything is submitted."""
    middle = {key: source.at(0.5) for key, source in space.items()}
    return [
        tuple((middle | {key: value}).items())
        for key, source in space.items()
        for value in (source.values if isinstance(source, Choice) else (source.at(0.0), source.at(1 - 1e-12)))
    ]


def _differs_in_bounds_alone(before: Distribution, after: Distribution) -> bool:
    if isinstance(before, Choice) or isinstance(after, Choice):
        return before == after
    return type(before) is type(after) and before.log == after.log


def sampler_state(sampler: object) -> dict[str, Any]:
    """Return what changes in a sampler as it draws: its random numbers, and the kernels of GPSampler.

    A pickle would do the same, and would let other users who can write the sweep's folder execute code.
    """
    return {
        RANDOM: {path: _encoded(lazy.rng) for path, lazy in _random_states(sampler)},
        KERNELS: {name: _kernels(getattr(sampler, name)) for name in KERNEL_LISTS if getattr(sampler, name, None)},
    }


def restore_sampler(sampler: object, state: dict[str, Any]) -> None:
    """Restore the result of `sampler_state` in a new sampler of the same kind and arguments.

    Raises:
        KeyError, TypeError, ValueError: the state is that of another sampler, or damaged.
    """
    for path, lazy in _random_states(sampler):
        _decode_into(lazy.rng, state[RANDOM][path])
    for name, kernels in state[KERNELS].items():
        import torch

        restored = [
            SimpleNamespace(**{field: torch.tensor(kernel[field], dtype=torch.float64) for field in KERNEL_FIELDS})
            for kernel in kernels
        ]
        setattr(sampler, name, restored)


def _random_states(sampler: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Find the random states of a sampler and of the samplers inside it, by the names of the attributes."""
    from optuna.samplers import BaseSampler
    from optuna.samplers._lazy_random_state import LazyRandomState

    for name, value in sorted(vars(sampler).items()):
        if isinstance(value, LazyRandomState):
            yield f"{path}{name}", value
        elif isinstance(value, BaseSampler):
            yield from _random_states(value, f"{path}{name}.")


def _encoded(rng: Any) -> dict[str, Any]:
    state = rng.get_state(legacy=False)
    key = base64.b64encode(state["state"]["key"].astype("<u4").tobytes()).decode()
    pos = int(state["state"]["pos"])
    return {"key": key, "pos": pos, "has_gauss": int(state["has_gauss"]), "gauss": float(state["gauss"])}


def _decode_into(rng: Any, state: dict[str, Any]) -> None:
    import numpy as np

    key = np.frombuffer(base64.b64decode(state["key"]), dtype="<u4")
    # numpy doesn't check the position, and would read beyond the key
    if len(key) != _KEY or not 0 <= state["pos"] <= _KEY:
        raise ValueError("not the state of a Mersenne Twister")
    rng.set_state(("MT19937", key, state["pos"], state["has_gauss"], state["gauss"]))


def _kernels(kernels: Any) -> list[dict[str, Any]]:
    return [{field: getattr(kernel, field).tolist() for field in KERNEL_FIELDS} for kernel in kernels]
