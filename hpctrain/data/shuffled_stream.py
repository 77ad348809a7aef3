"""A stream in a random order that a resume can continue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from hpctrain.data.bookmark import fresh_copy
from hpctrain.data.keyed_random import keyed_bits
from hpctrain.data.stream import has_bookmarks
from hpctrain.errors import TaskError

_SALT = 0x77696E646F77  # "window": keeps these bits apart from others drawn from the same seed


class ShuffledStream(IterableDataset[Any]):
    """A stream whose samples are shuffled in windows: the first `window` samples in a random order, then the next.

    The order depends on (seed, epoch) alone. The state is that of the stream at the beginning of a window, and a place
    in the window; a resume reads that window again. A shuffle buffer, such as that of Hugging Face's streams, mixes
    samples over longer distances, but its state would be all of its samples.

    Args:
        stream: with `state_dict` and `load_state_dict` (`StatefulStream`). If it has `set_epoch`, that is called.
        window: samples that are in memory at a time.
        seed: of the order.

    Raises:
        TaskError: the window is empty, or the stream has no state that can be continued exactly.

    Example:
        A stream of Hugging Face, whose files are shuffled too (a buffer of one sample shuffles nothing else)::

            ShuffledStream(dataset.shuffle(seed=1, buffer_size=1), window=10_000, seed=1)
    """

    def __init__(self, stream: Any, window: int, seed: int) -> None:
        if window < 1:
            raise TaskError(f"ShuffledStream needs a window of at least 1 sample, got {window}")
        if not has_bookmarks(stream):
            raise TaskError(
                f"ShuffledStream needs a stream with state_dict and load_state_dict, but {type(stream).__name__} has "
                "none, or it has a shuffle buffer, which its state leaves out: remove the buffer"
            )
        self._stream = stream
        self._window = window
        self._seed = seed
        self._epoch = 0
        self._state: Mapping[str, Any] = {"window": 0, "place": 0, "stream": None}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._epoch = epoch

    def state_dict(self) -> Mapping[str, Any]:
        """See `StatefulStream`."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StatefulStream`."""
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        window, done, state = (self._state[name] for name in ("window", "place", "stream"))
        stream = fresh_copy(self._stream)
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self._epoch)
        if state is not None:
            # copies, here and below: the stream may change its own in place
            stream.load_state_dict(deepcopy(state))
        samples = iter(stream)
        while taken := list(islice(samples, self._window)):
            bits = keyed_bits(self._seed, _SALT, self._epoch, window, np.arange(len(taken)))
            for place, number in enumerate(np.argsort(bits, kind="stable").tolist()):
                if place >= done:
                    self._state = {"window": window, "place": place + 1, "stream": state}
                    yield taken[number]
            window, done, state = window + 1, 0, deepcopy(stream.state_dict())
