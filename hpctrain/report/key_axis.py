"""The axis of a key that a sweep varies: a scale for numbers, places for anything else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.report.scale import Scale, number_text, scale_of
from hpctrain.run.manifest import value_text

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
