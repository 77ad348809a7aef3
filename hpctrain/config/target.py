"""Check the class that a `_target_` names, and its arguments, by its source: the login half doesn't import it."""

from __future__ import annotations

import ast
import difflib
import math
import os
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config import require
from hpctrain.config.main_module import is_own
from hpctrain.config.optimizer import (
    HANDLING_KEYS,
    NAMED_KEYS,
    OF_ANY_CLASS,
    check_options,
    entries_of,
    named_optimizers,
)
from hpctrain.config.root import OPTIONS
from hpctrain.config.schedule import WarmUp, schedule_of
from hpctrain.config.source import (
    AbsentError,
    Chain,
    Definition,
    ModuleSource,
    UnknownError,
    bindings,
    definition_of,
    lineage,
    qualified_name,
)
from hpctrain.config.task_checks import check_callback
from hpctrain.errors import ConfigError
from hpctrain.phrases import listed

LBFGS = ("torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS")
"""The paths of torch's only class that calls a closure."""
NEEDS_A_CLOSURE = "needs a closure that recomputes the loss, which the training loop doesn't pass"
"""Why torch.optim.LBFGS is refused."""
NEEDS_THE_METRIC = ("needs the metric of an evaluation, which a step doesn't have", "use schedule=plateau instead")
"""Why torch's ReduceLROnPlateau is refused, and what to type instead."""
OF_SCHEDULES = ("optimizer", "total_steps", "steps_per_epoch")
"""Arguments that a schedule of one's own gets from hpctrain if its signature has them."""


def check_targets(group: str, node: Any) -> None:
    """Check the `_target_` of task, model, optimizer, schedule or callbacks.

    The class has to exist, and to take the arguments given. What the source doesn't show, such as names that a module
    defines at run time, is accepted.

    Raises:
        ConfigError: names the key, and what was probably meant.
    """
    if isinstance(node, WarmUp):  # a schedule without a class
        return
    if not isinstance(node, dict):
        raise ConfigError(group, node, "is not a group of keys", f"choose an option: {group}=NAME")
    if group == "model" and node.get("_target_") is None:
        return
    if group == "optimizer":
        for each in named_optimizers(node):
            check_optimizer(each.key, each.node, skipped=NAMED_KEYS if each.name else HANDLING_KEYS)
            own = None if each.schedule is None else schedule_of(f"{each.key}.schedule", each.schedule)
            if isinstance(own, Mapping):
                check_schedule(f"{each.key}.schedule", own)
    elif group == "schedule":
        check_schedule(group, node)
    elif group == "callbacks":
        for name, entry in node.items():
            _check_callback(f"callbacks.{name}", entry)
    else:
        _check(group, node)


