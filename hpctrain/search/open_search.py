"""Open the search of a sweep."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.config.override_texts import TextKeepingParser
from hpctrain.config.overrides import MISTAKES
from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.search.asha import Asha
from hpctrain.search.distribution import Distribution, distribution_of
from hpctrain.search.optuna_study import OptunaChooser
from hpctrain.search.record import REMEDY, SweepRecord
from hpctrain.search.search import Chooser, Search


def open_search(home: RunDirectory, record: SweepRecord) -> Search:
    """Return the search of a sweep.

    Args:
        home: the folder of the sweep.
        record: of the sweep, whose kind is `asha` or `optuna`.
    """
    return Search(home, _chooser(home, record), deadline=record.deadline)


def _chooser(home: RunDirectory, record: SweepRecord) -> Chooser:
    if record.kind == "asha":
        assert record.min_steps is not None
        assert record.reduction_factor is not None
        return Asha(home, min_steps=record.min_steps, reduction_factor=record.reduction_factor)
    assert record.sampler is not None
    return OptunaChooser(
        home,
        distributions_of(record),
        sampler=record.sampler,
        num_startup_runs=record.startup_runs or 1,
        seed=record.seed or 0,
        num_runs=record.num_runs or 0,
    )


def distributions_of(record: SweepRecord) -> Mapping[str, Distribution]:
    """Return what the keys of a sweep are drawn from; keys are as they were typed.

    Raises:
        ConfigError: a key's values are such that a search can't use them.
        RunDirectoryError: what is recorded isn't an override.
    """
    parser = TextKeepingParser.create()
    try:
        return {key: distribution_of(parser.parse_override(f"{key}={text}")) for key, text in record.space.items()}
    except MISTAKES as error:
        problem = " ".join(str(error).split())
        raise RunDirectoryError(f"sweep.json: space can't be parsed: {problem}; {REMEDY}") from error
