"""The search for the largest micro-batch that fits into memory; pure, the trials are made by `fit_batch`."""

from __future__ import annotations

from dataclasses import dataclass, field

PRECISION = 16
"""The search ends when the largest size that fits and the smallest that doesn't differ by less than one part in 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A few steps with one micro-batch size, in a process of its own.

    Attributes:
        micro_batch_size: samples per forward.
        fits: whether the steps were done within the memory that may be used.
        peak_bytes: the most memory that was used; None if the process was killed.
        samples_per_s: of the last step; None if there was none.
        predicted: not tried, because the sizes before predict too much memory.
        message: the error that the allocator raised, if any.
    """

    micro_batch_size: int
    fits: bool
    peak_bytes: int | None
    samples_per_s: float | None = None
    predicted: bool = False
    message: str = ""


@dataclass(slots=True)
class BatchSearch:
    """Doubles the size until one doesn't fit, then halves the gap.

    Args:
        limit_bytes: the memory that may be used.
        largest: the largest size of interest.
        careful: don't try a size that is predicted not to fit. On a CPU the kernel kills processes when memory runs
            out, and not always the one that took it.
    """

    limit_bytes: int
    largest: int
    careful: bool
    fits: int = field(default=0, init=False)
    """The largest size that fits so far; 0 before there is one."""
    too_large: int | None = field(default=None, init=False)
    """The smallest size that doesn't fit so far."""
    trials: list[Trial] = field(default_factory=list, init=False)

    def next_size(self) -> int | None:
        """The size to try next; None when the search is over."""
        if self.too_large is None:
            return min(max(1, 2 * self.fits), self.largest) if self.fits < self.largest else None
        if self.too_large - self.fits > max(1, self.fits // PRECISION):
            return (self.fits + self.too_large) // 2
        return None

    def prediction(self, size: int) -> Trial | None:
        """A trial that need not be made, because the size is predicted not to fit."""
        expected = self.expected_bytes(size)
        if not self.careful or expected is None or expected <= self.limit_bytes:
            return None
        return Trial(micro_batch_size=size, fits=False, peak_bytes=expected, predicted=True)

    def record(self, trial: Trial) -> None:
        """Take the result of a trial into account."""
        self.trials.append(trial)
        if trial.fits:
            self.fits = trial.micro_batch_size
        else:
            self.too_large = trial.micro_batch_size

    def expected_bytes(self, size: int) -> int | None:
        """The memory that a size would use, on a line through the two largest that fit; None before there are two."""
        # beyond what the model and the optimizer take, memory grows linearly with the batch
        known = sorted((one.micro_batch_size, one.peak_bytes) for one in self.trials if one.fits and one.peak_bytes)
        if len(known) < 2:
            return None
        (smaller, less), (larger, more) = known[-2:]
        return more + max(0, more - less) * (size - larger) // (larger - smaller)
