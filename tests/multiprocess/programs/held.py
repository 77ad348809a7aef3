"""A task whose samples take as long as the file exists that HELD names; who waits leaves a file beside it.

HELD_FROM is the number of samples that each process reads before that; 0 if it isn't set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.multiprocess.programs.trial import Noisy, Trial, table


class HeldSamples(Noisy):
    """Samples that can't be read while the file exists."""

    num_read = 0

    def __getitem__(self, index):
        held, free = Path(os.environ["HELD"]), int(os.environ.get("HELD_FROM", "0"))
        while held.exists() and self.num_read >= free:
            held.with_suffix(f".{os.getpid()}").touch()
            time.sleep(0.01)
        self.num_read += 1
        return super().__getitem__(index)


class Held(Trial):
    """The trial, whose training samples, or the held-out ones with HELD_KIND=eval, are held."""

    def train_dataset(self):
        return HeldSamples(*table(self.sizes[0])) if self.held == "train" else super().train_dataset()

    def eval_dataset(self):
        return HeldSamples(*table(self.sizes[1], seed=2)) if self.held == "eval" else super().eval_dataset()

    @property
    def held(self):
        """Which samples."""
        return os.environ.get("HELD_KIND", "train")
