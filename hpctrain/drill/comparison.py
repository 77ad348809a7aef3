"""Two runs' evidence, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.drill.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was compared.

    Attributes:
        what: its name.
        straight: of the uninterrupted run, as text.
        interrupted: of the other.
        equal: whether they are the same, to the last bit.
        difference: the first one in a series, in words.
    """

    what: str
    straight: str
    interrupted: str
    equal: bool
    difference: str = ""


def compare(straight: Evidence, interrupted: Evidence) -> list[Row]:
    """Everything that an exact resume leaves as it is."""
    one, other = straight, interrupted
    rows = [
        _single("steps", one.step, other.step),
        _single("samples seen", one.samples_seen, other.samples_seen),
        _single("weights digest", one.weights_digest, other.weights_digest),
    ]
    names = sorted(one.metrics.keys() | other.metrics.keys())
    rows += [_series(name, one.metrics.get(name, {}), other.metrics.get(name, {})) for name in names]
    if one.samples or other.samples:
        rows.append(_samples(one.samples, other.samples))
    return rows


def _single(what: str, one: object, other: object) -> Row:
    # what is missing on both sides proves nothing
    equal = one == other and one is not None
    left, right = ("-" if value is None else str(value) for value in (one, other))
    return Row(what, left, right, equal)


def _series(what: str, one: Mapping[int, float | str], other: Mapping[int, float | str]) -> Row:
    left, right = (f"{_last(values)}, {len(values)} values" for values in (one, other))
    found = _first_difference(one, other)
    if found is None:
        return Row(what, left, right, equal=True)
    step, mine, theirs = found
    return Row(what, left, right, equal=False, difference=f"first after step {step}: {mine} and {theirs}")


def _samples(one: Mapping[int, object], other: Mapping[int, object]) -> Row:
    left, right = (f"of {len(steps)} steps" for steps in (one, other))
    found = _first_difference(one, other)
    return Row("samples by rank", left, right, found is None, "" if found is None else f"first in step {found[0]}")


def _first_difference(one: Mapping[int, object], other: Mapping[int, object]) -> tuple[int, str, str] | None:
    for step in sorted(one.keys() | other.keys()):
        if step not in one or step not in other or one[step] != other[step]:
            mine, theirs = (repr(values[step]) if step in values else "nothing" for values in (one, other))
            return step, mine, theirs
    return None


def _last(values: Mapping[int, float | str]) -> str:
    value = values[max(values)] if values else "-"
    return value if isinstance(value, str) else f"{value:.6g}"
