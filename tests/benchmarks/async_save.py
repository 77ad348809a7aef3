"""torch.distributed.checkpoint.async_save of what the benchmarks of checkpoints save, to compare with."""

from __future__ import annotations

import shutil
import warnings
from concurrent.futures import Future

import torch.distributed.checkpoint as dcp
from state import State
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class AsyncSave:
    """Saves a state, into buffers that it keeps, and from there in the background."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.folder = state.raw.with_name("dcp")
        self.stager = DefaultStager(StagingOptions(False, False, False, False))  # neither pinned nor shared memory

    def begin(self) -> Future[object]:
        """Copy the state, and start to write it."""
        tree = {"model": self.state.model.state_dict(), "optimizer": self.state.optimizer.state_dict()}
        future = dcp.async_save(tree, checkpoint_id=self.folder, async_stager=self.stager, no_dist=True)
        assert isinstance(future, Future)
        return future

    def clear(self) -> None:
        """Delete what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
