"""The positions in the streams of the training data, saved and restored."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from hpctrain.checkpoint.host_memory import HostCopy
from hpctrain.checkpoint.state import Stateful
from hpctrain.data.bookmark import Bookmark, Bookmarks
from hpctrain.data.micro_batch import map_tensors
from hpctrain.data.stream import check_stream, has_bookmarks, remark_on, streams_of
from hpctrain.errors import CheckpointError, TaskError
from hpctrain.phrases import counted
from hpctrain.rank.message import packed, unpacked
from hpctrain.rank.world import World

log = logging.getLogger("hpctrain.train")


class StreamState(Stateful):
    """Saves and restores the bookmarks of all ranks; each rank resumes with all of them, at any world size.

    Args:
        streams: of the training data; may be empty.
        world: the ranks.

    Attributes:
        bookmarks: of this rank; the training loader keeps them up to date.
    """

    is_collective: ClassVar[bool] = True

    def __init__(self, streams: Sequence[Any], world: World) -> None:
        self.bookmarks = Bookmarks()
        self._world = world
        self._num_streams = len(streams)
        self._exists = any(map(has_bookmarks, streams))

    def state(self) -> dict[str, Any]:
        """Return the newest bookmark of each stream at rank zero; None elsewhere, and without such streams; collective.

        Returns:
            ``streams``: ``num_streams``, and ``bookmarks``, each with the fields of a `Bookmark`.

        Raises:
            TaskError: a stream's state can't be stored in a checkpoint; the message names the value's place.
        """
        if not self._exists:
            return {"streams": None}
        bookmarks = _plain(self.bookmarks)
        if self._world.size > 1:
            sent = self._world.gather_bytes(packed({"bookmarks": bookmarks}))
            if sent is None:
                return {"streams": None}
            entries = (entry for data in sent for entry in unpacked(data)["bookmarks"])
            bookmarks = _plain(Bookmarks(Bookmark(**entry) for entry in entries))
        return {"streams": {"num_streams": self._num_streams, "bookmarks": bookmarks}}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Begin with the bookmarks of a checkpoint; without any, or with those of other streams, at the start."""
        streams = saved.get("streams")
        if streams is None:
            return
        if streams["num_streams"] != self._num_streams:
            if self._world.is_rank_zero:
                log.warning(
                    "the checkpoint has the states of %s, and the data have %s now: they are read from their start, "
                    "and the run is not exact",
                    counted(streams["num_streams"], "stream"),
                    counted(self._num_streams, "stream"),
                )
            return
        # copies: the tensors of a loaded checkpoint are mapped from its files, which retention removes
        self.bookmarks = Bookmarks(Bookmark(**map_tensors(torch.clone, entry)) for entry in streams["bookmarks"])


def build_stream_state(dataset: Any, world: World) -> StreamState:
    """Build the state of the streams of a dataset, and log warnings about them; not collective.

    Args:
        dataset: the training data, with or without streams.
        world: the ranks.

    Raises:
        TaskError: a stream can be read only once, or is one rank's part.
    """
    streams = streams_of(dataset)
    for stream in streams:
        check_stream(stream)  # first: there is no point in warning about a stream that is refused
    if world.is_rank_zero:
        for remark in dict.fromkeys(map(remark_on, streams)):
            if remark is not None:
                log.warning(remark)
    return StreamState(streams, world)


def _plain(marks: Iterable[Bookmark]) -> list[dict[str, Any]]:
    """Copy the bookmarks into values that a checkpoint can store."""
    host = HostCopy()
    try:
        entries = [host.of(mark._asdict(), name=f"state_dict() of stream {mark.stream}: bookmark") for mark in marks]
    except CheckpointError as error:
        raise TaskError(str(error)) from None
    host.finish()
    return entries
