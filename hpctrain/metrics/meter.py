"""Means over samples, reduced over ranks when they are read, and samples per second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""A function that sums a float64 tensor over all ranks, in place or not, and returns the sum; collective."""


class Meter:
    """Sums and counts by metric name; a mean is their ratio over all ranks, never a mean of means.

    Sums are float64, in which float32 losses of one window add up exactly or nearly so: order and world size don't
    change the logged digits. On a CPU sums are plain floats; elsewhere they stay on the device until they are read.

    Args:
        device: the device of the values and of the reduction.
        reduce: sums a 1-d float64 tensor on ``device`` over all ranks; None for a world of one.
        names: metrics that take part in every reduction, even on a rank without samples. For any other name each rank
            must have added samples, or called `expect`, before the next reduction.
        sums_on_device: None: yes for every device but the CPU.
    """

    def __init__(
        self,
        device: torch.device,
        reduce: Reduce | None = None,
        names: Iterable[str] = (),
        *,
        sums_on_device: bool | None = None,
    ) -> None:
        self._device = device
        self._reduce = reduce
        self._names = tuple(names)
        # on a CPU, `item` costs less than any tensor operation, and doesn't stall a device
        self._on_host = device.type == "cpu" if sums_on_device is None else not sums_on_device
        self._sums: dict[str, float | Tensor] = {}
        self._counts: dict[str, float | Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self._sums = dict.fromkeys(self._names, 0.0)
        self._counts = dict.fromkeys(self._names, 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics of the next reduction, as this rank knows them; sorted."""
        return tuple(sorted(self._sums))

    def expect(self, names: Iterable[str]) -> None:
        """Include metrics in every reduction from now on, such as those for which only other ranks have samples."""
        self._names = tuple(dict.fromkeys([*self._names, *names]))
        for name in self._names:
            self._sums.setdefault(name, 0.0)
            self._counts.setdefault(name, 0.0)

    def add_mean(self, name: str, mean: Tensor, count: int) -> None:
        """Add a mean (0-d, any dtype, with or without a graph) over ``count`` samples; takes no part in autograd."""
        if self._on_host:
            sums = self._sums
            sums[name] = sums.get(name, 0.0) + mean.item() * count
        else:
            self._accumulate(self._sums, name, mean, count)
        counts = self._counts
        counts[name] = counts.get(name, 0.0) + count

    def add_sum(self, name: str, total: Tensor, count: float | Tensor) -> None:
        """Add a sum (0-d, any dtype) over ``count`` samples; the count may be a 0-d tensor (of unmasked tokens)."""
        self._accumulate(self._sums, name, total, 1)
        if isinstance(count, Tensor):
            self._accumulate(self._counts, name, count, 1)
        else:
            self._counts[name] = self._counts.get(name, 0.0) + count

    def means(self) -> dict[str, float]:
        """The means over all ranks since the last reset; NaN if no rank had a sample.

        Collective, and waits for the device.
        """
        return {name: total / count if count else float("nan") for name, (total, count) in self.state().items()}

    def state(self) -> dict[str, tuple[float, float]]:
        """Sum and count by name over all ranks, for a checkpoint within a window.

        Collective, and waits for the device.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        entries = [*(self._sums[name] for name in names), *(self._counts[name] for name in names)]
        values = self._reduced(entries)
        return dict(zip(names, zip(values[: len(names)], values[len(names) :], strict=True), strict=True))

    def load_state(self, state: Mapping[str, tuple[float, float]], *, rank: int) -> None:
        """Continue from a result of `state`, at any world size: every rank calls it; only rank zero adds the values."""
        self.reset()
        self._sums |= {name: total if rank == 0 else 0.0 for name, (total, _) in state.items()}
        self._counts |= {name: count if rank == 0 else 0.0 for name, (_, count) in state.items()}

    def _accumulate(self, entries: dict[str, float | Tensor], name: str, value: Tensor, weight: int) -> None:
        before = entries.get(name, 0.0)
        if self._on_host:
            entries[name] = before + value.item() * weight
        elif isinstance(before, Tensor):
            before.add_(value.detach(), alpha=weight)
        else:
            entries[name] = value.detach().to(self._device, torch.float64, copy=True).mul_(weight).add_(before)

    def _reduced(self, entries: list[float | Tensor]) -> list[float]:
        if self._on_host and self._reduce is None:
            return [float(entry) for entry in entries]
        totals = self._gather(entries)
        if self._reduce is not None:
            totals = self._reduce(totals)
        values: list[float] = totals.tolist()
        return values

    def _gather(self, entries: list[float | Tensor]) -> Tensor:
        """One float64 tensor of all entries, with no more than one copy to the device."""
        numbers = [0.0 if isinstance(entry, Tensor) else entry for entry in entries]
        gathered = torch.tensor(numbers, dtype=torch.float64).to(self._device, non_blocking=True)
        for index, entry in enumerate(entries):
            if isinstance(entry, Tensor):
                gathered[index] = entry
        return gathered


class Throughput:
    """Samples per second of an attempt; costs nothing per step.

    Args:
        samples_seen: samples over all ranks before this attempt.
        clock: seconds of training, which stands still during evaluations and saves.
    """

    def __init__(self, samples_seen: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin_s = clock()
        self._samples_seen = samples_seen

    def rate(self, samples_seen: int) -> float:
        """Samples per second, over all ranks, since the last call; 0.0 if no time has passed."""
        now_s = self._clock()
        seconds, samples = now_s - self._begin_s, samples_seen - self._samples_seen
        self._begin_s = now_s
        self._samples_seen = samples_seen
        return samples / seconds if seconds > 0 else 0.0
