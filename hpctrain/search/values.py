"""The values of an override that lists several, in Hydra's grammar."""

from __future__ import annotations

import dataclasses
import decimal
import math
from collections.abc import Iterator

from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep, ValueType

from hpctrain.config.multiple_values import value_as_typed
from hpctrain.errors import ConfigError


def number_of_values(override: Override) -> int:
    """Count the values without making them: a range may have billions.

    Raises:
        ConfigError: there are none, or it isn't a range.
    """
    key, typed, value = override.key_or_group, value_as_typed(override), override.value()
    try:
        number = _length_of(value) if isinstance(value, RangeSweep) else sum(1 for _ in values_of(override))
    except (ArithmeticError, ValueError) as error:
        # decimal's errors are lists of classes
        why = f": {error}" if isinstance(error, ValueError) else ""
        raise ConfigError(key, typed, f"is not a range{why}", "write range(FIRST,END,STEP)") from error
    if number == 0:
        is_glob = override.value_type is ValueType.GLOB_CHOICE_SWEEP
        remedy = "glob(...) chooses options of a group" if is_glob else "the end of a range is not one of its values"
        raise ConfigError(key, typed, "has no values, so there is no run", remedy)
    return number


def values_of(override: Override) -> Iterator[str]:
    """Yield the values as they are typed; `shuffle(...)` shuffles them by chance."""
    is_glob = override.value_type is ValueType.GLOB_CHOICE_SWEEP
    # the schemas are among the options of their groups, but can't be chosen
    return (value for value in override.sweep_string_iterator() if not (is_glob and value.startswith("base_")))


def in_order(override: Override) -> Override:
    """Return the override without `shuffle(...)`, so that its values have the same order each time."""
    value = override.value()
    if isinstance(value, ChoiceSweep | RangeSweep) and value.shuffle:
        return dataclasses.replace(override, _value=dataclasses.replace(value, shuffle=False))
    return override


def _length_of(values: RangeSweep) -> int:
    given = values.range()
    if isinstance(given, range):
        # not len(), which refuses a range that is longer than a pointer can count
        return max(0, -(-(given.stop - given.start) // given.step))
    steps = (decimal.Decimal(given.stop) - decimal.Decimal(given.start)) / decimal.Decimal(given.step)
    return max(0, math.ceil(steps))
