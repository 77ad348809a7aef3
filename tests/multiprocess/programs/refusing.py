"""A task whose file system refuses checkpoints for a while."""

import shutil
import threading
from pathlib import Path

from tests.multiprocess.programs.trial import Trial


class Refusing(Trial):
    """Puts a file in place of the folder of checkpoints at loss number ``begin``, and the folder back at ``end``.

    With ``gone`` it removes the folder and its contents instead, and puts nothing in its place.
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
    """Wait for the save in flight: it would otherwise see the folder change, and the saves until its end be skipped."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(60)
            assert not thread.is_alive()