def check_optimizer(key: str, node: Mapping[str, Any], *, skipped: Collection[str]) -> None:
    """Check an optimizer's class and options, and those of its groups of parameters.

    Args:
        key: full name of its node.
        node: its keys.
        skipped: keys that hpctrain itself acts on.

    Raises:
        ConfigError: names the key, and what was probably meant.
    """
    if node.get("_target_") in LBFGS:
        raise ConfigError(f"{key}._target_", node["_target_"], NEEDS_A_CLOSURE, "choose another class of torch.optim")
    rate = node.get("lr", 1.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ConfigError(f"{key}.lr", rate, "must be a number above 0", f"set {key}.lr to one")
    # the class gets the parameters first
    known = _check(key, node, skipped=skipped, positional=1)
    own = {name: value for name, value in node.items() if name not in skipped and name != "_target_"}
    _check_values(key, node["_target_"], own)
    schema = _shipped(node)
    for entry in entries_of(key, node):
        check_options(entry, known, own)
        _check_values(entry.key, node["_target_"], entry.options)
        for name, value in entry.options.items():
            try:
                if schema is not None:
                    schema(**{**node, name: value})
            except ConfigError as error:
                raise ConfigError(f"{entry.key}.{name}", value, error.problem, "correct it") from error


def _check_values(key: str, target: str, options: Mapping[str, Any]) -> None:
    """Check the values of options that are known for the class, or mean the same in any class."""
    if (schema := _schema_of(target, "optimizer")) is not None:
        _check_given(schema, key, options)
    for name, value in options.items():
        # no class of torch.optim takes null for a number
        if value is not None or target.startswith("torch.optim."):
            for check in OF_ANY_CLASS.get(name, ()):
                check(f"{key}.{name}", value)


def check_schedule(key: str, node: Mapping[str, Any]) -> None:
    """Check the `_target_` of a schedule of one's own.

    Args:
        key: full name of the schedule's group.
        node: its keys.

    Raises:
        ConfigError: as from `check_targets`.
    """
    if str(node.get("_target_")).startswith("torch.") and str(node["_target_"]).endswith(".ReduceLROnPlateau"):
        raise ConfigError(f"{key}._target_", node["_target_"], *NEEDS_THE_METRIC)
    _check(key, node, provided=OF_SCHEDULES)


def _check_callback(key: str, node: Any) -> None:
    if not isinstance(node, Mapping):
        problem = "is not a callback: in a file of conf/callbacks, all keys are below a name of the callback's own"
        raise ConfigError(key, node, problem, f"write NAME: and indent {key.rpartition('.')[2]} below it")
    _check(key, node)
    target = node["_target_"]
    if (schema := _schema_of(target, "callbacks")) is not None:
        _check_given(schema, key, node)
    else:
        check_callback(key, target)


def _check(
    key: str,
    node: Mapping[str, Any],
    *,
    skipped: Collection[str] = (),
    positional: int = 0,
    provided: Collection[str] = (),
) -> Collection[str] | None:
    """Check a class and its arguments; return the names of those that it takes, None if they aren't known."""
    target = _path_of(key, node)
    given = {name: value for name, value in node.items() if name != "_target_" and name not in skipped}
    for name, value in given.items():
        if isinstance(value, Mapping) and "_target_" in value:
            _check(f"{key}.{name}", value)
    if _shipped(node) is not None:
        return given
    if is_own(target):
        return None
    try:
        signature = signature_of(*_find(key, target))
    except UnknownError:
        return None
    known = dict(list(signature.arguments.items())[positional:])
    for name, value in given.items():
        if name not in known and not signature.takes_any:
            remedy = f"it takes {listed(known)}" if known else "remove it: the class takes no argument"
            near = difflib.get_close_matches(name, [*known, *skipped], n=1)
            problem = f"{target} has no argument {name}"
            raise ConfigError(f"{key}.{name}", value, problem, f"did you mean {key}.{near[0]}?" if near else remedy)
    missing = [name for name, optional in known.items() if name not in (*given, *provided) and not optional]
    if missing:
        problem = f"needs the argument{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        remedy = f"add {' '.join(f'+{key}.{name}=VALUE' for name in missing)}"
        raise ConfigError(f"{key}._target_", target, problem, remedy)
    if (schema := _schema_of(target)) is not None:
        _check_given(schema, key, given)
    return None if signature.takes_any else list(known)


def _path_of(key: str, node: Mapping[str, Any]) -> str:
    target = node.get("_target_")
    if target is None:
        raise ConfigError(f"{key}._target_", None, "must name a class", f"set {key}._target_=module.Class")
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        raise ConfigError(f"{key}._target_", target, "is not an import path", f"write {key}._target_=module.Class")
    return target


def _schema_of(target: str, *groups: str) -> type | None:
    """Return the schema of a class that comes with hpctrain, in any group or in these; None for any other."""
    among = groups or ("task", "model", "optimizer", "callbacks")
    schemas = (schema for group in among for schema in OPTIONS[group].values())
    defaults = ((schema, {field.name: field.default for field in fields(schema)}) for schema in schemas)
    return next((schema for schema, default in defaults if default.get("_target_") == target), None)


def _shipped(node: Mapping[str, Any]) -> type | None:
    """Return the schema of the option of hpctrain's own that has these keys: they are typed and checked already."""
    schema = _schema_of(node["_target_"])
    return schema if schema is not None and node.keys() == {field.name for field in fields(schema)} else None


def _find(key: str, target: str) -> tuple[ModuleSource, Definition]:
    try:
        return definition_of(target)
    except AbsentError as error:
        if not error.module:
            raise _module_not_found(key, target) from error
        near = difflib.get_close_matches(error.name, error.known, n=1)
        corrected = target.replace(f"{error.module}.{error.name}", f"{error.module}.{near[0]}", 1) if near else ""
        public = sorted(name for name in error.known if not name.startswith("_"))
        remedy = f"did you mean {corrected}?" if near else f"it has {listed(public) or 'no names'}"
        raise ConfigError(f"{key}._target_", target, str(error), remedy) from error
    except SyntaxError as error:
        problem = f"{error.filename}, line {error.lineno}, is not valid Python: {error.msg}"
        raise ConfigError(f"{key}._target_", target, problem, "correct the file") from error


def _module_not_found(key: str, target: str) -> ConfigError:
    first, _, rest = target.partition(".")
    here = [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    problem = f"the module {first} was not found"
    if sys.flags.safe_path and first in here:
        name = "PYTHONSAFEPATH" if os.environ.get("PYTHONSAFEPATH") else "python -P"
        problem += f": it is in this folder, where Python doesn't look with {name}"
        remedy = f"leave out {name}, or set PYTHONPATH={shlex.quote(str(Path.cwd()))}"
        return ConfigError(f"{key}._target_", target, problem, remedy)
    near = difflib.get_close_matches(first, here, n=1)
    remedy = (
        f"did you mean {near[0]}.{rest}?" if near else "run the command in the folder that contains it, or install it"
    )
    return ConfigError(f"{key}._target_", target, problem, remedy)


def _check_given(schema: type, key: str, given: Mapping[str, Any]) -> None:
    """Check values that a file of one's own gives to some of a schema's fields: their types, and as `Checked` does.

    Args:
        schema: a dataclass.
        key: full name of the node that has them.
        given: by name; others than the schema's are ignored.

    Raises:
        ConfigError: a value is wrong; names its key in the node.
    """
    typed = OmegaConf.structured(schema)
    for name, checks in require.checks_of(schema).items():
        if name not in given:
            continue
        try:
            typed[name] = given[name]
            # the class gets the value as it was written, and not as OmegaConf converts it
            is_converted = typed[name] != given[name]
        # a number of hundreds of digits overflows
        except (OmegaConfBaseException, OverflowError) as error:
            raise require.wrong_type(schema, name, f"{key}.{name}", given[name]) from error
        # a text that OmegaConf converts is no number, so the checks of numbers would fail on it
        if not (is_converted and isinstance(given[name], str)):
            require.check_one(f"{key}.{name}", given[name], checks)
        if is_converted:
            raise require.wrong_type(schema, name, f"{key}.{name}", given[name])


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
        return _of_function(definition)
    bases, required = lineage(source, definition)
    for number, (_, node) in enumerate(bases):
        own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if own:
            return _of_function(own[0], method=True)
        if _generates_constructor(node):
            return _of_fields(bases[number:])
    return Signature(dict.fromkeys(required, False))


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


def _generates_constructor(node: ast.ClassDef) -> bool:
    """Whether `@dataclass` makes the class's constructor; `@dataclass(init=False)` doesn't."""
    options = {
        option.arg: ast.unparse(option.value)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        for option in decorator.keywords
    }
    return bool(node.decorator_list) and options.get("init", "True") == "True"


def _of_fields(chain: Chain) -> Signature:
    """Return the arguments of the constructor that `@dataclass` makes for the first of these classes."""
    known: dict[str, bool] = {}
    inherited: set[str] = set()  # @dataclass takes an attribute of a base for the default of a field of its name
    for source, node in reversed(chain):
        for statement in node.body if node.decorator_list else ():
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name, annotation = statement.target.id, ast.unparse(statement.annotation).strip("'\"")
            options = _field_options(source, statement.value)
            if "ClassVar" in annotation or annotation.endswith("KW_ONLY") or options.get("init") == "False":
                known.pop(name, None)  # also a field of a base, which this one replaces
            else:
                known[name] = name in inherited or not options.keys().isdisjoint(("default", "default_factory"))
        inherited.update(name for name, _ in bindings(node.body))
    return Signature(known)


def _field_options(source: ModuleSource, value: ast.expr | None) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, ast.Call) and qualified_name(source, value.func) == "dataclasses.field":
        return {option.arg or "": ast.unparse(option.value) for option in value.keywords}
    return {"default": ""}
