"""Python modules by their source: found and read without importing them, which would run them and may import torch."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path

from hpctrain.startup import with_working_directory

MAX_BYTES = 200_000
"""Longer files aren't read: parsing 100 kB takes 15 ms."""
MAX_HOPS = 8
"""Imports to follow from module to module until a name is defined."""
DYNAMIC = (b"globals(", b"locals(", b"vars(", b"exec(", b"sys.modules", b"__path__")
"""A module whose source contains one of these may define names that the source doesn't show."""
CONSTRUCTORS = ("__init__", "__new__")

Definition = ast.ClassDef | ast.FunctionDef

_replaced: ContextVar[tuple[Path, Path] | None] = ContextVar("replaced", default=None)


class UnknownError(Exception):
    """The source alone doesn't tell; only running the module would."""


class AbsentError(Exception):
    """A module doesn't define a name.

    Args:
        module: its dotted name.
        name: what was looked up.
        known: the names that it has.
    """

    def __init__(self, module: str, name: str, known: Sequence[str]) -> None:
        self.module = module
        self.name = name
        self.known = known
        super().__init__(f"the module {module} has no {name}")


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module or package.

    Attributes:
        name: its dotted name.
        path: its source; None for a namespace package and for a module without source.
        folders: of a package; empty for a module.
        opaque: it has no source, as a compiled module.
    """

    name: str
    path: Path | None = None
    folders: tuple[Path, ...] = ()
    opaque: bool = False

    def submodule(self, part: str) -> ModuleSource | None:
        """Find a module of this package, as Python's importer does; None if it has no such module."""
        name, portions = f"{self.name}.{part}", list[Path]()
        for folder in self.folders:
            if not folder.is_dir():
                raise UnknownError  # in a zip file, for example
            inside = folder / part
            if (inside / "__init__.py").is_file():
                return ModuleSource(name, inside / "__init__.py", (inside,))
            if any((folder / f"{part}{suffix}").is_file() for suffix in (*EXTENSION_SUFFIXES, ".pyc")):
                return ModuleSource(name, opaque=True)
            if (folder / f"{part}.py").is_file():
                return ModuleSource(name, folder / f"{part}.py")
            if inside.is_dir():
                portions.append(inside)
        return ModuleSource(name, folders=tuple(portions)) if portions else None

    def names(self) -> dict[str, list[ast.AST]]:
        """Return the names that the module's own statements bind, each with the statements that bind it.

        Raises:
            UnknownError: it may have others.
            SyntaxError: it isn't valid Python.
        """
        if self.path is None:
            if self.opaque:
                raise UnknownError
            return {}
        try:
            state = self.path.stat()
            if state.st_size > MAX_BYTES:
                raise UnknownError
            return _names(self.path, state.st_mtime_ns)
        except (OSError, ValueError, RecursionError) as error:
            raise UnknownError from error
        except SyntaxError as error:
            if error.lineno is None:  # of a file with null bytes, on Python 3.12
                raise UnknownError from error
            raise

    def absolute(self, imported: ast.ImportFrom) -> str:
        """Return the dotted name of the module that a `from ... import` of this module means."""
        if not imported.level:
            return imported.module or ""
        package = self.name.split(".") if self.folders else self.name.split(".")[:-1]
        if imported.level > len(package):
            raise UnknownError  # Python refuses it, too
        parents = package[: len(package) - imported.level + 1]
        return ".".join([*parents, *filter(None, [imported.module])])


def find_module(dotted: str) -> tuple[ModuleSource, list[str]] | None:
    """Find the longest part of a dotted name that is a module; return it with the rest. None without the first part.

    Raises:
        UnknownError: its first part was imported from no file.
    """
    first, *rest = dotted.split(".")
    spec = _spec(first)
    if spec is None:
        return None
    folders = tuple(Path(place) for place in spec.submodule_search_locations or ())
    path = Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    source = ModuleSource(first, path, folders, opaque=path is None and not folders)
    while rest and (inside := source.submodule(rest[0])) is not None:
        source, rest = inside, rest[1:]
    return source, rest


def find_definition(source: ModuleSource, name: str, hops: int = MAX_HOPS) -> tuple[ModuleSource, Definition]:
    """Find the class or function that a module's name stands for; follow imports from other modules.

    Returns:
        The module that defines it, and the definition.

    Raises:
        AbsentError: the module has no such name.
        UnknownError: it has, but the source doesn't show what it is.
    """
    names = source.names()
    if name not in names:
        if source.submodule(name) is not None:
            raise UnknownError
        raise AbsentError(source.name, name, [*names, *_submodules(source)])
    bound, *others = names[name]
    if others or not hops:
        raise UnknownError
    if isinstance(bound, Definition):
        return source, bound
    if not isinstance(bound, ast.ImportFrom):
        raise UnknownError
    original = next(alias.name for alias in bound.names if name in (alias.asname, alias.name))
    found = find_module(source.absolute(bound))
    if found is None or found[1]:
        raise UnknownError
    try:
        return find_definition(found[0], original, hops - 1)
    except (AbsentError, SyntaxError) as error:
        raise UnknownError from error  # the import fails: Python's message says it better


