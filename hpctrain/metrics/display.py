"""A stream on which progress is shown, for as long as it can be written."""

from __future__ import annotations

import logging
from typing import TextIO

logger = logging.getLogger(__name__)


class Display:
    """Writes to a stream until that fails (a closed pipe, a full disk): the display ends then, training continues.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    def put(self, text: str) -> None:
        """Write a text at once."""
        if self._gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._gone = True
            logger.warning("can't show progress any longer (%s); training continues", error.strerror)
