"""Checks of single values; each raises a ConfigError that names key, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hpctrain.errors import ConfigError


def at_least(key: str, value: float | None, minimum: float, unit: str = "") -> None:
    """Refuse NaN and numbers below ``minimum``; None passes."""
    if value is not None and (math.isnan(value) or value < minimum):
        raise ConfigError(key, value, f"must be at least {minimum}{unit}", f"set {key}={minimum} or more")


def above(key: str, value: float | None, bound: float) -> None:
    """Refuse infinity, NaN and numbers up to ``bound``; None passes."""
    if value is not None and not (math.isfinite(value) and value > bound):
        raise ConfigError(key, value, f"must be a number above {bound:g}", f"set {key} to one")


def between(key: str, value: float, low: float, high: float) -> None:
    """Refuse NaN and numbers outside of [low, high]."""
    if not low <= value <= high:
        raise ConfigError(key, value, f"must be in [{low:g}, {high:g}]", f"set {key} to a number in this range")


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value that isn't one of ``choices``."""
    names = sorted(choices)
    if value not in names:
        raise ConfigError(key, value, "is not known", f"choose one of {', '.join(names)}")


def single_line(key: str, value: str | None) -> None:
    """Refuse control characters; in a batch script a line break would start another command."""
    if value is not None and any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ConfigError(key, repr(value), "contains a line break or a control character", "write it on one line")
