"""How far the streams of the training data were read, as checkpoints keep it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hpctrain.checkpoint.host_memory import HostCopy
from hpctrain.data.bookmark import Bookmark, Bookmarks
from hpctrain.data.micro_batch import map_tensors
from hpctrain.data.sharded_stream import streams_of
from hpctrain.data.stream import has_bookmarks, remark_on
from hpctrain.distributed.world import World
from hpctrain.errors import CheckpointError, TaskError
from hpctrain.train.task_state import packed, unpacked

log = logging.getLogger("hpctrain.train")


class StreamState:
    """Saves and restores the bookmarks of all ranks; each rank resumes with all of them, at any world size.

    Args:
        dataset: the training data; no stream, perhaps.
        world: the ranks.

    Attributes:
        bookmarks: of this rank; the training loader keeps them up to date.
    """

    def __init__(self, dataset: Any, world: World) -> None:
        self.bookmarks = Bookmarks()
        self._world = world
        streams = streams_of(dataset)
        self._exists = any(map(has_bookmarks, streams))
        if world.is_rank_zero:
            for remark in dict.fromkeys(map(remark_on, streams)):
                if remark is not None:
                    log.warning(remark)

    def gather(self) -> list[dict[str, Any]] | None:
        """The newest bookmark of each stream at rank zero; None elsewhere, and without such streams; collective.

        Raises:
            TaskError: a stream's state can't be stored in a checkpoint; the message names the value's place.
        """
        if not self._exists:
            return None
        own = _plain(self.bookmarks)
        if self._world.size == 1:
            return own
        sent = self._world.gather_bytes(packed({"bookmarks": own}))
        if sent is None:
            return None
        newest = Bookmarks(Bookmark(**entry) for data in sent for entry in unpacked(data)["bookmarks"])
        return _plain(newest)

    def restore(self, saved: Sequence[dict[str, Any]] | None) -> None:
        """Begin with the bookmarks of a checkpoint; None if it has none: then streams are read from their start."""
        # copies: the tensors of a loaded checkpoint are mapped from its files, which retention removes
        self.bookmarks = Bookmarks(Bookmark(**map_tensors(torch.clone, entry)) for entry in saved or ())


def _plain(marks: Iterable[Bookmark]) -> list[dict[str, Any]]:
    """A copy of the bookmarks that a checkpoint can store."""
    host = HostCopy()
    try:
        entries = [host.of(mark._asdict(), name=f"state_dict() of stream {mark.stream}: bookmark") for mark in marks]
    except CheckpointError as error:
        raise TaskError(str(error)) from None
    host.finish()
    return entries
