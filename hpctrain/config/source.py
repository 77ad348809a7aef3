"""The source of Python modules: names, classes, bases and arguments, without an import, which may import torch.

`ast` and not griffe, which models a whole package for documentation, and takes longer to import.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpctrain.startup import with_working_directory

MAX_BYTES = 200_000
"""Longer files aren't read: parsing 100 kB takes 15 ms."""
MAX_HOPS = 8
"""Imports to follow from module to module until a name is defined."""
DYNAMIC = re.compile(
    rb"globals\(|locals\(|vars\(|exec\(|sys\.modules|__path__"
    rb"|\.__(init|new)__ *=[^=]|setattr\([^()]*__(init|new)__"
)
"""A module whose source contains this may define names, or constructors, that its classes don't show."""

Definition = ast.ClassDef | ast.FunctionDef
Chain = Sequence[tuple["ModuleSource", ast.ClassDef]]
"""A class and its bases, each with the module that defines it."""

_replaced: ContextVar[tuple[Path, Path] | None] = ContextVar("replaced", default=None)


class UnknownError(Exception):
    """The source alone doesn't tell; only running the module would."""


class AbsentError(UnknownError):
    """A module doesn't define a name, or there is no such module.

    Args:
        module: its dotted name; empty if the first module of a path is absent.
        name: what was looked up.
        existing_names: the names that it has.
    """

    def __init__(self, module: str, name: str, existing_names: Sequence[str]) -> None:
        self.module = module
        self.name = name
        self.existing_names = existing_names
        super().__init__(f"the module {module} has no {name}")


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module or package.

    Attributes:
        name: its dotted name.
        path: its source; None for a namespace package and for a module without source.
        folders: of a package; empty for a module.
    """

    name: str
    path: Path | None = None
    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, name: str, spec: ModuleSpec) -> ModuleSource:
        """Return the source of a module that Python has found."""
        folders = tuple(Path(place) for place in spec.submodule_search_locations or ())
        path = Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
        return cls(name, path, folders)

    def submodule(self, part: str) -> ModuleSource | None:
        """Find a module of this package; None if it has no such module."""
        name = f"{self.name}.{part}"
        try:
            spec = PathFinder.find_spec(name, list(map(str, self.folders)))
        except KeyError:  # Python looks up the parent of a namespace package among the imported modules
            return ModuleSource(name, folders=tuple(path for base in self.folders if (path := base / part).is_dir()))
        return None if spec is None else ModuleSource.of(name, spec)

    def names(self) -> dict[str, list[ast.AST]]:
        """Return the names that the module's own statements bind, each with the statements that bind it.

        Raises:
            UnknownError: it may have others.
            SyntaxError: it isn't valid Python.
        """
        if self.path is None:
            if not self.folders:  # such as a compiled module
                raise UnknownError
            return {}
        try:
            state = self.path.stat()
            if state.st_size > MAX_BYTES:
                raise UnknownError
            return _bound_names(self.path, state.st_mtime_ns)
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


def find_module(dotted: str) -> tuple[ModuleSource, list[str]]:
    """Find the longest part of a dotted name that is a module; return it with the rest.

    Raises:
        AbsentError: there is no module of the name's first part.
        UnknownError: its first part was imported from no file.
    """
    first, *attributes = dotted.split(".")
    spec = _find_spec(first) if first else None
    if spec is None:
        raise AbsentError("", first, ())
    source = ModuleSource.of(first, spec)
    while attributes and (inside := source.submodule(attributes[0])) is not None:
        source, attributes = inside, attributes[1:]
    return source, attributes


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
    bound, *rebindings = names[name]
    if rebindings or not hops:
        raise UnknownError
    if isinstance(bound, Definition):
        return source, bound
    if not isinstance(bound, ast.ImportFrom):
        raise UnknownError
    original = next(alias.name for alias in bound.names if name in (alias.asname, alias.name))
    try:
        module, attributes = find_module(source.absolute(bound))
        if attributes:
            raise UnknownError
        return find_definition(module, original, hops - 1)
    except (AbsentError, SyntaxError) as error:
        raise UnknownError from error  # the import fails: Python's message says it better


def definition_of(target: str) -> tuple[ModuleSource, Definition]:
    """Find the class or function that an import path names, as `find_definition` does.

    Raises:
        AbsentError: the first module, or a name in a module, doesn't exist.
        UnknownError: the source doesn't show what it is.
        SyntaxError: the module isn't valid Python.
    """
    module, _, last = target.rpartition(".")
    source, attributes = find_module(module)
    name, *inner = [*attributes, last]
    definition = find_definition(source, name)
    if inner:
        raise UnknownError
    return definition


def qualified_name(source: ModuleSource, expression: ast.expr) -> str:
    """Return the dotted name of a base class or decorator, imports replaced by what they import.

    Raises:
        UnknownError: it isn't a name.
    """
    if isinstance(expression, ast.Attribute):
        return f"{qualified_name(source, expression.value)}.{expression.attr}"
    if not isinstance(expression, ast.Name):
        raise UnknownError
    bound, *rebindings = source.names().get(expression.id, [None])
    if rebindings:
        raise UnknownError
    if bound is None:
        return expression.id  # a builtin
    if isinstance(bound, ast.ClassDef):
        return f"{source.name}.{expression.id}"
    if not isinstance(bound, ast.Import | ast.ImportFrom):
        raise UnknownError
    alias = next(alias for alias in bound.names if expression.id in (alias.asname, alias.name.split(".")[0]))
    if isinstance(bound, ast.ImportFrom):
        return f"{source.absolute(bound)}.{alias.name}"
    return alias.name if alias.asname else expression.id


@contextmanager
def working_directory_replaced(folder: Path, original: Path) -> Iterator[None]:
    """Context manager in which modules are found in a folder instead of the working directory; in its thread alone.

    Args:
        folder: the copy of the working directory.
        original: modules that were imported from there don't count: the copy may have others.
    """
    token = _replaced.set((folder, original))
    try:
        yield
    finally:
        _replaced.reset(token)


def _find_spec(name: str) -> ModuleSpec | None:
    folder, original = _replaced.get() or (Path.cwd(), None)
    if name in sys.modules and (name == "hpctrain" or not _is_of(sys.modules[name], original)):
        spec = getattr(sys.modules[name], "__spec__", None)
        if not isinstance(spec, ModuleSpec):
            raise UnknownError
        return spec
    places = list(sys.path) if original else with_working_directory()
    if not sys.flags.safe_path:
        places.insert(0, str(folder))  # as the ranks have it
    finders = [finder for finder in sys.meta_path if finder is not PathFinder]
    path_spec = PathFinder.find_spec(name, places)
    # such as those of editable installations
    return path_spec or next(filter(None, (finder.find_spec(name, None) for finder in finders)), None)


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
def _bound_names(path: Path, _mtime_ns: int) -> dict[str, list[ast.AST]]:
    text = path.read_bytes()
    if DYNAMIC.search(text):
        raise UnknownError
    module = syntax_tree(text, path)
    names: dict[str, list[ast.AST]] = {}
    for name, statement in bindings(module.body):
        names.setdefault(name, []).append(statement)
    for node in ast.walk(module) if b"global" in text else ():
        for name in node.names if isinstance(node, ast.Global) else ():
            names.setdefault(name, []).append(node)
    if "*" in names or "__getattr__" in names:
        raise UnknownError
    return names


def bindings(body: Sequence[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that the statements of a module or class bind, with the statement."""
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name.split(".")[0], statement
        elif isinstance(statement, ast.Name) and not isinstance(statement.ctx, ast.Load):
            yield statement.id, statement
        else:
            # of `match` and `except`
            captured = getattr(statement, "rest", None) or getattr(statement, "name", None)
            if isinstance(captured, str):
                yield captured, statement
            yield from bindings(list(ast.iter_child_nodes(statement)))


