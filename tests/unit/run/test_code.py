"""Records of a run's code, and the comparison with its list of files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import replace

import pytest

from hpctrain import files as files_module
from hpctrain.errors import RunDirectoryError
from hpctrain.run.code import (
    EXECUTABLE,
    FILE,
    LINK,
    CodeSnapshot,
    code_for_attempt,
    current_code,
    describe_file,
    digest_of,
    list_of,
    make_own_copy,
    read_files,
    record_code,
    write_files,
    written_files,
)
from hpctrain.run.directory import RunDirectory
from hpctrain.run.written_files import written_originals


@pytest.fixture
def code(directory, tmp_path):
    """A recorded copy with a file in a folder, a program and a link."""
    folder = directory.code / "being made"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "net.py").write_text("width = 8\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o550)
    (folder / "link").symlink_to("pkg/net.py")
    found = [describe_file(folder / name, name) for name in ("pkg/net.py", "run.sh", "link")]
    folder = folder.rename(directory.code / digest_of(found))
    write_files(list_of(folder), found)
    made = CodeSnapshot(run=directory, digest=folder.name, folder=folder, root=tmp_path / "project", place="pkg")
    record_code(directory, made, 12.0)
    return made


def test_the_last_record_counts(code, directory):
    assert current_code(directory) == code
    assert code.working_directory == directory.code / code.digest / "pkg"
    assert str(code.submit_dir).endswith("project/pkg")
    record_code(directory, None, 13.0)
    assert current_code(directory) is None


def test_a_run_without_records_has_no_copy(directory):
    assert current_code(directory) is None


def test_a_moved_run_keeps_its_code(code, directory, tmp_path):
    moved = RunDirectory.at(tmp_path / "moved")
    directory.path.rename(moved.path)
    found = current_code(moved)
    assert found.folder == moved.code / code.digest
    assert found.find_damage() == ""


def test_the_runs_of_a_sweep_share_a_copy(code, directory, tmp_path):
    run = RunDirectory.at(directory.path / "7")
    run.create(0o750)
    record_code(run, code, 12.0)
    assert f'"folder": "../code/{code.digest}"' in run.code_records.read_text()
    assert current_code(run).folder == directory.code / code.digest
    assert current_code(run).find_damage() == ""
    moved = RunDirectory.at(tmp_path / "moved")
    run.path.rename(moved.path)
    damage = current_code(moved).find_damage()
    assert damage.startswith(
        f"{tmp_path}/code/{code.digest}, the code of this run, is missing: if the run was moved out of its"
    )
    assert f"copy the sweep's folder code into {moved.path}, or take today's code with `python -m hpctrain" in damage
    assert damage.endswith(f"resume {moved.path} --code=now`")
    shutil.copytree(directory.code, moved.code, symlinks=True)
    assert current_code(moved).find_damage() == ""


def test_the_digest_depends_on_names_contents_and_modes_alone(code):
    found = list(read_files(code.list))
    assert [file.mode for file in found] == [FILE, EXECUTABLE, LINK]
    assert digest_of(found) == digest_of(found[::-1])
    changes = [{"path": "b"}, {"checksum": "0"}, {"mode": EXECUTABLE}]
    changed = [
        [type(found[0])(**{**{name: getattr(found[0], name) for name in found[0].__slots__}, **change})]
        for change in changes
    ]
    assert len({digest_of([*one, *found[1:]]) for one in [*changed, found[:1]]}) == 4


def change(path, text):
    path.chmod(0o600)
    path.write_text(text)


DAMAGE = {
    "pkg/net.py was changed": lambda folder: change(folder / "pkg" / "net.py", "width = 9\n"),
    "pkg/net.py was removed": lambda folder: shutil.rmtree(folder / "pkg"),
    "run.sh was changed": lambda folder: (folder / "run.sh").chmod(0o440),
    "link was changed": lambda folder: [(folder / "link").unlink(), (folder / "link").symlink_to("run.sh")],
    "link was removed": lambda folder: (folder / "link").unlink(),
}


@pytest.mark.parametrize("slow", [False, True], ids=["a local disk", "a slow file system"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_with_the_file_and_what_to_do(code, damage, slow, monkeypatch):
    if slow:
        monkeypatch.setattr(files_module, "PROBED", 1)
        monkeypatch.setattr(files_module, "SLOW_S", 0.0)
    DAMAGE[damage](code.folder)
    remedy = f"restore it, or take today's code with `python -m hpctrain resume {code.run.path} --code=now`"
    assert code.find_damage() == f"{code.folder}/{damage} since the code was taken: {remedy}"


def test_all_files_that_a_purge_removed_are_counted(code):
    (code.folder / "run.sh").chmod(0o440)
    shutil.rmtree(code.folder / "pkg")
    assert code.find_damage().startswith(f"{code.folder}/pkg/net.py was removed since")
    (code.folder / "link").unlink()
    line = (
        f"{code.folder}: 2 of 3 files were removed since the code was taken (pkg/net.py, link): restore them, or take "
    )
    assert code.find_damage().startswith(line)


def test_what_a_program_writes_into_the_copy_is_no_damage(code):
    (code.folder / "outputs").mkdir()
    (code.folder / "pkg" / "net.pyc").write_text("x")
    os.utime(code.folder / "run.sh", (1, 1))
    assert code.find_damage() == ""


@pytest.mark.parametrize("text", [None, "{", "{}", '{"files": [7]}', '{"files": [{"path": "a"}]}'])
def test_a_list_that_is_damaged_itself(code, text):
    code.list.unlink() if text is None else change(code.list, text)
    assert f"{code.list}, the list of the run's code, can't be read" in code.find_damage()


def test_a_list_that_was_changed_with_its_file(code):
    change(code.folder / "pkg" / "net.py", "width = 9\n")
    names = ("pkg/net.py", "run.sh", "link")
    write_files(code.list, [describe_file(code.folder / name, name) for name in names])
    line = f"{code.list}, the list of the run's code, was changed since the code was taken: restore it, or take today's"
    assert code.find_damage().startswith(line)


def test_a_copy_that_is_missing(code):
    shutil.rmtree(code.folder)
    assert "the code of this run, is missing: restore it, or take today's code" in code.find_damage()


def test_a_record_with_a_field_that_cannot_be(directory):
    directory.code_records.write_text(
        '{"digest": "d1", "folder": 7, "root": "/", "working_directory": ".", "time": 1}\n'
    )
    with pytest.raises(RunDirectoryError, match=r"code\.jsonl: expected folder to be a path, found 7"):
        current_code(directory)


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
    record_code(run, replace(home, run=run, **fields), 1.0)
    return run


def test_a_run_reads_the_copy_and_the_data_and_writes_for_itself(home):
    runs = [begin(home, number) for number in range(2)]
    codes = [code_for_attempt(run)[0] for run in runs]
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
    assert code_for_attempt(runs[0])[0] == codes[0]  # after a requeue
    assert (codes[0].folder / "new").read_text() == "mine"
    assert [path.name for path in runs[0].code.glob(".*")] == []


def test_what_other_runs_wrote_into_the_copy_stays_there(home):
    shared = begin(home, 0, own_paths=None)
    assert code_for_attempt(shared)[0].folder == home.folder
    (home.folder / "outputs").unlink()
    for path in ("outputs/last", "log", "pkg/state", "new/state"):
        (home.folder / path).parent.mkdir(exist_ok=True)
        (home.folder / path).write_text("shared")
    folder = code_for_attempt(begin(home, 1))[0].folder
    assert [path.name for path in (folder / "outputs").iterdir()] == []
    assert not any((folder / path).exists() for path in ("log", "pkg/state", "new"))


def test_a_folder_that_a_program_replaced_by_a_link_or_a_file_is_repaired_inside_of_the_run(home, tmp_path):
    run = begin(home, 0)
    code = code_for_attempt(run)[0]
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / "net.py").write_text("changed\n")
    for replace_it in (lambda: (code.folder / "pkg").symlink_to(storage), (code.folder / "pkg").touch):
        shutil.rmtree(code.folder / "pkg")
        replace_it()
        warnings = []
        make_own_copy(replace(home, run=run), warnings.append)
        assert "was changed since it was taken (pkg/net.py): today's files take their place" in warnings[0]
        assert (code.find_damage(), (code.folder / "pkg").is_symlink()) == ("", False)
    assert {path.name: path.read_text() for path in storage.iterdir()} == {"net.py": "changed\n"}
    assert len(list(code.folder.glob("pkg.damaged-*"))) == 2


@pytest.mark.parametrize("is_root", [True, False])
def test_files_are_links_except_for_root_who_may_write_to_them(home, monkeypatch, is_root):
    monkeypatch.setattr(os, "access", lambda *_: is_root)
    code = code_for_attempt(begin(home, 0))[0]
    assert code.find_damage() == ""
    assert (code.folder / "run.sh").samefile(home.folder / "run.sh") is not is_root


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_files_that_cannot_have_another_link_are_copied(home, monkeypatch, number):
    def refuse(source, target, **_):
        raise OSError(number, os.strerror(number), source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    code = code_for_attempt(begin(home, 0))[0]
    assert code.find_damage() == ""
    assert not (code.folder / "run.sh").samefile(home.folder / "run.sh")


def test_a_damaged_copy_is_not_copied(home):
    run = begin(home, 0)
    (home.folder / "run.sh").unlink()
    assert f"{home.folder}/run.sh was removed" in code_for_attempt(run)[1]
    assert not run.code.exists()


def test_a_run_that_is_moved_out_of_its_sweep_takes_its_copy_along(home, tmp_path):
    run = begin(home, 0)
    code_for_attempt(run)
    moved = RunDirectory.at(tmp_path / "moved")
    run.path.rename(moved.path)
    shutil.rmtree(home.run.path)
    code, damage = code_for_attempt(moved)
    assert (damage, code.folder) == ("", moved.code / home.digest)


def test_what_is_written_through_a_link_is_named(home):
    code = code_for_attempt(begin(home, 0))[0]
    began = (home.root / "data").stat().st_mtime
    os.utime(home.root / "data" / "old", (began, began))
    assert written_originals(code, began) == []
    os.utime(home.root / "data" / "old", (began + 1, began + 1))
    assert written_originals(code, began) == ["data"]
