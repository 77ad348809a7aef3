"""What is installed for the Python of a program's command, which may be another one than hpctrain's."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDERS = ("lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages")
MAPPING = re.compile(r"^MAPPING\b[^=\n]*= (\{.*\})$", re.MULTILINE)
"""The line of setuptools' hooks (setuptools.command.editable_wheel, `_FINDER_TEMPLATE`) that names the packages."""


def editable_places(word: str, variables: Mapping[str, str], folders: tuple[Path, ...]) -> list[str]:
    """Return the folders that .pth files add to Python's search path, such as those of editable installations.

    Reads the environments of the command, of `python` in PATH, of VIRTUAL_ENV, CONDA_PREFIX and the user, and `.venv`.

    Args:
        word: the first word of the command.
        variables: of the program.
        folders: in which the command may be and an environment `.venv` is looked for; the first is the working
            directory.
    """
    files = _files("*.pth", word, variables, folders)
    return list(dict.fromkeys(place for file in files for place in _places(file)))


def hooked_packages_of(word: str, variables: Mapping[str, str], folders: tuple[Path, ...]) -> dict[str, str]:
    """Return the packages that setuptools' import hooks find there, with their folders; arguments as above."""
    found: dict[str, str] = {}
    for file in _files("__editable___*_finder.py", word, variables, folders):
        try:
            mapping = MAPPING.search(file.read_text(errors="replace"))
            found |= ast.literal_eval(mapping[1]) if mapping else {}
        except (OSError, ValueError, SyntaxError, TypeError):
            continue  # not setuptools', or of a version that writes it differently
    return found


def _files(name: str, word: str, variables: Mapping[str, str], folders: tuple[Path, ...]) -> Iterator[Path]:
    for prefix in dict.fromkeys(_prefixes(word, variables, folders)):
        for pattern in FOLDERS:
            yield from sorted(prefix.glob(f"{pattern}/{name}"))


def _prefixes(word: str, variables: Mapping[str, str], folders: tuple[Path, ...]) -> Iterator[Path]:
    for name in (str(folders[0] / word) if "/" in word else word, "python", "python3"):
        if (program := shutil.which(name, path=variables.get("PATH"))) is not None:
            # not resolved: in a virtual environment it is a link to another Python
            yield (folders[0] / program).parent.parent
    yield from (Path(variables[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if variables.get(name))
    yield from (folder / ".venv" for folder in folders)
    if "HOME" in variables and not variables.get("PYTHONNOUSERSITE"):
        yield Path(variables.get("PYTHONUSERBASE") or f"{variables['HOME']}/.local")


def _places(file: Path) -> Iterator[str]:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if line.strip() and not line.startswith(("#", "import ", "import\t")):
            yield os.path.normpath(file.parent / line.strip())
