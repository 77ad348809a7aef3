"""Search for the largest micro-batch that fits into memory. Pure: `fit_batch` runs the trials."""

from __future__ import annotations

from dataclasses import dataclass, field

PRECISION = 16
"""The search ends when the largest size that fits and the smallest that doesn't differ by less than one part in 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A few steps with one micro-batch size, in a separate process.

    Attributes:
        micro_batch_size: samples per forward.
        fits: whether the steps stayed within the memory limit.
        peak_bytes: peak memory use; None if the process was killed.
        samples_per_s: throughput of the last step; None if no step finished.
        predicted: the size wasn't tried, because smaller sizes predict that it needs too much memory.
        message: the error that the allocator raised, if any.
        model_bytes: what the process holds of the model, by kind (`ModelMemory`); None if the trial didn't finish.
    """

    micro_batch_size: int
    fits: bool
    peak_bytes: int | None
    samples_per_s: float | None = None
    predicted: bool = False
    message: str = ""
    model_bytes: dict[str, int | None] | None = None


@dataclass(slots=True)
class BatchSearch:
    """Doubles the size until one doesn't fit, then halves the gap.

    Args:
        limit_bytes: the memory that a trial may use.
        largest: the largest size to try.
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
        """Return the result of a trial that can be skipped, because the size is predicted not to fit; else None."""
        expected = self.expected_bytes(size)
        if not self.careful or expected is None or expected <= self.limit_bytes:
            return None
        return Trial(micro_batch_size=size, fits=False, peak_bytes=expected, predicted=True)

    def record(self, trial: Trial) -> None:
        """Narrow the search by the result of a trial."""
        self.trials.append(trial)
        if trial.fits:
            self.fits = trial.micro_batch_size
        else:
            self.too_large = trial.micro_batch_size

    def expected_bytes(self, size: int) -> int | None:
        """Extrapolate a size's memory linearly from the two largest sizes that fit; None until two fit."""
        # beyond what the model and the optimizer take, memory grows linearly with the batch
        known = sorted((one.micro_batch_size, one.peak_bytes) for one in self.trials if one.fits and one.peak_bytes)
        if len(known) < 2:
            return None
        (smaller, less), (larger, more) = known[-2:]
        return more + max(0, more - less) * (size - larger) // (larger - smaller)
