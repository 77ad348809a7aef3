"""Check the class that a `_target_` names, and its arguments, by its source: the login half doesn't import it."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpctrain.config.module_source import (
    MAX_HOPS,
    AbsentError,
    ModuleSource,
    UnknownError,
    bindings,
    find_definition,
    find_module,
    qualified_name,
)
from hpctrain.config.optimizer import HANDLING_KEYS
from hpctrain.config.schema import OPTIONS
from hpctrain.errors import ConfigError
from hpctrain.phrases import listed

NEEDS_A_CLOSURE = "needs a closure that recomputes the loss, which the training loop doesn't pass"
"""Why torch.optim.LBFGS is refused."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a call by name.

    Attributes:
        arguments: by name, whether it may be left out; in their order.
        takes_any: it takes arguments of any other name as well.
    """

    arguments: Mapping[str, bool]
    takes_any: bool = False


NEUTRAL = ("object", "abc.ABC", "typing.Generic", "typing.Protocol")
"""Base classes that change nothing about a constructor."""
ORDINARY = {
    "object": Signature({}),
    # its source is read in 15 ms, and shows only *args and **kwargs, which it then refuses
    "torch.nn.Module": Signature({}),
    "torch.optim.optimizer.Optimizer": Signature({"params": False, "defaults": False}),
}
"""Base classes at which reading ends, and what they take."""


def check_targets(group: str, node: Any) -> None:
    """Check the `_target_` of task, model or optimizer: that the class exists, and takes the arguments given.

    What the source doesn't show, such as names that a module defines at run time, is accepted.

    Raises:
        ConfigError: names the key, and what was probably meant.
    """
    if not isinstance(node, dict):
        raise ConfigError(group, node, "is not a group of keys", f"choose an option: {group}=NAME")
    if group == "model" and node.get("_target_") is None:
        return
    if node.get("_target_") == "torch.optim.LBFGS":
        raise ConfigError(f"{group}._target_", node["_target_"], NEEDS_A_CLOSURE, "choose another class of torch.optim")
    # the optimizer's class gets the parameters first, and not the keys that hpctrain itself acts on
    by_optimizer = group == "optimizer"
    _check(group, node, skipped=HANDLING_KEYS if by_optimizer else (), positional=1 if by_optimizer else 0)


def _check(key: str, node: Mapping[str, Any], *, skipped: Collection[str] = (), positional: int = 0) -> None:
    target = _path_of(key, node)
    given = {name: value for name, value in node.items() if name != "_target_" and name not in skipped}
    for name, value in given.items():
        if isinstance(value, Mapping) and "_target_" in value:
            _check(f"{key}.{name}", value)
    if _is_shipped(node):
        return
    try:
        signature = _signature(key, target, positional)
    except UnknownError:
        return
    known = signature.arguments
    for name, value in given.items():
        if name not in known and not signature.takes_any:
            remedy = f"it takes {listed(known)}" if known else "remove it: the class takes no argument"
            near = difflib.get_close_matches(name, known, n=1)
            problem = f"{target} has no argument {name}"
            raise ConfigError(f"{key}.{name}", value, problem, f"did you mean {key}.{near[0]}?" if near else remedy)
    missing = [name for name, may_be_left_out in known.items() if name not in given and not may_be_left_out]
    if missing:
        problem = f"needs the argument{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        remedy = f"add {' '.join(f'+{key}.{name}=VALUE' for name in missing)}"
        raise ConfigError(f"{key}._target_", target, problem, remedy)


def _path_of(key: str, node: Mapping[str, Any]) -> str:
    target = node.get("_target_")
    if target is None:
        raise ConfigError(f"{key}._target_", None, "must name a class", f"set {key}._target_=module.Class")
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        raise ConfigError(f"{key}._target_", target, "is not an import path", f"write {key}._target_=module.Class")
    return target


def _is_shipped(node: Mapping[str, Any]) -> bool:
    """Whether the node has the keys of one of hpctrain's own options, which are typed and checked already."""
    schemas = (schema for group in ("task", "model", "optimizer") for schema in OPTIONS[group].values())
    for schema in schemas:
        known = {field.name: field.default for field in fields(schema)}
        if known["_target_"] == node["_target_"]:
            return node.keys() == known.keys()
    return False


def _signature(key: str, target: str, positional: int) -> Signature:
    module, _, _ = target.rpartition(".")
    try:
        found = find_module(module)
        if found is None:
            raise _module_not_found(key, target)
        source, rest = found
        name, *inner = [*rest, target.rpartition(".")[2]]
        source, defined = find_definition(source, name)
        if inner:
            raise UnknownError
    except AbsentError as error:
        near = difflib.get_close_matches(error.name, error.known, n=1)
        corrected = target.replace(f"{error.module}.{error.name}", f"{error.module}.{near[0]}", 1) if near else ""
        remedy = f"did you mean {corrected}?" if near else f"it has {listed(_public(error.known)) or 'no names'}"
        raise ConfigError(f"{key}._target_", target, str(error), remedy) from error
    except SyntaxError as error:
        problem = f"{error.filename}, line {error.lineno}, is not valid Python: {error.msg}"
        raise ConfigError(f"{key}._target_", target, problem, "correct the file") from error
    try:
        signature = _of_class(source, defined) if isinstance(defined, ast.ClassDef) else _of_function(defined)
    except SyntaxError as error:  # in the module of a base class
        raise UnknownError from error
    return Signature(dict(list(signature.arguments.items())[positional:]), signature.takes_any)


def _public(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def _module_not_found(key: str, target: str) -> ConfigError:
    first, _, rest = target.partition(".")
    here = [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    near = difflib.get_close_matches(first, here, n=1)
    remedy = (
        f"did you mean {near[0]}.{rest}?" if near else "run the command in the folder that contains it, or install it"
    )
    return ConfigError(f"{key}._target_", target, f"the module {first} was not found", remedy)


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
    """Return the arguments of a class's constructor, which may be inherited."""
    chain, root = _chain(source, node)
    for number, (_, one) in enumerate(chain):
        own = [each for each in one.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if own:
            return _of_function(own[0], method=True)
        if _generates_constructor(one):
            return _of_fields(chain[number:])
    return root


def _chain(source: ModuleSource, node: ast.ClassDef) -> tuple[list[tuple[ModuleSource, ast.ClassDef]], Signature]:
    """Return a class and its bases up to one of `ORDINARY`, and that one's signature.

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
        if names[0] in ORDINARY:
            return chain, ORDINARY[names[0]]
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


def constants_of(target: str) -> dict[str, object]:
    """Return the constants that the body of a class sets, or that of a base class.

    Names that are set or defined in another way are left out; all of them, if the source doesn't show them.

    Args:
        target: the class's dotted name.
    """
    module, _, name = target.rpartition(".")
    try:
        found = find_module(module)
        if found is None or found[1]:
            return {}
        source, node = find_definition(found[0], name)
        chain = _chain(source, node)[0] if isinstance(node, ast.ClassDef) else []
    except (AbsentError, UnknownError, SyntaxError):
        return {}
    constants: dict[str, object] = {}
    for _, base in reversed(chain):
        constants |= {
            target.id: statement.value
            for statement in base.body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            if isinstance(target, ast.Name)
        }
        stored = (
            each for each in ast.walk(base) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        )
        defined = (each for each in base.body if isinstance(each, ast.FunctionDef))
        for each in (*(one.attr for one in stored), *(one.name for one in defined)):
            constants.pop(each, None)
    return {name: value.value for name, value in constants.items() if isinstance(value, ast.Constant)}
