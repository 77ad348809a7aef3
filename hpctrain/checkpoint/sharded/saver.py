"""Save by all ranks of a mesh: each copies what it writes, and writes it in the background while training continues."""

from __future__ import annotations

import logging
from typing import Any

from hpctrain.checkpoint.saver import CheckpointSaver

log = logging.getLogger("hpctrain.checkpoint")


class ShardedSaver(CheckpointSaver):
    """Saves on every rank; `save` is collective, and must not be called where rank zero can't save.

    The errors of all ranks are raised on rank zero, as those of a whole checkpoint are. On the other ranks nothing is
    raised, so that all ranks reach the next exchange.

    Args:
        arguments: of a `CheckpointSaver`, by position.
        leads: whether this is rank zero.
        options: of a `CheckpointSaver`, with a `ShardedWriter` as `writer`.
    """

    def __init__(self, *arguments: Any, leads: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._leads = leads

    def _snapshot(self, state: Any) -> Any:
        try:
            return super()._snapshot(state)
        except Exception as error:
            # every rank must take part in the exchange, in which rank zero learns of the error
            return error

    def _write(self, snapshot: Any, retain: bool) -> None:
        if self._leads:
            super()._write(snapshot, retain)
            return
        try:
            self._writer.write(snapshot)
        except Exception as error:
            log.debug("rank zero reports why the save failed: %s", error)
        finally:
            self._longest_s = max(self._longest_s, self._clock() - self._began_at)
