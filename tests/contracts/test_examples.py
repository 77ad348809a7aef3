"""Each example composes, its class exists with these arguments, and its page has its number of lines."""

from __future__ import annotations

import re

import pytest

from hpctrain.config.compose import Composer
from tests.support.gallery import CONF, EXAMPLES, NAMES, TINY, required, source


@pytest.fixture(scope="module")
def gallery_composer():
    return Composer(str(CONF))


@pytest.fixture
def files(tmp_path):
    for name in ("teacher.pt", "backbone.pt"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
    for name in ("pictures", "tokens"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_it_composes(name, gallery_composer, files, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    config = gallery_composer.compose([*required(name, files), *TINY.get(name, [])])
    assert config.name == name


def test_the_page_lists_them_with_their_numbers_of_lines():
    rows = re.findall(r"^\| \[(\w+)\]\((.+?)\) \|.*\| (\d+) \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    listed = {name: (EXAMPLES / path, int(lines)) for name, path, lines in rows}
    counted = {name: (source(name), len(source(name).read_text().splitlines())) for name in NAMES}
    assert listed == counted
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= set(NAMES)


def test_programs_have_at_most_60_lines_and_are_on_their_page():
    page = (EXAMPLES.parent / "how_to" / "programs.md").read_text()
    programs = sorted((EXAMPLES / "programs").glob("*.py"))
    assert programs
    for path in programs:
        assert len(path.read_text().splitlines()) <= 60, path
        assert f"(../examples/programs/{path.name})" in page
