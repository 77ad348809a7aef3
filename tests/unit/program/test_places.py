"""What a program's environment and command name, in the copy of its code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpctrain.program.rank import command_in_copy, program_path, python_path
from hpctrain.run.code import CodeSnapshot


@pytest.fixture
def code(directory, tmp_path, monkeypatch):
    """A project with a package at its root, bin, scripts and an environment, and the copy of it."""
    root, folder = tmp_path / "project", directory.code / "d1"
    for place in (root, folder):
        for path in ("flat/__init__.py", "scripts/t.py", "bin/tool", "lib/x.py"):
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(f"PLACE = {place.name!r}\n")
            (place / path).chmod(0o555 if place == folder else 0o755)
    (root / "env" / "bin").mkdir(parents=True)
    (root / "data.bin").write_text("")
    for path in ("env", "data.bin"):
        (folder / path).symlink_to(root / path)
    monkeypatch.chdir(tmp_path)  # another folder than that of the launch
    return CodeSnapshot(run=directory, digest="d1", folder=folder, root=root, place="scripts")


def test_entries_of_pythonpath(code):
    given = f"/opt/tools:../lib::../../other:{code.root}/env"
    wanted = [
        "/opt/tools",
        f"{code.folder}/lib",
        f"{code.folder}/scripts",
        f"{code.submit_dir}/../../other",
        f"{code.root}/env",
    ]
    assert python_path(code, "true", {"PYTHONPATH": given}, []).split(":") == wanted
    assert python_path(code, "true", {"PYTHONPATH": ""}, []) == ""


def test_an_editable_installation_of_the_root_in_hpctrain_s_own_python(code, monkeypatch):
    monkeypatch.chdir(code.root)
    assert python_path(code, "true", {}, [str(code.root), "/usr/lib"]) == str(code.folder)


@pytest.mark.parametrize("found_by", ["word", "relative", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", ".venv", "user"])
def test_editable_installations_of_another_python(code, tmp_path, found_by):
    prefix = {".venv": code.root / ".venv", "relative": code.root / "env"}.get(found_by, tmp_path / "other")
    packages = prefix / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "mine.pth").write_text(f"# a comment\nimport os\n\n{code.root}\n/opt/elsewhere\n")
    (prefix / "bin").mkdir(exist_ok=True)
    (prefix / "bin" / "python").symlink_to(sys.executable)
    word = {"word": str(prefix / "bin" / "python"), "relative": "../env/bin/python"}.get(found_by, "train")
    variables = {
        "PATH": {"PATH": f"{prefix}/bin"},
        "user": {"HOME": str(tmp_path), "PYTHONUSERBASE": str(prefix)},
        "VIRTUAL_ENV": {"VIRTUAL_ENV": str(prefix)},
        "CONDA_PREFIX": {"CONDA_PREFIX": str(prefix)},
    }.get(found_by, {})
    assert python_path(code, word, {"PATH": "/nowhere", **variables}, []) == str(code.folder)


def test_a_script_of_a_flat_project_imports_the_copy(code):
    script = code.folder / "scripts" / "s.py"
    script.write_text("import flat\nprint(flat.PLACE)\n")
    variables = {"PYTHONPATH": python_path(code, sys.executable, {}, [str(code.root)])}
    shown = subprocess.run([sys.executable, "-S", script], env=variables, capture_output=True, text=True, check=True)
    assert shown.stdout == "d1\n"


def test_path_and_the_command(code, tmp_path):
    given = f"{code.root}/bin:/usr/bin::bin:{code.root}/env/bin"
    assert program_path(code, {"PATH": given}) == f"{code.folder}/bin:/usr/bin::bin:{code.root}/env/bin"
    (tmp_path / "link").symlink_to(code.root)
    (code.root / "out.txt").write_text("")
    (code.folder / "out.txt").write_text("the program's own")
    command = ["python", f"{tmp_path}/link/scripts/t.py", "scripts/t.py", f"--data={code.root}/lib/x.py"]
    kept = [f"{code.root}/{name}" for name in ("data.bin", "out.txt", "scripts", "gone", "env/bin")] + ["/", "/bin/sh"]
    wanted = ["python", f"{code.folder}/scripts/t.py", *command[2:], *kept]
    assert command_in_copy(code, [*command, *kept]) == wanted
