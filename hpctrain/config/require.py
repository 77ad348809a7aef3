"""Checks of single values, each a ConfigError that names key, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hpctrain.errors import ConfigError


def at_least(key: str, value: float | None, minimum: float, unit: str = "") -> None:
    """Refuse a number below ``minimum``, and NaN; None means "not set" and passes."""
    if value is not None and (math.isnan(value) or value < minimum):
        raise ConfigError(key, value, f"must be {minimum}{unit} or more", f"set {key}={minimum} or above")


def above(key: str, value: float | None, bound: float) -> None:
    """Refuse a number that isn't above ``bound``, infinity and NaN; None passes."""
    if value is not None and not (math.isfinite(value) and value > bound):
        raise ConfigError(key, value, f"must be a number above {bound:g}", f"set {key} to one")


def between(key: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside of [low, high], and NaN."""
    if not low <= value <= high:
        raise ConfigError(key, value, f"must lie in [{low:g}, {high:g}]", f"set {key} to a number in it")


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a word that isn't among ``choices``."""
    names = sorted(choices)
    if value not in names:
        raise ConfigError(key, value, "is not known", f"choose one of {', '.join(names)}")


def single_line(key: str, value: str | None) -> None:
    """Refuse control characters: the value goes into a batch script, where a line break would start a new line."""
    if value is not None and any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ConfigError(key, repr(value), "holds a line break or a control character", "write it in one line")
