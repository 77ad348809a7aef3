"""Python's search path for modules of a run's code: the copy, wherever Python would look in the original.

Only the search path changes for ranks of a training: they keep their working directory, to which data paths refer.
Programs run in the copy.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.config.source import working_directory_replaced
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.process import environ_replaced
from hpctrain.startup import with_working_directory

PACKAGES = ("lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages")
MAPPING = re.compile(r"^MAPPING\b[^=\n]*= (\{.*\})$", re.MULTILINE)
"""The line of setuptools' hooks (setuptools.command.editable_wheel, `_FINDER_TEMPLATE`) that names the packages."""

_imported: set[Path] = set()
"""Copies from which this process may have imported modules."""


def search_path(code: CodeSnapshot, places: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return Python's search path with the copy in the place of the original, its working directory first.

    Args:
        code: of the run.
        places: Python's own search path.
        environ: whose PYTHONSAFEPATH keeps the working directory out.
    """
    entries = [in_copy(code, place) for place in places]
    if environ.get("PYTHONSAFEPATH"):
        return entries
    working_directory = str(code.working_directory)
    return [working_directory, *(place for place in entries if place != working_directory and not _is_here(place))]


def _is_here(place: str) -> bool:
    """Whether an entry of the search path is the working directory, and not one of Python's own folders."""
    here = Path(place).resolve()
    return here == Path.cwd() and not here.is_relative_to(sys.prefix)


def in_copy(code: CodeSnapshot, place: str) -> str:
    """Return what stands for an entry of the search path; the entry itself if the copy doesn't contain it."""
    original = Path(place).resolve()
    if not original.is_relative_to(code.root):
        return place
    copy = code.folder / original.relative_to(code.root)
    # what is linked, such as a virtual environment, keeps its path
    is_copied = copy.exists() and copy.resolve().is_relative_to(code.folder.resolve())
    return str(copy) if is_copied else place


def python_path(code: CodeSnapshot, environ: Mapping[str, str]) -> str:
    """Return PYTHONPATH for ranks of a training, and for processes that they start.

    Args:
        code: of the run.
        environ: with the PYTHONPATH of the original.
    """
    # an empty entry is the working directory, but an empty variable has none
    places = environ["PYTHONPATH"].split(os.pathsep) if environ.get("PYTHONPATH") else []
    return os.pathsep.join(search_path(code, places, environ))


@contextlib.contextmanager
def imported_from(code: CodeSnapshot | None) -> Iterator[None]:
    """Context manager in which this process and those that it starts import a run's code.

    Args:
        code: of the run; None if it imports from the working directory.
    """
    _forget_modules(_imported - {None if code is None else code.folder})
    places, variables = with_working_directory(), dict(os.environ)
    if code is not None:
        _imported.add(code.folder)
        places = search_path(code, places, os.environ)
        variables["PYTHONPATH"] = python_path(code, os.environ)
    with _search_path_replaced(places), environ_replaced(variables):
        yield


@contextlib.contextmanager
def _search_path_replaced(places: Sequence[str]) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:] = places
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def checked_in(code: CodeSnapshot) -> Iterator[None]:
    """Context manager in which classes are looked up in a run's code, without importing them."""
    places = search_path(code, with_working_directory(), os.environ)
    with _search_path_replaced(places), working_directory_replaced(code.working_directory, code.root):
        yield


def _forget_modules(folders: set[Path]) -> None:
    """Forget modules of other copies: a run that follows in this process has its own version of them."""
    _imported.difference_update(folders)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and any(map(Path(file).is_relative_to, folders)):
            del sys.modules[name]


def hooked_packages(code: CodeSnapshot, prefixes: Iterable[Path]) -> list[str]:
    """Return packages of the original that only an import hook finds, so that the copy can't take their place.

    setuptools makes such hooks for layouts of editable installations that an entry of the search path can't describe.

    Args:
        code: of the run.
        prefixes: of environments beside that of this process; see `python_prefixes`.
    """
    packages: dict[str, str] = {}
    hooks = "__editable___*_finder.py"
    for file in (*(file for place in sys.path for file in Path(place).glob(hooks)), *_installed_files(hooks, prefixes)):
        # not setuptools', or of a version that writes it differently
        with contextlib.suppress(OSError, ValueError, SyntaxError, TypeError):
            for mapping in MAPPING.findall(file.read_text(errors="replace")):
                packages |= ast.literal_eval(mapping)
    places = search_path(code, with_working_directory(), os.environ)
    return sorted(
        name
        for name, place in packages.items()
        if Path(place).resolve().is_relative_to(code.root)
        and importlib.machinery.PathFinder.find_spec(name, places) is None
    )


def editable_places(prefixes: Iterable[Path]) -> list[str]:
    """Return the folders that .pth files of environments add to Python's search path, as editable installations do.

    The files are read, and no Python is started: a program may run with another one than hpctrain. PYTHONPATH with the
    copies of these folders comes before the .pth files.
    """
    places: dict[str, None] = {}
    for file in _installed_files("*.pth", prefixes):
        with contextlib.suppress(OSError):
            for line in map(str.strip, file.read_text(errors="replace").splitlines()):
                if line and not line.startswith(("#", "import ", "import\t")):
                    places[os.path.normpath(file.parent / line)] = None
    return list(places)


def python_prefixes(word: str, variables: Mapping[str, str], folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the environments of a command, of `python` in PATH, of VIRTUAL_ENV, CONDA_PREFIX and the user, and `.venv`.

    Args:
        word: the first word of the command.
        variables: of the program.
        folders: in which the command may be and `.venv` is looked for; the first is the working directory.
    """
    for name in (str(folders[0] / word) if "/" in word else word, "python", "python3"):
        if (program := shutil.which(name, path=variables.get("PATH"))) is not None:
            # not resolved: in a virtual environment it is a link to another Python
            yield (folders[0] / program).parent.parent
    yield from (Path(variables[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if variables.get(name))
    yield from (folder / ".venv" for folder in folders)
    if "HOME" in variables and not variables.get("PYTHONNOUSERSITE"):
        yield Path(variables.get("PYTHONUSERBASE") or f"{variables['HOME']}/.local")


def _installed_files(name: str, prefixes: Iterable[Path]) -> Iterator[Path]:
    for prefix in dict.fromkeys(prefixes):
        for pattern in PACKAGES:
            yield from sorted(prefix.glob(f"{pattern}/{name}"))
