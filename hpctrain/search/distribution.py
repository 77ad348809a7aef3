"""What a search draws a key's value from: one override in Hydra's grammar, such as `tag(log,interval(1e-5,1e-1))`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from hpctrain.config.multiple_values import value_as_typed
from hpctrain.errors import ConfigError
from hpctrain.search.values import in_order, number_of_values, values_of

MAX_CHOICES = 100_000
"""Largest number of values that a choice lists."""
DIGITS = 6
"""Significant digits of a drawn number, where so many tell it from the ends of its interval."""
INTERVAL = re.compile(r"interval\s*\(([^()]*)\)")
WHOLE = re.compile(r"(?:(?:start|end)\s*=\s*)?[+-]?\d[\d_]*")


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values, all equally likely.

    Attributes:
        values: as they are typed, each once.
    """

    values: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of values."""
        return len(self.values)

    def at(self, fraction: float) -> str:
        """Return the value at a fraction in [0, 1) of the distribution, as it is typed."""
        return self.values[int(fraction * len(self.values))]

    def all(self) -> list[str]:
        """Return all values, in their order."""
        return list(self.values)


@dataclass(frozen=True, slots=True)
class Integers:
    """Whole numbers from `low` to `high`, both included.

    Attributes:
        low: the smallest.
        high: the largest.
        log: whether their logarithms are uniform, and not they themselves.
        step: distance of one to the next.
    """

    low: int
    high: int
    log: bool = False
    step: int = 1

    @property
    def size(self) -> int:
        """The number of values."""
        return (self.high - self.low) // self.step + 1

    def at(self, fraction: float) -> str:
        """Return the value at a fraction in [0, 1) of the distribution, as it is typed."""
        if self.log:
            # each number has the part of the logarithmic axis from half below to half above it
            low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
            value = round(math.exp(low + fraction * (high - low)))
            return str(min(max(value, self.low), self.high))
        return str(self.low + self.step * min(int(fraction * self.size), self.size - 1))

    def all(self) -> list[str]:
        """Return all values, the smallest first."""
        return [str(value) for value in range(self.low, self.high + 1, self.step)]


@dataclass(frozen=True, slots=True)
class Floats:
    """Numbers from `low` to below `high`; with a step from `low` to `high`.

    Attributes:
        low: the smallest.
        high: what bounds them; with a step the largest.
        log: whether their logarithms are uniform, and not they themselves.
        step: distance of one to the next; None if any number is possible.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def size(self) -> int | None:
        """The number of values; None if any number is possible."""
        return None if self.step is None else round((Decimal(self.high) - Decimal(self.low)) / Decimal(self.step)) + 1

    def at(self, fraction: float) -> str:
        """Return the value at a fraction in [0, 1) of the distribution, as it is typed."""
        if self.size is not None:
            return self._stepped(min(int(fraction * self.size), self.size - 1))
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.exp(low + fraction * (high - low))
        else:
            width = self.high - self.low
            # of the largest numbers, the difference is infinite
            value = (
                self.low + fraction * width if width < math.inf else self.low * (1 - fraction) + self.high * fraction
            )
        value = max(self.low, min(value, math.nextafter(self.high, self.low)))
        rounded = float(f"{value:.{DIGITS}g}")
        return repr(rounded if self.low <= rounded < self.high else value)

    def all(self) -> list[str]:
        """Return all values, the smallest first.

        Raises:
            ValueError: any number is possible.
        """
        if self.size is None:
            raise ValueError("an interval has no list of values")
        return [self._stepped(number) for number in range(self.size)]

    def _stepped(self, number: int) -> str:
        # as Hydra makes the values of a range
        return repr(float(Decimal(self.low) + number * Decimal(self.step or 0)))


Distribution = Choice | Integers | Floats
"""What a key's values are drawn from."""


def distribution_of(override: Override) -> Distribution:
    """Read the distribution that an override with several values describes.

    Args:
        override: parsed by Hydra.

    Raises:
        ConfigError: Hydra's grammar has it, and a search can't use it.
    """
    value = override.value()
    tags = set(getattr(value, "tags", ()))
    if isinstance(value, IntervalSweep):
        if unknown := sorted(tags - {"log"}):
            raise _error(override, f"has the unknown tag {unknown[0]}", "write tag(log,interval(LOW,HIGH))")
        return _interval(override, value, log="log" in tags)
    if tags:
        raise _error(override, "has a tag, which only an interval may have", "write tag(log,interval(LOW,HIGH))")
    number = number_of_values(override)
    if isinstance(value, RangeSweep):
        return _range(value, number)
    if number > MAX_CHOICES:
        raise _error(override, f"has {number:,} values, more than {MAX_CHOICES:,}", "write interval(LOW,HIGH)")
    return Choice(tuple(dict.fromkeys(values_of(in_order(override)))))


def _interval(override: Override, value: IntervalSweep, *, log: bool) -> Integers | Floats:
    typed = value_as_typed(override)
    low, high = value.start, value.end
    assert low is not None
    assert high is not None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise _error(override, "has an end that is not finite", "write interval(LOW,HIGH) with two numbers")
    if not low < high and not (low == high and isinstance(low, int)):
        raise _error(override, "has a LOW that is not below HIGH", "write interval(LOW,HIGH)")
    if log and low <= 0:
        raise _error(override, f"has no logarithm at LOW={low:g}", "choose LOW above 0, or leave out tag(log,...)")
    # Hydra makes floats of all ends, unless int(...) makes integers of them
    ends = INTERVAL.search(typed)
    whole = ends is not None and all(WHOLE.fullmatch(end.strip()) for end in ends[1].split(","))
    if isinstance(low, int) or (whole and not re.search(r"\bfloat\s*\(", typed)):
        return Integers(int(low), int(high), log)
    return Floats(float(low), float(high), log)


def _range(value: RangeSweep, number: int) -> Integers | Floats:
    given = value.range()
    if isinstance(given, range):
        ends = sorted((given.start, given.start + (number - 1) * given.step))
        return Integers(ends[0], ends[1], step=abs(given.step))
    first, step = Decimal(given.start), Decimal(given.step)
    low, high = sorted((first, first + (number - 1) * step))
    return Floats(float(low), float(high), step=float(abs(step)))


def _error(override: Override, problem: str, remedy: str) -> ConfigError:
    return ConfigError(override.key_or_group, value_as_typed(override), problem, remedy)
