"""What a program wrote into the copy of its code, before and after its code was changed."""

from __future__ import annotations

import os
import shutil

import pytest

from hpctrain.run.code import CodeSnapshot, describe_file, list_of, write_files
from hpctrain.run.written_files import carry_over, written_files


@pytest.fixture
def copies(directory, tmp_path):
    """Makes copies of code, each of its own files; all have links to ignored folders."""
    root = tmp_path / "project"
    (root / "data").mkdir(parents=True)
    (root / "big" / "raw").mkdir(parents=True)

    def make(digest, *paths, place="."):
        folder = directory.code / digest
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(digest)
        write_files(list_of(folder), [describe_file(folder / path, path) for path in paths])
        (folder / "data").symlink_to(root / "data")
        (folder / "big").mkdir()
        (folder / "big" / "raw").symlink_to(root / "big" / "raw")
        (folder / place).mkdir(exist_ok=True)
        return CodeSnapshot(run=directory, digest=digest, folder=folder, root=root, place=place)

    return make


def write(code, *paths):
    for path in paths:
        (code.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (code.folder / path).write_text(f"written into {code.digest}")


def test_what_is_not_in_the_list_was_written(copies):
    code = copies("d1", "t.py", "src/pkg/a.py", place="jobs")
    assert written_files(code) == []
    write(code, "out/1/w.pt", "src/pkg/a.log", "src/pkg/__pycache__/a.pyc", "src/b.pyc", "log.txt", "big/new")
    (code.folder / "last").symlink_to("out/1/w.pt")
    assert written_files(code) == ["big", "last", "log.txt", "out", "src/pkg/a.log"]


def test_a_later_copy_has_links_to_it(copies, directory, tmp_path):
    old, new = copies("d1", "t.py", "src/a.py", "gone/b.py"), copies("d2", "t.py", "src/a.py")
    write(old, "out/w.pt", "src/state", "gone/log", "big/new")
    (old.folder / "last").symlink_to("out/w.pt")
    for _ in range(2):
        assert carry_over(old, new) == []
    for path in ("out/w.pt", "src/state", "gone/log", "big/new", "last"):
        assert (new.folder / path).read_text() == "written into d1"
    assert os.fspath((new.folder / "out").readlink()) == "../d1/out"
    assert (new.folder / "t.py").read_text() == "d2"
    write(new, "out/x.pt")
    assert (old.folder / "out" / "x.pt").is_file()
    moved = directory.path.rename(tmp_path / "moved")
    assert (moved / "code" / "d2" / "out" / "x.pt").read_text() == "written into d2"


def test_many_changes_make_no_chain_of_links(copies):
    first = before = copies("d0", "t.py")
    write(first, "out/w.pt")
    for number in range(1, 4):
        now = copies(f"d{number}", "t.py")
        assert carry_over(before, now) == []
        assert os.fspath((now.folder / "out").readlink()) == "../d0/out"
        before = now
    # the first code again, whose output was removed meanwhile
    shutil.rmtree(first.folder / "out")
    assert carry_over(before, first) == []
    assert not os.path.lexists(first.folder / "out")


def test_names_of_the_new_code_win_and_are_reported(copies):
    old = copies("d1", "t.py")
    write(old, "out/w.pt", "out/new.pt", "notes.txt", "results/a", "lib/log")
    new = copies("d2", "t.py", "out/w.pt", "notes.txt", "lib")
    (new.root / "results").mkdir()
    (new.folder / "results").symlink_to(new.root / "results")
    assert carry_over(old, new) == ["lib", "notes.txt", "out/w.pt", "results"]
    assert (new.folder / "out" / "new.pt").read_text() == "written into d1"
    assert (new.folder / "out" / "w.pt").read_text() == "d2"
