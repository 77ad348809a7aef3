"""The search for the largest micro-batch that fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PRECISION = 16
"""The search ends where the largest that fits and the smallest that doesn't are closer than one part in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A few steps with one micro-batch size, in a process of its own.

    Attributes:
        micro_batch_size: samples per forward.
        fits: the steps were done, within the memory that may be used.
        peak_bytes: the most memory that was taken; None where the process died of it, or wasn't started for it.
        samples_per_s: of the last step; None where there was none.
        predicted: not tried: the sizes before let it expect too much memory.
        message: what memory said, where it said something.
    """

    micro_batch_size: int
    fits: bool
    peak_bytes: int | None
    samples_per_s: float | None = None
    predicted: bool = False
    message: str = ""


@dataclass(slots=True)
class BatchSearch:
    """Doubles until a size doesn't fit, then halves the gap.

    Memory grows linearly with the batch, beyond what model and optimizer take. So a size that would take more than
    there is, by the two largest before it, isn't tried where that could harm others on the machine.

    Args:
        attempt: tries one size.
        limit_bytes: that may be used.
        largest: size that is of interest.
        careful: leave out what is expected not to fit; on a CPU, where the kernel ends processes for want of memory.
        said: is told of each trial.
    """

    attempt: Callable[[int], Trial]
    limit_bytes: int
    largest: int
    careful: bool
    said: Callable[[Trial], None] = lambda _: None
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> int:
        """Search; the largest size that fits, 0 where not even one sample does."""
        fits, too_large = 0, self.largest + 1
        size = 1
        while size < too_large:
            if self._try(size):
                fits = size
                # the largest of interest comes last, whatever it is
                size = min(2 * size, self.largest) if size < self.largest else too_large
            else:
                too_large = size
        while too_large - fits > max(1, fits // PRECISION):
            size = (fits + too_large) // 2
            if self._try(size):
                fits = size
            else:
                too_large = size
        return fits

    def expected_bytes(self, size: int) -> int | None:
        """What a size would take, by a line through the two largest that fit; None before there are two."""
        known = sorted((one.micro_batch_size, one.peak_bytes) for one in self.trials if one.fits and one.peak_bytes)
        if len(known) < 2:
            return None
        (smaller, less), (larger, more) = known[-2:]
        return more + max(0, more - less) * (size - larger) // (larger - smaller)

    def _try(self, size: int) -> bool:
        expected = self.expected_bytes(size)
        if self.careful and expected is not None and expected > self.limit_bytes:
            trial = Trial(micro_batch_size=size, fits=False, peak_bytes=expected, predicted=True)
        else:
            trial = self.attempt(size)
        self.trials.append(trial)
        self.said(trial)
        return trial.fits
