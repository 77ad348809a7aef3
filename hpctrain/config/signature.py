"""The arguments that a class or function takes, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.config.module_source import (
    MAX_HOPS,
    AbsentError,
    Definition,
    ModuleSource,
    UnknownError,
    bindings,
    find_definition,
    find_module,
    qualified_name,
)


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a call by name.

    Attributes:
        arguments: whether each is optional, by name and in order.
        takes_any: whether arguments of other names are accepted as well.
    """

    arguments: Mapping[str, bool]
    takes_any: bool = False


NEUTRAL = ("object", "abc.ABC", "typing.Generic", "typing.Protocol")
"""Base classes that change nothing about a constructor."""
KNOWN_BASES = {
    "object": Signature({}),
    # reading its source takes 15 ms, and shows only *args and **kwargs, which the constructor refuses
    "torch.nn.Module": Signature({}),
    "torch.optim.optimizer.Optimizer": Signature({"params": False, "defaults": False}),
}
"""Base classes whose source isn't read, and what they take."""


def signature_of(source: ModuleSource, definition: Definition) -> Signature:
    """Return the arguments of a function, or of a class's constructor, which may be inherited.

    Args:
        source: the module that defines it.
        definition: found in that module.

    Raises:
        UnknownError: they can't be derived from the source alone.
    """
    if isinstance(definition, ast.FunctionDef):
        return _of_function(definition)
    try:
        return _of_class(source, definition)
    except SyntaxError as error:  # in the module of a base class
        raise UnknownError from error


def unfit(method: ast.FunctionDef, given: int) -> str | None:
    """Return why a method can't be called with so many arguments in order; None if it can, or isn't plain.

    Args:
        method: in the body of a class.
        given: arguments, with `self`.
    """
    own = method.args
    names = [one.arg for one in (*own.posonlyargs, *own.args)]
    needed = len(names) - len(own.defaults) + sum(default is None for default in own.kw_defaults)
    if method.decorator_list or (needed <= given and (given <= len(names) or own.vararg is not None)):
        return None
    return f"it takes {', '.join(names)}"


def _of_function(node: ast.FunctionDef, *, method: bool = False) -> Signature:
    arguments = node.args
    if node.decorator_list or (method and not (arguments.posonlyargs or arguments.args)):
        raise UnknownError
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    optional = len(names) - len(arguments.defaults)
    known = {name: number >= optional for number, name in enumerate(names)}
    known |= {
        argument.arg: default is not None
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    if len(arguments.posonlyargs) > method:
        raise UnknownError  # no key can give these
    return Signature(dict(list(known.items())[method:]), takes_any=arguments.kwarg is not None)


def _of_class(source: ModuleSource, node: ast.ClassDef) -> Signature:
    chain, root = lineage(source, node)
    for number, (_, one) in enumerate(chain):
        own = [each for each in one.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if own:
            return _of_function(own[0], method=True)
        if _generates_constructor(one):
            return _of_fields(chain[number:])
    return root


def lineage_of(target: str) -> list[tuple[ModuleSource, ast.ClassDef]]:
    """Return the class that an import path names, and its bases, as `lineage` does.

    Raises:
        AbsentError: its module has no such name.
        UnknownError: the source doesn't show what they are.
        SyntaxError: a module isn't valid Python.
    """
    found = find_module(target.rpartition(".")[0])
    if found is None or found[1]:
        raise UnknownError
    source, definition = find_definition(found[0], target.rpartition(".")[2])
    if not isinstance(definition, ast.ClassDef):
        raise UnknownError
    return lineage(source, definition)[0]


def lineage(source: ModuleSource, node: ast.ClassDef) -> tuple[list[tuple[ModuleSource, ast.ClassDef]], Signature]:
    """Return a class and its bases up to one of `KNOWN_BASES`, and that one's signature.

    Raises:
        UnknownError: a class of them has several bases, a metaclass or another means to change the constructor.
    """
    chain = [(source, node)]
    while True:
        source, node = chain[-1]
        bound = list(bindings(node.body))
        special = any(name in ("__new__", "__init_subclass__") for name, _ in bound)
        constructors = [statement for name, statement in bound if name == "__init__"]
        plain = len(constructors) <= 1 and all(isinstance(one, ast.FunctionDef) for one in constructors)
        if node.keywords or special or not plain or len(chain) > MAX_HOPS:
            raise UnknownError
        for decorator in node.decorator_list:
            if not _is_dataclass(source, decorator):
                raise UnknownError
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        names = [name for base in bases if (name := qualified_name(source, base)) not in NEUTRAL] or ["object"]
        if len(names) > 1:
            raise UnknownError
        if names[0] in KNOWN_BASES:
            return chain, KNOWN_BASES[names[0]]
        found = find_module(names[0].rpartition(".")[0])
        if found is None or found[1]:
            raise UnknownError
        try:
            base_source, base = find_definition(found[0], names[0].rpartition(".")[2])
        except AbsentError as error:
            raise UnknownError from error
        if not isinstance(base, ast.ClassDef):
            raise UnknownError
        chain.append((base_source, base))


def _is_dataclass(source: ModuleSource, decorator: ast.expr) -> bool:
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    return qualified_name(source, named) == "dataclasses.dataclass"


def _generates_constructor(node: ast.ClassDef) -> bool:
    """Whether `@dataclass` makes the class's constructor; `@dataclass(init=False)` doesn't."""
    options = {
        option.arg: ast.unparse(option.value)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        for option in decorator.keywords
    }
    return bool(node.decorator_list) and options.get("init", "True") == "True"


def _of_fields(chain: Sequence[tuple[ModuleSource, ast.ClassDef]]) -> Signature:
    """Return the arguments of the constructor that `@dataclass` makes for the first of these classes."""
    known: dict[str, bool] = {}
    attributes: set[str] = set()  # of the classes: @dataclass takes one, inherited or not, as its field's default
    for source, node in reversed(chain):
        unannotated = [statement for statement in node.body if not isinstance(statement, ast.AnnAssign)]
        attributes.update(name for name, _ in bindings(unannotated))
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name, annotation = statement.target.id, ast.unparse(statement.annotation).strip("'\"")
            options = _field_options(source, statement.value)
            if "default" in options:
                attributes.add(name)
            by_keyword_from_here = annotation.rpartition("KW_ONLY")[1:] == ("KW_ONLY", "")
            if not node.decorator_list or by_keyword_from_here or "ClassVar" in annotation:
                continue
            if "False" in options.get("init", ""):
                known.pop(name, None)
            else:
                known[name] = name in attributes or "default_factory" in options
    return Signature(known)


def _field_options(source: ModuleSource, value: ast.expr | None) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, ast.Call) and qualified_name(source, value.func) == "dataclasses.field":
        return {option.arg or "": ast.unparse(option.value) for option in value.keywords}
    return {"default": ""}
