"""The widths of the table's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.top.columns import COLUMNS, REASON, RUN, VARIED, Column

WIDE = 120
"""Characters from which columns are further apart."""
_LEAST = {RUN: 16, VARIED: 16, REASON: 20}
_MOST = {RUN: 40, VARIED: 60}


def gap(total: int) -> int:
    """The spaces between columns."""
    return 2 if total >= WIDE else 1


def widths(total: int, needed: Mapping[str, int]) -> dict[str, int]:
    """Choose the columns that fit, and divide the space between them.

    Args:
        total: characters of a line.
        needed: by column's title, the longest text of a column without a width of its own; 0 leaves it out.

    Returns:
        Widths by the column's title, from left to right.
    """
    chosen = [column for column in COLUMNS if column.width or needed.get(column.title, 0)]
    while len(chosen) > 1 and _least(chosen, needed) + gap(total) * (len(chosen) - 1) > total:
        chosen.remove(max(chosen, key=lambda column: column.rank))
    found = {column.title: _smallest(column, needed) for column in chosen}
    left = total - sum(found.values()) - gap(total) * (len(chosen) - 1)
    for column in chosen:
        if column.width or left <= 0:
            continue
        most = min(needed[column.title], _MOST.get(column, total))
        more = min(left, max(0, most - found[column.title]))
        found[column.title] += more
        left -= more
    return found


def _least(columns: Sequence[Column], needed: Mapping[str, int]) -> int:
    return sum(_smallest(column, needed) for column in columns)


def _smallest(column: Column, needed: Mapping[str, int]) -> int:
    return column.width or max(len(column.title), min(_LEAST[column], needed[column.title]))
