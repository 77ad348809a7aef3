"""Expand overrides with several values into the overrides of each run."""

from __future__ import annotations

import decimal
import itertools
import math
from collections.abc import Iterator, Sequence

from hydra.core.override_parser.types import Override, RangeSweep, ValueType

from hpctrain.config.multiple_values import value_as_typed
from hpctrain.errors import ConfigError

MAX_RUNS = 10_000
"""Largest number of runs in one sweep; SLURM's own limit on an array is 1,001 by default (MaxArraySize)."""


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
        count *= _number_of_values(override)
        if count > MAX_RUNS:
            problem = f"makes {count:,} runs, more than {MAX_RUNS:,}"
            raise ConfigError(override.key_or_group, value_as_typed(override), problem, "split the sweep")
        values[key] = [f"{key}={value}" for value in _values(override)]
    return [list(run) for run in itertools.product(*values.values())]


def _number_of_values(override: Override) -> int:
    """Count the values without making them: a range may have billions."""
    key, typed, value = override.key_or_group, value_as_typed(override), override.value()
    if not override.is_discrete_sweep():
        raise ConfigError(
            key, typed, "is a continuous range", "write range(...) or a,b, or choose a sweeper that samples"
        )
    try:
        number = _length_of(value) if isinstance(value, RangeSweep) else sum(1 for _ in _values(override))
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(key, typed, f"is not a range: {error}", "write range(FIRST,END,STEP)") from error
    if number == 0:
        is_glob = override.value_type is ValueType.GLOB_CHOICE_SWEEP
        remedy = "glob(...) chooses options of a group" if is_glob else "the end of a range is not one of its values"
        raise ConfigError(key, typed, "has no values, so there is no run", remedy)
    return number


def _values(override: Override) -> Iterator[str]:
    is_glob = override.value_type is ValueType.GLOB_CHOICE_SWEEP
    # the schemas are among the options of their groups, but can't be chosen
    return (value for value in override.sweep_string_iterator() if not (is_glob and value.startswith("base_")))


def _length_of(values: RangeSweep) -> int:
    given = values.range()
    if isinstance(given, range):
        # not len(), which refuses a range that is longer than a pointer can count
        return max(0, -(-(given.stop - given.start) // given.step))
    steps = (decimal.Decimal(given.stop) - decimal.Decimal(given.start)) / decimal.Decimal(given.step)
    return max(0, math.ceil(steps))
