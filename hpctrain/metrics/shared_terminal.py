"""Standard output and error while a bar is drawn on the same terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from hpctrain.terminal import is_terminal


class SharedStream:
    """A text stream that announces what is written to it; otherwise like the stream that it wraps.

    Args:
        stream: such as standard output.
        announce: called with each text before it is written.
    """

    def __init__(self, stream: TextIO, announce: Callable[[str], object]) -> None:
        self._stream = stream
        self._announce = announce

    def write(self, text: str) -> int:
        """Announce the text, and write it."""
        self._announce(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Announce and write each text."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def output_announced(announce: Callable[[str], object]) -> Iterator[None]:
    """Inside the context, announce what is printed, as far as standard output and error are terminals."""
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    shared = {name: SharedStream(stream, announce) for name, stream in streams.items() if is_terminal(stream)}
    for name, stream in shared.items():
        setattr(sys, name, cast(TextIO, stream))
    try:
        yield
    finally:
        for name, stream in shared.items():
            if getattr(sys, name) is stream:  # a stream that a task has put there since then is the task's
                setattr(sys, name, streams[name])


def terminal_handlers() -> list[logging.Handler]:
    """The handlers of all loggers that write to a terminal; they keep the stream that they were made with."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [one for one in handlers if isinstance(one, logging.StreamHandler) and is_terminal(one.stream)]
