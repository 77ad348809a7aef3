"""A stream on which progress is shown, for as long as it can be written."""

from __future__ import annotations

import logging
from typing import TextIO

from hpctrain.errors import error_text
from hpctrain.terminal import encodable

logger = logging.getLogger(__name__)


class Display:
    """Writes to a stream until that fails (a closed pipe, a full disk): the display ends then, training continues.

    Args:
        stream: where to write; characters that its encoding lacks are escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed = False

    def put(self, text: str) -> None:
        """Write a text at once."""
        if self._failed:
            return
        try:
            self._stream.write(encodable(text, self._stream))
            self._stream.flush()
        except Exception as error:  # standard output may be an object of the user's program, and raise anything
            self._failed = True
            logger.warning("can no longer show progress (%s); training continues", error_text(error))
