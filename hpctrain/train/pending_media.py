"""The media that a task or a callback has logged for one step, until the writer gets them."""

from __future__ import annotations

from hpctrain.metrics.media.captured import Captured
from hpctrain.metrics.media.writer import MediaWriter


class PendingMedia:
    """Keeps the media of one step, of which a later one replaces an earlier one with the same name.

    Attributes:
        writer: gets them on rank zero; None on other ranks, and outside of the training.
    """

    def __init__(self) -> None:
        self.writer: MediaWriter | None = None
        self._step = 0
        self._media: dict[str, Captured] = {}

    def add(self, step: int, name: str, captured: Captured) -> None:
        """Add a medium; those of an earlier step are handed to the writer.

        Args:
            step: to which it belongs.
            name: as logged, such as `eval/samples`.
            captured: its content.
        """
        if self._step != step:
            self.release()
        self._step = step
        self._media[name] = captured

    def release(self) -> None:
        """Hand the media so far to the writer."""
        if self.writer is not None:
            for name, captured in self._media.items():
                self.writer.put(self._step, name, captured)
        self._media.clear()

    def drop(self) -> None:
        """Drop the media so far, as those of an evaluation that is abandoned."""
        self._media.clear()
