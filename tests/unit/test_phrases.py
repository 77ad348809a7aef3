from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hpctrain
from hpctrain.phrases import aligned, all_of, counted, duration, listed, numbered, page, spreadsheet_text


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a, b"), ("abcde", "a, b and 3 more"), ([1, 2], "1, 2")]
)
def test_listed(names, text):
    assert listed(names, max_names=2) == text


@pytest.mark.parametrize(("names", "text"), [("a", "a"), ("ab", "a and b"), ("abc", "a, b and c")])
def test_all_of(names, text):
    assert all_of(names) == text


def test_a_page_is_named_by_its_path_so_that_it_can_be_opened_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Path(page("how_to/programs.md")).is_file()
    assert page("no.md") == "docs/no.md of hpctrain"


def test_messages_name_pages_by_their_path():
    package = Path(hpctrain.__file__).parent
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    trees = {path: ast.parse(text) for path, text in texts.items() if "docs/" in text and path.name != "phrases.py"}
    docstrings = {id(node.value) for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and "docs/" in str(node.value) and id(node) not in docstrings
    ]
    assert found == []


def test_listed_with_another_separator():
    assert listed(["n1", "n2", "n3"], max_names=2, separator=" ") == "n1 n2 and 1 more"


@pytest.mark.parametrize(("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_counted(count, text):
    assert counted(count, "rank") == text


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([3, 5], "ranks 3, 5"), (range(10), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more")]
)
def test_numbered(ranks, text):
    assert numbered("rank", ranks) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (200_000, "2 days")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+A1", "'+A1"),
        ("-x", "'-x"),
        ("\t=1", "'\t=1"),
        ("-1e-3", "-1e-3"),
        ("+1", "+1"),
        ("eval/loss", "eval/loss"),
        ("", ""),
    ],
)
def test_a_spreadsheet_takes_no_text_for_a_formula(text, shown):
    assert spreadsheet_text(text) == shown


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_text():
    rows = [("", "STEPS", "NOTE"), ("a long name", "9", ""), ("b", "10", "ends early")]
    assert aligned(rows, right=[1]) == [
        "             STEPS  NOTE",
        "a long name      9",
        "b               10  ends early",
    ]