NEUTRAL = ("object", "abc.ABC", "typing.Generic", "typing.Protocol")
"""Base classes that change nothing about a constructor."""
KNOWN_BASES: Mapping[str, Sequence[str]] = {
    "object": (),
    # reading its source takes 15 ms, and shows only *args and **kwargs, which the constructor refuses
    "torch.nn.Module": (),
    "torch.optim.optimizer.Optimizer": ("params", "defaults"),
}
"""Base classes whose source isn't read, and the arguments that they require."""


def class_chain(target: str) -> Chain:
    """Return the class that an import path names, and its bases up to one of `KNOWN_BASES`, with their modules.

    Raises:
        UnknownError: the source doesn't show what they are.
    """
    return lineage(*_class_of(target))[0]


def _class_of(target: str) -> tuple[ModuleSource, ast.ClassDef]:
    try:
        source, definition = definition_of(target)
    except SyntaxError as error:
        raise UnknownError from error
    if not isinstance(definition, ast.ClassDef):
        raise UnknownError
    return source, definition


def lineage(source: ModuleSource, node: ast.ClassDef) -> tuple[Chain, Sequence[str]]:
    """Return a class and its bases up to one of `KNOWN_BASES`, and what that one requires.

    Raises:
        UnknownError: a class of them has several bases, a metaclass or another means to change the constructor.
    """
    chain = [(source, node)]
    while True:
        source, node = chain[-1]
        bound = list(bindings(node.body))
        special = any(name in ("__new__", "__init_subclass__") for name, _ in bound)
        constructors = [statement for name, statement in bound if name == "__init__"]
        plain = len(constructors) <= 1 and all(isinstance(definition, ast.FunctionDef) for definition in constructors)
        decorated = not all(_is_dataclass(source, decorator) for decorator in node.decorator_list)
        if node.keywords or special or not plain or decorated or len(chain) > MAX_HOPS:
            raise UnknownError
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        names = [name for base in bases if (name := qualified_name(source, base)) not in NEUTRAL] or ["object"]
        if len(names) > 1:
            raise UnknownError
        if names[0] in KNOWN_BASES:
            return chain, KNOWN_BASES[names[0]]
        chain.append(_class_of(names[0]))


