"""Values of a sweep's keys: listed, or drawn from distributions, in Hydra's grammar of overrides.

The values that are drawn for a run depend on the seed, the keys and the run's number alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, ValueType

from hpctrain.config.overrides import MISTAKES, TextKeepingParser, value_as_typed
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.run.sweep_record import REMEDY, SweepRecord

MAX_CHOICES = 100_000
"""Largest number of values that a choice lists."""
DIGITS = 6
"""Significant digits of a drawn number, if that many distinguish it from the ends of its interval."""
INTERVAL = re.compile(r"interval\s*\(([^()]*)\)")
WHOLE = re.compile(r"(?:(?:start|end)\s*=\s*)?[+-]?\d[\d_]*")
Values = tuple[tuple[str, str], ...]
"""Keys and values of a run, as they are typed, in the order of the space."""
TRIES = 64
"""Draws per element of a finite space, after which the rest comes in order: some may be very unlikely."""


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


def number_of_values(override: Override) -> int:
    """Count the values without making them: a range may have billions.

    Raises:
        ConfigError: there are none, or it isn't a range.
    """
    key, text, value = override.key_or_group, value_as_typed(override), override.value()
    try:
        number = _length_of(value) if isinstance(value, RangeSweep) else sum(1 for _ in values_of(override))
    except (ArithmeticError, ValueError) as error:
        # decimal's errors are lists of classes
        why = f": {error}" if isinstance(error, ValueError) else ""
        raise ConfigError(key, text, f"is not a range{why}", "write range(FIRST,END,STEP)") from error
    if number == 0:
        is_glob = override.value_type is ValueType.GLOB_CHOICE_SWEEP
        remedy = "glob(...) chooses options of a group" if is_glob else "the end of a range is not one of its values"
        raise ConfigError(key, text, "has no values, so there is no run", remedy)
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
    number_range = values.range()
    # not len(), which refuses a range that is longer than a pointer can count
    steps = (Decimal(number_range.stop) - Decimal(number_range.start)) / Decimal(number_range.step)

    return max(0, math.ceil(steps))


def fraction(seed: int, key: str, number: int) -> float:
    """Return a number in [0, 1) that looks random, the same on every machine and with every version of Python.

    It is the first 53 bits of SHA-256 (FIPS 180-4) of the text ``SEED/KEY/NUMBER``, read as a binary fraction.

    Args:
        seed: `sweep.seed`.
        key: full name of the key for which a value is drawn.
        number: of the draw, counted from 0.
    """
    digest = hashlib.sha256(f"{seed}/{key}/{number}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def draws(
    space: Mapping[str, Distribution], seed: int, num_runs: int, *, existing: Collection[Values] = (), first: int = 0
) -> list[Values]:
    """Draw the values of runs, none of them twice.

    A larger ``num_runs`` adds runs, and keeps the others: without repetitions, run k has draw ``first + k``.

    Args:
        space: the distributions by key.
        seed: of the draws.
        num_runs: how many to draw; they are fewer if a finite space hasn't as many.
        existing: values of runs that exist.
        first: number of the first draw.
    """
    excluded, drawn = set(existing), list[Values]()
    candidates = _candidates(space, seed, first)
    while len(drawn) < num_runs and (values := next(candidates, None)) is not None:
        if values not in excluded:
            excluded.add(values)
            drawn.append(values)
    return drawn


def size_of(space: Mapping[str, Distribution]) -> int | None:
    """Return the number of elements of a space; None if any number is possible for one of its keys."""
    sizes = [distribution.size for distribution in space.values()]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _candidates(space: Mapping[str, Distribution], seed: int, first: int) -> Iterator[Values]:
    size = size_of(space)
    numbers = itertools.count(first) if size is None else range(first, first + TRIES * size)
    for number in numbers:
        yield tuple((key, source.at(fraction(seed, key.lstrip("+"), number))) for key, source in space.items())
    for values in itertools.product(*(source.all() for source in space.values())):
        yield tuple(zip(space, values, strict=True))


def _interval(override: Override, value: IntervalSweep, *, log: bool) -> Integers | Floats:
    text = value_as_typed(override)
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
    ends = INTERVAL.search(text)
    is_whole = ends is not None and all(WHOLE.fullmatch(end.strip()) for end in ends[1].split(","))
    if isinstance(low, int) or (is_whole and not re.search(r"\bfloat\s*\(", text)):
        return Integers(int(low), int(high), log)
    return Floats(float(low), float(high), log)


def _range(value: RangeSweep, number: int) -> Integers | Floats:
    number_range = value.range()
    if isinstance(number_range, range):
        ends = sorted((number_range.start, number_range.start + (number - 1) * number_range.step))
        return Integers(ends[0], ends[1], step=abs(number_range.step))
    first, step = Decimal(number_range.start), Decimal(number_range.step)
    low, high = sorted((first, first + (number - 1) * step))
    return Floats(float(low), float(high), step=float(abs(step)))


def _error(override: Override, problem: str, remedy: str) -> ConfigError:
    return ConfigError(override.key_or_group, value_as_typed(override), problem, remedy)
