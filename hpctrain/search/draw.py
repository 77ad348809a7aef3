"""Draw the values of runs: those of a run depend on the seed, the keys and the run's number alone."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping

from hpctrain.search.distribution import Distribution

Values = tuple[tuple[str, str], ...]
"""Keys and values of a run, as they are typed, in the order of the space."""
TRIES = 64
"""Draws per element of a finite space, after which the rest comes in order: some may be very unlikely."""


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
    space: Mapping[str, Distribution], seed: int, num_runs: int, *, taken: Collection[Values] = (), first: int = 0
) -> list[Values]:
    """Draw the values of runs, none of them twice.

    A larger ``num_runs`` adds runs, and keeps the others: without repetitions, run k has draw ``first + k``.

    Args:
        space: the distributions by key.
        seed: of the draws.
        num_runs: how many to draw; they are fewer if a finite space hasn't as many.
        taken: values of runs that exist.
        first: number of the first draw.
    """
    seen, found = set(taken), list[Values]()
    candidates = _candidates(space, seed, first, size_of(space))
    while len(found) < num_runs and (values := next(candidates, None)) is not None:
        if values not in seen:
            seen.add(values)
            found.append(values)
    return found


def size_of(space: Mapping[str, Distribution]) -> int | None:
    """Return the number of elements of a space; None if any number is possible for one of its keys."""
    sizes = [distribution.size for distribution in space.values()]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _candidates(space: Mapping[str, Distribution], seed: int, first: int, size: int | None) -> Iterator[Values]:
    numbers = itertools.count(first) if size is None else range(first, first + TRIES * size)
    for number in numbers:
        yield tuple((key, each.at(fraction(seed, key.lstrip("+"), number))) for key, each in space.items())
    for values in itertools.product(*(each.all() for each in space.values())):
        yield tuple(zip(space, values, strict=True))
