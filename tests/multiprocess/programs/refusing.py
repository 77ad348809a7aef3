"""A task whose file system refuses checkpoints for a while."""

import shutil
import threading
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
                wait_for_the_writer()
                assert list(self.folder.glob("step_*"))
                self.folder.rename(self.aside)
                self.folder.write_text("no folder any more")
        if self.rank == 0 and self.calls + 1 == self.end:
            wait_for_the_writer()  # it was refused: its save began after the one that was waited for had ended
            self.folder.unlink()
            self.aside.rename(self.folder)
        return super().loss(model, batch)


def wait_for_the_writer():
    """No save is on its way any more: it would meet the one folder and the other, and those until then be left out."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(60)
            assert not thread.is_alive()
