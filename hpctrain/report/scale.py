"""A scale from values to places on an axis, with its ticks; and the axis of a key, which may have texts as values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.run.manifest import value_text

DECADES = 2.0
"""Powers of ten between the smallest and the largest value from which an axis is logarithmic."""
_MOST_DIGITS = 300
_LARGEST = 1e300
"""Larger values are drawn at the end of the axis: their difference may overflow."""
_SMALLEST = 1e-300
"""Smaller positive values are drawn at the beginning of a logarithmic axis."""
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear or logarithmic scale.

    Attributes:
        low: the value at 0.
        high: the value at 1; more than ``low``.
        log: whether equal distances are equal factors; then both are positive.
    """

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """The place of a value, from 0 to 1; values outside of the scale lie at its ends."""
        value = min(max(value, self.low), self.high)
        if self.log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Round values on the scale, at most so many, each with its text."""
        values = self._log_ticks(most) if self.log else self._linear_ticks(most)
        return [(value, number_text(value)) for value in values]

    def _linear_ticks(self, most: int) -> list[float]:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        size = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
        first, last = math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9)
        return [round(number * size, 15 - math.ceil(math.log10(size))) if size < 1e15 else number * size
                for number in range(first, last + 1)]  # fmt: skip

    def _log_ticks(self, most: int) -> list[float]:
        powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        if len(powers) < 2:
            below = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = [factor * 10.0**power for power in below for factor in (1, 2, 5)]
            found = [value for value in every if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
            return found[:: math.ceil(len(found) / most) or 1]
        return [10.0**power for power in powers[:: math.ceil(len(powers) / most)]]


def scale_of(values: Iterable[float], *, log: bool | None = None, margin: float = 0.0) -> Scale:
    """The scale that holds all finite values.

    Args:
        values: any; those that aren't finite don't count.
        log: None makes it logarithmic if all values are positive and span `DECADES`.
        margin: free space at both ends, as a fraction.
    """
    finite = [min(max(value, -_LARGEST), _LARGEST) for value in values if math.isfinite(value)]
    if not finite:
        return Scale(0.0, 1.0)
    low, high = min(finite), max(finite)
    if log is None:
        log = low > 0 and math.log10(high) - math.log10(low) >= DECADES
    # no number, or few, may lie between the ends of a smaller span
    if high - low < max(10 * _SMALLEST, 1e-12 * max(abs(low), abs(high))):
        if log and low > 0:
            return Scale(max(low / 2, _SMALLEST), max(high, _SMALLEST) * 2, log=True)
        around = abs(low) * 0.05
        around = around if around > _SMALLEST else 1.0
        return Scale(low - around, high + around)
    if log and low > 0:
        low, high = math.log10(max(low, _SMALLEST)), math.log10(high)
        space = (high - low) * margin
        return Scale(10 ** max(low - space, -_MOST_DIGITS), 10 ** min(high + space, _MOST_DIGITS), log=True)
    space = (high - low) * margin
    return Scale(low - space, high + space)


def number_text(value: float) -> str:
    """A number in few characters: ``0.03``, ``1e-5``, ``20k``."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e15):
        digits, _, power = f"{value:.3g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits
    for unit, prefix in _PREFIXES:
        if size >= unit:
            # 10,000 is 10k
            return f"{value / (1e3 if prefix == 'k' else unit):.4g}{prefix}"
    return f"{value:.4g}"


LOG_FROM = 10.0
"""The ratio of the largest to the smallest value from which the axis of a key is logarithmic."""
MOST_DRAWN = 1e300
"""Larger numbers, infinities and NaN are texts."""
FEW = 4
"""Up to so many different numbers have a tick each."""
MOST_CHARS = 14
"""Characters of a value at a tick."""


@dataclass(frozen=True, slots=True)
class KeyAxis:
    """The axis of a key.

    Attributes:
        name: the key.
        scale: of the numbers, or of the places of the texts.
        texts: the place of each text; None if all values are numbers.
        few: the numbers, if they are few.
    """

    name: str
    scale: Scale
    texts: Mapping[str, float] | None = None
    few: Sequence[float] = ()

    @classmethod
    def of(cls, name: str, values: Iterable[object]) -> KeyAxis:
        """The axis that holds all values; None stands for a run without one."""
        known = [value for value in values if value is not None]
        numbers = [number for value in known if (number := _number(value)) is not None]
        if known and len(numbers) == len(known):
            low, high = min(numbers), max(numbers)
            few = sorted(set(numbers)) if len(set(numbers)) <= FEW else []
            return cls(name, scale_of(numbers, log=low > 0 and high / low >= LOG_FROM, margin=0.06), few=few)
        texts = list(dict.fromkeys(value_text(value) for value in known))
        return cls(
            name, Scale(-0.6, max(len(texts), 1) - 0.4), {text: float(place) for place, text in enumerate(texts)}
        )

    def number(self, value: object) -> float | None:
        """The place of a value in units of the scale; None for a run without one."""
        if value is None:
            return None
        if self.texts is not None:
            return self.texts.get(value_text(value))
        return _number(value)

    def ticks(self, most: int) -> Sequence[tuple[float, str]]:
        """Places with their texts, at most so many."""
        if self.texts is None:
            # a grid's few values are better ticks than round numbers
            return [(value, number_text(value)) for value in self.few] if self.few else self.scale.ticks(most)
        ticks = [(place, text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS - 1]}\u2026")
                 for text, place in self.texts.items()]  # fmt: skip
        return ticks[:: math.ceil(len(ticks) / most) or 1]


def _number(value: object) -> float | None:
    """A number, also one that is a text, as in the arguments of a program; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < MOST_DRAWN else None
