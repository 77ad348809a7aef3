"""A task that prints."""

from __future__ import annotations

from tests.multiprocess.programs.trial import Trial


class Printing(Trial):
    """Prints in each loss."""

    def loss(self, model, batch):
        print("of the task", flush=True)
        return super().loss(model, batch)
