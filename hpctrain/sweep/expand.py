"""Expand overrides with several values into the overrides of each run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.types import Override

from hpctrain.config.multiple_values import value_as_typed
from hpctrain.config.sweep import MAX_RUNS
from hpctrain.errors import ConfigError
from hpctrain.search.values import number_of_values, values_of


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
            raise ConfigError(
                override.key_or_group,
                value_as_typed(override),
                "is a continuous range",
                "add sweep=random, which draws values from it; or write a,b or range(...)",
            )
        count *= number_of_values(override)
        if count > MAX_RUNS:
            problem = f"makes {count:,} runs, more than {MAX_RUNS:,}"
            raise ConfigError(override.key_or_group, value_as_typed(override), problem, "split the sweep")
        values[key] = [f"{key}={value}" for value in values_of(override)]
    return [list(run) for run in itertools.product(*values.values())]
