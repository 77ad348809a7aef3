"""A trace of some steps by torch's profiler, for TensorBoard and Perfetto."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger("hpctrain.train")


class Profile:
    """Traces the steps from ``first`` to ``last``, counted as metrics.jsonl counts them; imports nothing before.

    Args:
        first: first step of the trace.
        last: its last one.
        file: where the trace goes; a name on ``.pt.trace.json`` is what TensorBoard's plugin looks for.
        device: where the steps run.
    """

    def __init__(self, first: int, last: int, file: Path, device: torch.device) -> None:
        self._first, self._last, self._file, self._device = first, last, file, device
        self._profiler: profile | None = None
        self._done = False

    def next_after(self, step: int) -> int | None:
        """Completed steps before the next step to be traced; None where there is none."""
        return None if self._done or step >= self._last else max(step, self._first - 1)

    def wants(self, step: int) -> bool:
        """Whether the step that follows ``step`` completed ones belongs to the trace."""
        return not self._done and self._first <= step + 1 <= self._last

    def __call__(self, step: int, do: Callable[[], None]) -> None:
        """Do a step that belongs to the trace; the last one writes it."""
        if self._profiler is None:
            self._profiler = self._started()
        do()
        if step + 1 == self._last:
            self.close()

    def close(self) -> None:
        """Write what has been traced, where a run ends in the middle of it; a failure is a warning."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._done = True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        try:
            self._file.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            log.warning("the trace can't be written to %s: %s", self._file, error)
            return
        log.info("a trace of steps %d to %d: %s (ui.perfetto.dev, TensorBoard)", self._first, self._last, self._file)

    def _started(self) -> profile:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        profiler = profile(activities=activities, record_shapes=True)
        profiler.start()
        return profiler
