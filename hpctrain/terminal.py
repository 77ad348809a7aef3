"""Escape terminal control characters in text that comes from a run."""

from __future__ import annotations

import codecs
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TextIO

_BIDI = "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
"""What changes the direction of text, breaks lines, or is invisible (Unicode TR 36); joiners of scripts stay."""
_HIDDEN = rf"\x7f-\x9f{_BIDI}\ud800-\udfff\U000e0000-\U000e007f"
CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f{_HIDDEN}]")
"""All but line breaks and tabs. A surrogate stands for a byte that isn't UTF-8."""
IN_LOGS = re.compile(rf"(?P<kept>\x1b\[[0-9;:]{{0,32}}m|\x1b\[[0-2]?K|\r|\x08)|[\x00-\x07\x0b-\x1f{_HIDDEN}]")
"""As `CONTROL`; kept are colours, erasing a line, carriage returns and backspaces, by which progress bars are drawn."""
COLOUR = re.compile(r"\x1b\[([0-9;:]*)m")
RESET = "\x1b[0m"
UNFINISHED = re.compile(r"\x1b(\[[0-9;:]{0,32})?\Z")


def visible(text: str) -> str:
    r"""Escape the characters that could control a terminal, as in ``\x1b[2J``."""
    return CONTROL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match.groupdict().get("kept") or match[0].encode("unicode_escape").decode()


def encodable(text: str, stream: TextIO) -> str:
    r"""Escape the characters that the stream's encoding lacks, as in ``\xe4``."""
    encoding = getattr(stream, "encoding", None)
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding) if encoding else text
    except LookupError:
        return text


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal; not if it is closed, or an object that can't tell."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def can_redraw(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can replace a line; with TERM=dumb, as in an editor, it can't."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


class GuardedStream:
    """A text stream to which only `visible` text is written; otherwise like the stream that it wraps.

    Args:
        stream: such as the process's own standard output.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text with its control characters escaped."""
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each text with its control characters escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class LogOutput:
    """A binary stream for a log: progress bars and colours pass, other control sequences are escaped.

    Args:
        stream: of a terminal.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._incomplete = ""
        self._is_coloured = False

    def write(self, data: bytes) -> int:
        """Write a part of the log, which may end within a character or a control sequence."""
        text = self._incomplete + self._decoder.decode(data)
        end = match.start() if (match := UNFINISHED.search(text)) else len(text)
        self._incomplete = text[end:]
        # before they are written: Ctrl-C may interrupt the write
        colours = COLOUR.findall(text[:end])
        self._is_coloured |= any(colour.strip("0;:") for colour in colours)
        self._stream.write(IN_LOGS.sub(_escape, text[:end]).encode())
        if colours:
            self._is_coloured = bool(colours[-1].strip("0;:"))
        return len(data)

    def reset(self) -> None:
        """Reset the terminal's colours if the log ended, or was interrupted, before it did."""
        if self._is_coloured:
            self._stream.write(RESET.encode())
            self._stream.flush()
            self._is_coloured = False

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


class VisibleFormatter(logging.Formatter):
    """A formatter whose records are `visible` and `encodable`.

    Args:
        text: the format of a record.
        date_time: the format of its time.
        prefix: put before each record as it is, such as a sequence that clears the line.
        stream: to which the records are written, if its encoding may lack some characters.
    """

    def __init__(
        self, text: str, date_time: str | None = None, *, prefix: str = "", stream: TextIO | None = None
    ) -> None:
        super().__init__(text, date_time)
        self._stream = stream
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        text = visible(super().format(record))
        return self._prefix + (text if self._stream is None else encodable(text, self._stream))


def guard_output() -> None:
    """Escape control characters in everything that this process prints from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


def unguarded(stream: TextIO) -> TextIO:
    """The stream itself, for text whose control characters are hpctrain's own."""
    return stream.stream if isinstance(stream, GuardedStream) else stream


@contextmanager
def output_unguarded() -> Iterator[None]:
    """Print unescaped inside the context, where the process trains and its output is the user's own."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(unguarded, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def log_output(stream: TextIO) -> BinaryIO | LogOutput:
    """Return where to copy a log: escaped for a terminal, unchanged for a file or a pipe."""
    return LogOutput(stream.buffer) if stream.isatty() else stream.buffer
