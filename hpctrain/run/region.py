"""A box inside a tensor: what one rank holds of it, or wrote into a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside a tensor; of a tensor without dimensions, all of it.

    Attributes:
        offsets: where it begins, by dimension.
        sizes: by dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: Region) -> Region | None:
        """Return the box that lies in both; None if it has no elements."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(mine + size, yours + other_size)
            for mine, size, yours, other_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Region(begins, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, outer: Region) -> Region:
        """Return the same box, with offsets counted from the begin of a box around it."""
        offsets = tuple(own - begin for own, begin in zip(self.offsets, outer.offsets, strict=True))
        return Region(offsets, self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """What selects the box from the whole tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))
