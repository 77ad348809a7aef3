"""Where Python looks for the code of a run."""

from __future__ import annotations

import os
import sys

import pytest

from hpctrain.config.source import find_module
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.import_path import (
    checked_in,
    hooked_packages,
    imported_from,
    python_path,
    search_path,
)


@pytest.fixture
def code(directory, tmp_path, monkeypatch):
    """A project with src/mypkg and a virtual environment, its copy, and its folder `jobs` as the working directory."""
    root, folder = tmp_path / "project", directory.code / "d1"
    for place in (root, folder):
        (place / "src" / "mypkg").mkdir(parents=True)
        (place / "src" / "mypkg" / "__init__.py").write_text(f"PLACE = {place.name!r}\n")
        (place / "jobs").mkdir()
        (place / "jobs" / "my_task_of_a_test.py").write_text(
            f"PLACE = {place.name!r}\nclass {place.name.title()}: ...\n"
        )
    (root / "env" / "lib").mkdir(parents=True)
    (folder / "env").symlink_to(root / "env")
    (root / "later").mkdir()
    monkeypatch.chdir(root / "jobs")
    yield CodeSnapshot(run=directory, digest="d1", folder=folder, root=root, place="jobs")
    for name in ("my_task_of_a_test", "mypkg"):
        sys.modules.pop(name, None)


def test_what_the_copy_contains_takes_the_place_of_the_original(code):
    root, folder = code.root, code.folder
    places = [
        "",
        f"{root}/jobs",
        f"{root}/src",
        "/usr/lib",
        f"{root}/env/lib",
        f"{root}/later",
        f"{root}/../project",
        "gone",
    ]
    wanted = [f"{folder}/jobs", f"{folder}/src", "/usr/lib", f"{root}/env/lib", f"{root}/later", str(folder), "gone"]
    assert search_path(code, places, {}) == wanted


def test_with_a_safe_path_the_working_directory_is_not_added(code):
    places = [f"{code.root}/src", "/usr/lib"]
    assert search_path(code, places, {"PYTHONSAFEPATH": "1"}) == [f"{code.folder}/src", "/usr/lib"]


def test_another_working_directory_gives_way_too(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert search_path(code, [str(tmp_path), "/usr/lib"], {}) == [f"{code.folder}/jobs", "/usr/lib"]


def test_a_link_to_the_original_is_the_original(code, tmp_path):
    (tmp_path / "link").symlink_to(code.root)
    assert search_path(code, [str(tmp_path / "link" / "src")], {})[1:] == [f"{code.folder}/src"]


def test_pythonpath_of_other_processes(code):
    given = os.pathsep.join([f"{code.root}/src", "/opt/tools"])
    assert python_path(code, {"PYTHONPATH": given}) == f"{code.folder}/jobs:{code.folder}/src:/opt/tools"
    assert python_path(code, {"PYTHONPATH": ":/opt", "PYTHONSAFEPATH": "1"}) == f"{code.folder}/jobs:/opt"


def test_this_process_imports_the_copy_and_then_another(code, directory):
    before, environ = list(sys.path), dict(os.environ)
    with imported_from(code):
        import my_task_of_a_test

        assert my_task_of_a_test.PLACE == "d1"
        assert os.environ["PYTHONPATH"].startswith(str(code.working_directory))
    assert (sys.path, dict(os.environ)) == (before, environ)
    with imported_from(code):
        assert sys.modules["my_task_of_a_test"] is my_task_of_a_test
    code.folder.rename(directory.code / "d2")
    (directory.code / "d2" / "jobs" / "my_task_of_a_test.py").write_text("PLACE = 'changed'\n")
    other = CodeSnapshot(run=directory, digest="d2", folder=directory.code / "d2", root=code.root, place="jobs")
    with imported_from(other):
        import my_task_of_a_test as again

        assert again.PLACE == "changed"
    with imported_from(None):
        assert "my_task_of_a_test" not in sys.modules


@pytest.mark.parametrize("is_imported", [False, True])
def test_classes_are_looked_up_in_the_copy(code, is_imported, monkeypatch):
    if is_imported:
        monkeypatch.syspath_prepend(str(code.root / "jobs"))
        import my_task_of_a_test

        assert my_task_of_a_test.PLACE == "project"
    source, _ = find_module("my_task_of_a_test")
    assert "Project" in source.names()
    with checked_in(code):
        source, _ = find_module("my_task_of_a_test")
        assert "D1" in source.names()
    source, _ = find_module("my_task_of_a_test")
    assert "Project" in source.names()


def test_packages_that_only_an_import_hook_finds(code, tmp_path, monkeypatch):
    packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    mapping = {"mypkg": f"{code.root}/src/mypkg", "other": "/opt/other"}
    (packages / "__editable___mypkg_1_0_finder.py").write_text(f"MAPPING: dict[str, str] = {mapping!r}\n")
    (packages / "__editable___older_1_0_finder.py").write_text("MAPPING = another form\n")
    assert hooked_packages(code, [tmp_path / "env", tmp_path / "gone"]) == ["mypkg"]
    monkeypatch.syspath_prepend(f"{code.root}/src")
    assert hooked_packages(code, [tmp_path / "env"]) == []
