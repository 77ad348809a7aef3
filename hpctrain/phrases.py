"""Phrases that messages share: names cut short, counted nouns, large numbers, durations, dates and tables."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

DATE_TIME = "%Y-%m-%d %H:%M:%S"
"""Format of local times, as in `strftime`."""
SHOWN = 8
"""Number of names that a message lists; it only counts the others."""


def spreadsheet_text(text: str) -> str:
    """Return the text of a CSV cell; what a spreadsheet would take for a formula, and isn't a number, gets a quote."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def listed(names: Iterable[object], *, max_names: int = SHOWN, separator: str = ", ") -> str:
    """The first few names, and the number of the others: ``a, b and 3 more``."""
    texts = [str(name) for name in names]
    ending = f" and {len(texts) - max_names} more" if len(texts) > max_names else ""
    return separator.join(texts[:max_names]) + ending


def all_of(names: Sequence[str]) -> str:
    """All names: ``a``, ``a and b``, ``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def either(choices: Sequence[str]) -> str:
    """A choice: ``a``, ``a, or b``, ``a, b, or c``."""
    *first, last = choices
    return f"{', '.join(first)}, or {last}" if first else last


def counted(count: int, noun: str) -> str:
    """A number and its noun: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def numbered(noun: str, numbers: Iterable[int | str]) -> str:
    """A noun and its numbers: ``rank 3``, ``ranks 3, 5 and 2 more``."""
    values = list(numbers)
    return f"{noun if len(values) == 1 else f'{noun}s'} {listed(values)}"


def signal_name(number: int) -> str:
    """The name of a signal: ``SIGTERM``, ``signal 40``."""
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def duration(seconds: float) -> str:
    """A length of time in its largest unit: ``12 s``, ``5 min``, ``3 h``, ``2 days``."""
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def brief_time(seconds: float) -> str:
    """A time below a minute in the unit that suits it: ``236 us``, ``12.7 ms``, ``1.2 s``."""
    for limit, size, unit in ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def scaled(number: float, unit: str) -> str:
    """A large number with a prefix to its unit: ``16.8 MB``, ``1.31 TFLOP``."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def on_one_line(text: str) -> str:
    r"""A text with `\n` for each line break."""
    return text.replace("\n", "\\n")


def page(name: str) -> str:
    """The path of a page of the documentation: that of the file, where the package lies in a clone of hpctrain."""
    path = Path(__file__).resolve().parents[1] / "docs" / name
    return str(path) if path.is_file() else f"docs/{name} of hpctrain"


def with_paths(text: str) -> str:
    """A text whose pages, named as in ``docs/how_to/sweep.md``, are replaced by their paths."""
    return re.sub(r"\bdocs/(\S+\.md)", lambda match: page(match[1]), text)


def local_time(when: float) -> str:
    """Epoch seconds as local date and time."""
    return time.strftime(DATE_TIME, time.localtime(when))


def byte_size(count: int) -> str:
    """A number of bytes in a unit that suits it, such as `1.5 MiB`."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Format rows with aligned columns, two spaces apart; a line break within a cell becomes a space.

    Args:
        rows: of equal length.
        right: the columns that are aligned to the right, counted from 0.
    """
    rows = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
