"""A task whose file system refuses checkpoints for a while."""

import shutil
import time
from pathlib import Path

from trial import Trial


class Refusing(Trial):
    """From its n-th loss on, rank zero's folder of checkpoints is a file; from another one on it is a folder again.

    With ``gone`` it is removed with all that is in it, and nothing stands in its place.
    """

    def __init__(self, checkpoints, begin, end=0, gone=False, **options):
        super().__init__(**options)
        self.folder, self.begin, self.end, self.gone = Path(checkpoints), begin, end, gone
        self.aside = self.folder.with_name("aside")

    def loss(self, model, batch):
        if self.rank == 0 and self.calls + 1 == self.begin:
            if self.gone:
                shutil.rmtree(self.folder)
            else:
                self._wait_for_the_writer()
                self.folder.rename(self.aside)
                self.folder.write_text("no folder any more")
        if self.rank == 0 and self.calls + 1 == self.end:
            self.folder.unlink()
            self.aside.rename(self.folder)
        return super().loss(model, batch)

    def _wait_for_the_writer(self):
        """A save is published, and none is on its way: it would fail, and those until then would have been left out."""
        give_up = time.monotonic() + 30
        while not list(self.folder.glob("step_*")) or list(self.folder.glob(".tmp-*")):
            assert time.monotonic() < give_up, list(self.folder.iterdir())
            time.sleep(0.01)
