"""Where Python looks for modules of a run's code: in the copy, wherever it would look in the original."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpctrain.config.module_source import working_directory_replaced
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.process import environ_replaced
from hpctrain.search_path import with_working_directory

_imported: set[Path] = set()
"""Copies from which this process may have imported modules."""


def search_path(code: CodeSnapshot, places: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return Python's search path with the copy in the place of the original, its working directory first.

    Args:
        code: of the run.
        places: Python's own search path.
        environ: whose PYTHONSAFEPATH keeps the working directory out.
    """
    found = [in_copy(code, place) for place in places]
    if environ.get("PYTHONSAFEPATH"):
        return found
    own = str(code.working_directory)
    return [own, *(place for place in found if place != own and not _is_here(place))]


def _is_here(place: str) -> bool:
    """Whether an entry of the search path is the working directory, and not one of Python's own folders."""
    here = Path(place).resolve()
    return here == Path.cwd() and not here.is_relative_to(sys.prefix)


def in_copy(code: CodeSnapshot, place: str) -> str:
    """Return what stands for an entry of the search path; the entry itself if the copy doesn't contain it."""
    original = Path(place).resolve()
    if not original.is_relative_to(code.root):
        return place
    found = code.folder / original.relative_to(code.root)
    # what is linked, such as a virtual environment, keeps its path
    is_copied = found.exists() and found.resolve().is_relative_to(code.folder.resolve())
    return str(found) if is_copied else place


def python_path(code: CodeSnapshot, environ: Mapping[str, str]) -> str:
    """Return PYTHONPATH for ranks of a training, and for processes that they start.

    Args:
        code: of the run.
        environ: with the PYTHONPATH of the original.
    """
    return os.pathsep.join(search_path(code, _given(environ), environ))


def _given(environ: Mapping[str, str]) -> list[str]:
    # an empty entry is the working directory, but an empty variable has none
    return environ["PYTHONPATH"].split(os.pathsep) if environ.get("PYTHONPATH") else []


@contextmanager
def imported_from(code: CodeSnapshot | None) -> Iterator[None]:
    """Inside the context, this process and those that it starts import a run's code.

    Args:
        code: of the run; None if it imports from the working directory.
    """
    for folder in [folder for folder in _imported if code is None or folder != code.folder]:
        _forget_modules(folder)
    before = list(sys.path)
    places = with_working_directory()
    variables = dict(os.environ)
    if code is not None:
        _imported.add(code.folder)
        places = search_path(code, places, os.environ)
        variables["PYTHONPATH"] = python_path(code, os.environ)
    sys.path[:] = places
    try:
        with environ_replaced(variables):
            yield
    finally:
        sys.path[:] = before


@contextmanager
def checked_in(code: CodeSnapshot | None) -> Iterator[None]:
    """Inside the context, classes are looked up in a run's code, without importing them; None changes nothing."""
    if code is None:
        yield
        return
    before = list(sys.path)
    sys.path[:] = search_path(code, with_working_directory(), os.environ)
    try:
        with working_directory_replaced(code.working_directory, code.root):
            yield
    finally:
        sys.path[:] = before


def _forget_modules(folder: Path) -> None:
    """Forget modules of another copy: a run that follows in this process has its own version of them."""
    _imported.discard(folder)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).is_relative_to(folder):
            del sys.modules[name]


def hooked_packages(code: CodeSnapshot) -> list[str]:
    """Return the packages of the original that only an import hook finds, so that the copy can't take their place.

    `pip install --editable` makes such hooks, for layouts that an entry of the search path can't describe.
    """
    places = search_path(code, with_working_directory(), os.environ)
    found = []
    for name, module in list(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None) if name.startswith("__editable___") else None
        for package, place in mapping.items() if isinstance(mapping, dict) else ():
            inside = Path(str(place)).resolve().is_relative_to(code.root)
            if inside and importlib.machinery.PathFinder.find_spec(str(package), places) is None:
                found.append(str(package))
    # of the package `editables`, which hatchling and pdm use for such layouts
    finder = getattr(sys.modules.get("editables.redirector"), "RedirectingFinder", None)
    for package, place in dict(getattr(finder, "_redirections", {})).items():
        inside = Path(str(place)).resolve().is_relative_to(code.root)
        if inside and importlib.machinery.PathFinder.find_spec(str(package), places) is None:
            found.append(str(package))
    return sorted(found)
