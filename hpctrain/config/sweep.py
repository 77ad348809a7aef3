"""``conf/sweep``: how a sweep finds its runs; keys of the command, not of its runs. Owner: hpctrain.search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require

MAX_RUNS = 10_000
"""Largest number of runs in one sweep."""
SAMPLERS = ("tpe", "cmaes", "gp", "random")
"""Optuna's samplers, as `sweep.sampler` names them."""


@dataclass(kw_only=True, slots=True)
class Sweep(require.Checked):
    """Keys of all kinds of sweeps."""

    time_limit_min: Annotated[float | None, require.above(0)] = None
    """Minutes from the command after which no further run of the sweep begins; null: no limit."""


@dataclass(kw_only=True, slots=True)
class Grid(Sweep):
    """Every combination of the values."""


@dataclass(kw_only=True, slots=True)
class Random(Sweep):
    """Values that are drawn, the same ones whenever the seed and the space are the same."""

    num_runs: Annotated[int, require.at_least(1, at_most=MAX_RUNS)] = 20
    """Runs of the sweep, over all commands that extend it."""
    seed: Annotated[int, require.at_least(0)] = 0
    """Seed of the draws; the runs have seeds of their own."""


@dataclass(kw_only=True, slots=True)
class Asha(Random):
    """Values that are drawn as for `sweep=random`, and runs that pause at rungs; only the best continue."""

    min_steps: Annotated[int | None, require.at_least(1)] = None
    """Steps of the first rung; null: `trainer.eval_every_steps`, so that it is the first evaluation."""
    reduction_factor: Annotated[int, require.at_least(2)] = 3
    """Each rung has this many times the steps of the one before, and one in this many runs continues."""


@dataclass(kw_only=True, slots=True)
class Optuna(Random):
    """Values that a sampler of Optuna chooses by the results so far; it needs the package optuna."""

    sampler: Annotated[str, require.one_of(*SAMPLERS)] = "tpe"
    """Optuna's sampler: `tpe`, `cmaes`, `gp` or `random`."""
    startup_runs: Annotated[int, require.at_least(1)] = 10
    """Runs whose values are random, before the sampler chooses by results."""


KINDS: dict[str, type[Sweep]] = {"grid": Grid, "random": Random, "asha": Asha, "optuna": Optuna}
"""The options of the group, with their keys."""
SEARCHES = frozenset({"asha", "optuna"})
"""The kinds that are searches: tasks ask for their runs, of which some never complete."""


def kind_of(sweep: Sweep) -> str:
    """Return the option of a sweep: ``grid``, ``random``, ``asha`` or ``optuna``."""
    return next(name for name, kind in KINDS.items() if type(sweep) is kind)