def _is_dataclass(source: ModuleSource, decorator: ast.expr) -> bool:
    """Whether a decorator is `dataclasses.dataclass`."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return qualified_name(source, function) == "dataclasses.dataclass"


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a call by name.

    Attributes:
        arguments: whether each is optional, by name and in order.
        takes_any: whether arguments of other names are accepted as well.
    """

    arguments: Mapping[str, bool]
    takes_any: bool = False


def signature_of(source: ModuleSource, definition: Definition) -> Signature:
    """Return the arguments of a function, or of a class's constructor, which may be inherited.

    Args:
        source: the module that defines it.
        definition: found in that module.

    Raises:
        UnknownError: they can't be derived from the source alone.
    """
    if isinstance(definition, ast.FunctionDef):
        return _function_signature(definition)
    bases, required = lineage(source, definition)
    for number, (_, node) in enumerate(bases):
        inits = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if inits:
            return _function_signature(inits[0], method=True)
        if _generates_constructor(node):
            return _dataclass_signature(bases[number:])
    return Signature(dict.fromkeys(required, False))


def _function_signature(node: ast.FunctionDef, *, method: bool = False) -> Signature:
    arguments = node.args
    if node.decorator_list or (method and not (arguments.posonlyargs or arguments.args)):
        raise UnknownError
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    optional = len(names) - len(arguments.defaults)
    is_optional = {name: number >= optional for number, name in enumerate(names)}
    is_optional |= {
        argument.arg: default is not None
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    if len(arguments.posonlyargs) > method:
        raise UnknownError  # no key can give these
    return Signature(dict(list(is_optional.items())[method:]), takes_any=arguments.kwarg is not None)


def _generates_constructor(node: ast.ClassDef) -> bool:
    """Whether `@dataclass` makes the class's constructor; `@dataclass(init=False)` doesn't."""
    calls = (decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call))
    init = [ast.unparse(option.value) for call in calls for option in call.keywords if option.arg == "init"]
    return bool(node.decorator_list) and init in ([], ["True"])


def _dataclass_signature(chain: Chain) -> Signature:
    """Return the arguments of the constructor that `@dataclass` makes for the first of these classes."""
    is_optional: dict[str, bool] = {}
    inherited: set[str] = set()  # @dataclass takes an attribute of a base for the default of a field of its name
    for source, node in reversed(chain):
        for statement in node.body if node.decorator_list else ():
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name, annotation = statement.target.id, ast.unparse(statement.annotation).strip("'\"")
            options = _field_options(source, statement.value)
            if "ClassVar" in annotation or annotation.endswith("KW_ONLY") or options.get("init") == "False":
                is_optional.pop(name, None)  # also a field of a base, which this one replaces
            else:
                is_optional[name] = name in inherited or not options.keys().isdisjoint(("default", "default_factory"))
        inherited.update(name for name, _ in bindings(node.body))
    return Signature(is_optional)


def _field_options(source: ModuleSource, value: ast.expr | None) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, ast.Call) and qualified_name(source, value.func) == "dataclasses.field":
        return {option.arg or "": ast.unparse(option.value) for option in value.keywords}
    return {"default": ""}
