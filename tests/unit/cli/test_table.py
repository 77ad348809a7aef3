from __future__ import annotations

from hpctrain.cli.table import aligned


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_text():
    rows = [("", "STEPS", "NOTE"), ("a long name", "9", ""), ("b", "10", "ends early")]
    assert aligned(rows, right=[1]) == [
        "             STEPS  NOTE",
        "a long name      9",
        "b               10  ends early",
    ]