def qualified_name(source: ModuleSource, expression: ast.expr) -> str:
    """Return the dotted name of a base class or decorator, imports replaced by what they import.

    Raises:
        UnknownError: it isn't a name.
    """
    if isinstance(expression, ast.Attribute):
        return f"{qualified_name(source, expression.value)}.{expression.attr}"
    if not isinstance(expression, ast.Name):
        raise UnknownError
    bound, *others = source.names().get(expression.id, [None])
    if others:
        raise UnknownError
    if bound is None:
        return expression.id  # a builtin
    if isinstance(bound, ast.ClassDef):
        return f"{source.name}.{expression.id}"
    if not isinstance(bound, ast.Import | ast.ImportFrom):
        raise UnknownError
    alias = next(one for one in bound.names if expression.id in (one.asname, one.name.split(".")[0]))
    if isinstance(bound, ast.ImportFrom):
        return f"{source.absolute(bound)}.{alias.name}"
    return alias.name if alias.asname else expression.id


@contextmanager
def working_directory_replaced(folder: Path, original: Path) -> Iterator[None]:
    """Inside the context, and in its thread alone, modules are found in a folder instead of the working directory.

    Args:
        folder: the copy of the working directory.
        original: modules that were imported from there don't count: the copy may have others.
    """
    token = _replaced.set((folder, original))
    try:
        yield
    finally:
        _replaced.reset(token)


def _spec(name: str) -> ModuleSpec | None:
    folder, original = _replaced.get() or (Path.cwd(), None)
    if name in sys.modules and (name == "hpctrain" or not _is_of(sys.modules[name], original)):
        spec = getattr(sys.modules[name], "__spec__", None)
        if not isinstance(spec, ModuleSpec):
            raise UnknownError
        return spec
    places = list(sys.path) if original else with_working_directory()
    if not sys.flags.safe_path:
        places.insert(0, str(folder))  # as the ranks have it
    finders = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder]
    found = importlib.machinery.PathFinder.find_spec(name, places)
    # such as those of editable installations
    return found or next(filter(None, (finder.find_spec(name, None) for finder in finders)), None)


def _is_of(module: object, folder: Path | None) -> bool:
    """Whether a module was imported from a folder."""
    file = getattr(module, "__file__", None)
    return folder is not None and isinstance(file, str) and Path(file).is_relative_to(folder)


def _submodules(source: ModuleSource) -> Iterator[str]:
    for folder in source.folders:
        for path in folder.iterdir():
            if path.suffix == ".py" or (path / "__init__.py").is_file():
                yield path.stem


def syntax_tree(text: bytes, path: Path) -> ast.Module:
    """Parse a module's source, without the warnings that Python gives again at the import.

    Raises:
        SyntaxError: it isn't valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, str(path))


@functools.lru_cache(maxsize=64)  # a sweep reads the same files for each of its runs
def _names(path: Path, _mtime_ns: int) -> dict[str, list[ast.AST]]:
    text = path.read_bytes()
    if any(word in text for word in DYNAMIC):
        raise UnknownError
    module = syntax_tree(text, path)
    names: dict[str, list[ast.AST]] = {}
    for name, statement in bindings(module.body):
        names.setdefault(name, []).append(statement)
    for each in ast.walk(module) if b"global" in text else ():
        for name in each.names if isinstance(each, ast.Global) else ():
            names.setdefault(name, []).append(each)
    if "*" in names or "__getattr__" in names:
        raise UnknownError
    return names


def bindings(body: Sequence[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that the statements of a module or class bind, with the statement.

    A statement that may replace a class's constructor counts, too.
    """
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name.split(".")[0], statement
        elif isinstance(statement, ast.Name) and not isinstance(statement.ctx, ast.Load):
            yield statement.id, statement
        else:
            if isinstance(statement, ast.MatchAs | ast.MatchStar | ast.MatchMapping | ast.ExceptHandler):
                captured = statement.rest if isinstance(statement, ast.MatchMapping) else statement.name
                yield from [(captured, statement)] if captured else []
            elif isinstance(changed := _changed(statement), ast.Name):
                yield changed.id, statement
            yield from bindings(list(ast.iter_child_nodes(statement)))


def _changed(statement: ast.AST) -> ast.AST | None:
    """Return the class whose constructor an assignment or `setattr` may replace; None for any other statement."""
    if isinstance(statement, ast.Attribute) and not isinstance(statement.ctx, ast.Load):
        return statement.value if statement.attr in CONSTRUCTORS else None
    if isinstance(statement, ast.Call) and isinstance(statement.func, ast.Name) and statement.func.id == "setattr":
        return statement.args[0] if statement.args else None
    return None
