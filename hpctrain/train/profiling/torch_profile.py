"""A trace of some steps by torch's profiler, for TensorBoard and Perfetto."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger("hpctrain.train")


class TorchProfile:
    """Traces the steps from ``first`` to ``last``, counted as metrics.jsonl counts them.

    Args:
        first: first step of the trace.
        last: last step of the trace.
        file: of the trace; TensorBoard's plugin looks for names that end in ``.pt.trace.json``.
        device: on which the steps run.
    """

    def __init__(self, first: int, last: int, file: Path, device: torch.device) -> None:
        self._first = first
        self._last = last
        self._file = file
        self._device = device
        self._profiler: profile | None = None

    def next_after(self, step: int) -> int | None:
        """Return the number of completed steps before the next traced step; None if none follows."""
        return None if step >= self._last else max(step, self._first - 1)

    def trace(self, step: int, do: Callable[[], None]) -> None:
        """Run a step that belongs to the trace, and write the trace after the last one."""
        if self._profiler is None:
            self._profiler = self._started()
        do()
        if step + 1 == self._last:
            self.close()

    def close(self) -> None:
        """Write the trace so far; an error is logged as a warning."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        try:
            self._file.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            log.warning("can't write the trace to %s: %s", self._file, error)
            return
        log.info("a trace of steps %d to %d: %s (ui.perfetto.dev, TensorBoard)", self._first, self._last, self._file)

    def _started(self) -> profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        profiler = profile(activities=activities, record_shapes=True)
        with warnings.catch_warnings():
            # torch 2.11 warns that events are cleared between cycles; this profiler has one cycle. acc_events=True,
            # which the warning suggests, would make stop() parse every event
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            profiler.start()
        return profiler
