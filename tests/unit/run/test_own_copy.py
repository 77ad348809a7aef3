"""A run's own copy of the code, in which a program of a sweep runs."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import replace

import pytest

from hpctrain.run.code import (
    CodeSnapshot,
    code_for_attempt,
    current_code,
    describe_file,
    digest_of,
    list_of,
    record_code,
    write_files,
)
from hpctrain.run.directory import RunDirectory
from hpctrain.run.written_files import written_files, written_originals


@pytest.fixture
def home(directory, tmp_path):
    """A sweep's copy: a program, a package, a link, ignored data, and a folder into which the program writes."""
    root = tmp_path / "project"
    for name in ("data", "outputs"):
        (root / name).mkdir(parents=True)
        (root / name / "old").write_text("original")
    folder = directory.code / "being made"
    (folder / "pkg").mkdir(parents=True)
    (folder / "empty" / "deep").mkdir(parents=True)
    (folder / "pkg" / "net.py").write_text("width = 8\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o550)
    (folder / "link").symlink_to("pkg/net.py")
    for name in ("data", "outputs"):  # as runs that share the original have it
        (folder / name).symlink_to(root / name)
    files = [describe_file(folder / name, name) for name in ("pkg/net.py", "run.sh", "link")]
    folder = folder.rename(directory.code / digest_of(files))
    write_files(list_of(folder), files)
    return CodeSnapshot(run=directory, digest=folder.name, folder=folder, root=root, place=".", own_paths=("outputs",))


def begin(home, number, **fields):
    run = RunDirectory.at(home.run.path / str(number))
    run.create(0o750)
    record_code(run, replace(home, run=run, **fields), 1.0, files=3, bytes=32)
    return run


def test_a_run_reads_the_copy_and_the_data_and_writes_for_itself(home):
    runs = [begin(home, number) for number in range(2)]
    codes = [code_for_attempt(run).copy for run in runs]
    for run, code in zip(runs, codes, strict=True):
        assert code.folder == run.code / home.digest
        assert (code, code.find_damage()) == (current_code(run), "")
        assert os.fspath((code.folder / "link").readlink()) == "pkg/net.py"
        assert (code.folder / "data").samefile(home.root / "data")
        assert list((code.folder / "outputs").iterdir()) == []
        assert (code.folder / "empty" / "deep").is_dir()
        assert stat.S_IMODE((code.folder / "outputs").stat().st_mode) == 0o750
    for path in ("outputs/last", "pkg/beside", "new"):
        (codes[0].folder / path).write_text("mine")
        assert not (codes[1].folder / path).exists()
        assert not (home.folder / path).exists()
    assert written_files(codes[0]) == ["new", "outputs", "pkg/beside"]
    assert code_for_attempt(runs[0]).copy == codes[0]  # after a requeue
    assert (codes[0].folder / "new").read_text() == "mine"
    assert [path.name for path in runs[0].code.glob(".*")] == []


@pytest.mark.parametrize("is_root", [True, False])
def test_files_are_links_except_for_root_who_may_write_to_them(home, monkeypatch, is_root):
    monkeypatch.setattr(os, "access", lambda *_: is_root)
    code = code_for_attempt(begin(home, 0)).copy
    assert code.find_damage() == ""
    assert (code.folder / "run.sh").samefile(home.folder / "run.sh") is not is_root


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_files_that_cannot_have_another_link_are_copied(home, monkeypatch, number):
    def refuse(source, target, **_):
        raise OSError(number, os.strerror(number), source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    code = code_for_attempt(begin(home, 0)).copy
    assert code.find_damage() == ""
    assert not (code.folder / "run.sh").samefile(home.folder / "run.sh")


def test_a_damaged_copy_is_not_copied(home):
    run = begin(home, 0)
    (home.folder / "run.sh").unlink()
    assert f"{home.folder}/run.sh was removed" in code_for_attempt(run).damage
    assert not run.code.exists()


def test_a_run_that_is_moved_out_of_its_sweep_takes_its_copy_along(home, tmp_path):
    run = begin(home, 0)
    code_for_attempt(run)
    moved = RunDirectory.at(tmp_path / "moved")
    run.path.rename(moved.path)
    shutil.rmtree(home.run.path)
    code = code_for_attempt(moved)
    assert (code.damage, code.copy.folder) == ("", moved.code / home.digest)


def test_what_is_written_through_a_link_is_named(home):
    code = code_for_attempt(begin(home, 0)).copy
    began = (home.root / "data").stat().st_mtime
    os.utime(home.root / "data" / "old", (began, began))
    assert written_originals(code, began) == []
    os.utime(home.root / "data" / "old", (began + 1, began + 1))
    assert written_originals(code, began) == ["data"]
