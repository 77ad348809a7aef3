"""Means over samples, reduced over ranks when they are read, and samples per second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""A function that sums a float64 tensor over all ranks, in place or not, and returns the sum; collective."""
GatherNames = Callable[[Sequence[str]], Sequence[str]]
"""A function that returns the names of all ranks, in the same order on each; collective."""
Totals = dict[str, tuple[float, float]]
"""Sum and count by name."""


class Meter:
    """Sums and counts by metric name; a mean is their ratio over all ranks, never a mean of means.

    Sums are float64, in which float32 losses of one window add up exactly or nearly so: order and world size don't
    change the logged digits. On a CPU sums are plain floats; elsewhere they stay on the device until they are read.

    Args:
        device: the device of the values and of the reduction.
        reduce: sums a 1-d float64 tensor on ``device`` over all ranks; None for a world of one.
        names: metrics that are in every result, even without samples.
        gather_names: exchanges names. Each reduction then counts the names that are new to a rank, and only if there
            are any, the ranks exchange them. Without it, each rank must have the same names in every reduction: it adds
            samples to them, or calls `expect`.
        sums_on_device: None: yes for every device but the CPU.
    """

    def __init__(
        self,
        device: torch.device,
        reduce: Reduce | None = None,
        names: Iterable[str] = (),
        *,
        gather_names: GatherNames | None = None,
        sums_on_device: bool | None = None,
    ) -> None:
        self._device = device
        self._reduce = reduce
        self._gather_names = None if reduce is None else gather_names
        self._names = tuple(names)
        # on a CPU, `item` costs less than any tensor operation, and doesn't stall a device
        self._on_host = device.type == "cpu" if sums_on_device is None else not sums_on_device
        self._reduced_names = sorted(self._names)
        self._sums: dict[str, float | Tensor] = {}
        self._counts: dict[str, float | Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self._sums = dict.fromkeys(self._names, 0.0)
        self._counts = dict.fromkeys(self._names, 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics to which this rank has added since the last reset, and those of every result; sorted."""
        return tuple(sorted(self._sums))

    def expect(self, names: Iterable[str]) -> None:
        """Include metrics in every result from now on, such as those for which only other ranks have samples."""
        self._names = tuple(dict.fromkeys([*self._names, *names]))
        for name in self._names:
            self._sums.setdefault(name, 0.0)
            self._counts.setdefault(name, 0.0)

    def add_mean(self, name: str, mean: Tensor, count: float) -> None:
        """Add a mean (0-d, any dtype, with or without a graph) over ``count`` samples; takes no part in autograd."""
        if self._on_host:
            sums = self._sums
            sums[name] = sums.get(name, 0.0) + mean.item() * count
        else:
            self._accumulate(self._sums, name, mean, count)
        counts = self._counts
        counts[name] = counts.get(name, 0.0) + count

    def add_value(self, name: str, mean: Tensor | float, count: Tensor | float) -> None:
        """Add a mean, also a plain number, over a count, which may be a 0-d tensor, too; takes no part in autograd.

        With a count of 0 nothing is added: the mean over no samples is NaN, which would make the whole record NaN.
        """
        if isinstance(count, Tensor):
            if not self._on_host and count.device.type == self._device.type:
                # not a comparison in Python, which would wait for the device
                total = count.detach().double() * (mean.detach() if isinstance(mean, Tensor) else mean)
                self.add_sum(name, torch.where(count != 0, total, 0.0), count)
                return
            count = count.item()
        if count:
            self._accumulate(self._sums, name, mean, count)
            self._counts[name] = self._counts.get(name, 0.0) + count

    def add_sum(self, name: str, total: Tensor, count: float | Tensor) -> None:
        """Add a sum (0-d, any dtype) over ``count`` samples; the count may be a 0-d tensor (of unmasked tokens)."""
        self._accumulate(self._sums, name, total, 1)
        if isinstance(count, Tensor):
            self._accumulate(self._counts, name, count, 1)
        else:
            self._counts[name] = self._counts.get(name, 0.0) + count

    def means(self, *, of_none: bool = True) -> dict[str, float]:
        """The means over all ranks since the last reset; collective, and waits for the device.

        A metric without a sample on any rank is left out, or NaN if it is one of every result.

        Args:
            of_none: whether a metric of every result without a sample is NaN; False: it is left out, too.
        """
        return {
            name: total / count if count else float("nan")
            for name, (total, count) in self.state().items()
            if count or (of_none and name in self._names)
        }

    def state(self) -> Totals:
        """Sum and count by name over all ranks; collective, and waits for the device.

        Metrics that this rank has seen before are included, even without a sample since the last reset.
        """
        new = sorted(self._sums.keys() - self._reduced_names)
        if self._gather_names is None:
            self._reduced_names = sorted({*self._reduced_names, *new})
            return self._totals(self._reduced_names)
        totals = self._totals(self._reduced_names, extra=float(len(new)))
        if totals.pop("", (0.0, 0.0))[0]:
            unknown = [name for name in self._gather_names(new) if name not in self._reduced_names]
            totals |= self._totals(unknown)
            self._reduced_names = sorted(totals)
        return {name: totals[name] for name in self._reduced_names}

    def own_state(self) -> Totals:
        """Sum and count by name on this rank alone; waits for the device."""
        return {name: (float(self._sums[name]), float(self._counts[name])) for name in self._sums}

    def load_state(
        self, state: Mapping[str, tuple[float, float]], *, rank: int, own_state: Totals | None = None
    ) -> None:
        """Continue from a result of `state`, at any world size; every rank calls it.

        Args:
            state: over all ranks.
            rank: of this meter.
            own_state: of this rank, from the same time; None if the number of ranks has changed: then rank zero takes
                the values of all.
        """
        self.reset()
        # on all ranks alike: the place of a value in the reduction can change its last digit
        self._reduced_names = sorted({*self._names, *state})
        if own_state is None:
            own_state = dict(state) if rank == 0 else {}
        for name, (total, count) in own_state.items():
            self._sums[name] = total
            self._counts[name] = count

    def _accumulate(self, entries: dict[str, float | Tensor], name: str, value: Tensor | float, weight: float) -> None:
        before = entries.get(name, 0.0)
        if isinstance(value, Tensor) and value.device.type == "cpu" != self._device.type:
            # copying it to the device would wait for the device
            value = value.item()
        if not isinstance(value, Tensor):
            entries[name] = before + value * weight
        elif self._on_host:
            entries[name] = before + value.item() * weight
        elif isinstance(before, Tensor):
            before.add_(value.detach(), alpha=weight)
        else:
            entries[name] = value.detach().to(self._device, torch.float64, copy=True).mul_(weight).add_(before)

    def _totals(self, names: Sequence[str], extra: float | None = None) -> Totals:
        """Sum and count of these metrics over all ranks, and of the name '' the sum of an extra value; collective."""
        sums, counts = ([entries.get(name, 0.0) for name in names] for entries in (self._sums, self._counts))
        if extra is not None:
            names, sums, counts = ["", *names], [extra, *sums], [0.0, *counts]
        if not names:
            return {}
        values = self._reduced([*sums, *counts])
        return dict(zip(names, zip(values[: len(names)], values[len(names) :], strict=True), strict=True))

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


class SilentMeter(Meter):
    """The meter of a rank whose samples another rank counts; it takes part in the reductions, and adds nothing."""

    def add_mean(self, name: str, mean: Tensor, count: float) -> None:
        """Do nothing."""

    def add_value(self, name: str, mean: Tensor | float, count: Tensor | float) -> None:
        """Do nothing."""

    def add_sum(self, name: str, total: Tensor, count: float | Tensor) -> None:
        """Do nothing."""


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
