"""A task on a disk that makes nothing durable in the background until the file that DISK_GATE names exists."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from tests.multiprocess.programs.trial import Trial


class SlowDisk(Trial):
    """The trial; DISK_WRITES names a file that appears when a write has begun."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate, self.writes = Path(os.environ["DISK_GATE"]), Path(os.environ["DISK_WRITES"])
        self.fsync, os.fsync = os.fsync, self.gated_fsync

    def gated_fsync(self, descriptor):
        if threading.current_thread() is not threading.main_thread():
            self.writes.touch()
            while not self.gate.exists():
                time.sleep(0.01)
        self.fsync(descriptor)
