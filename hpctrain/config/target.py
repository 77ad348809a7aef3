"""The classes that a configuration names by `_target_`, checked by their source: the login half doesn't import them.

Paths that begin with `__main__` name classes of the program that imports hpctrain: another module in each program.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeGuard

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config import require
from hpctrain.config.optimizer import (
    COMMON_OPTION_CHECKS,
    NAMED_KEYS,
    OPTION_KEYS,
    check_options,
    entries_of,
    named_optimizers,
    require_positive,
)
from hpctrain.config.root import OPTIONS, Config
from hpctrain.config.schedule import WarmUp, schedule_of
from hpctrain.config.source import (
    AbsentError,
    Definition,
    ModuleSource,
    UnknownError,
    definition_of,
    signature_of,
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
MAIN = "__main__"
PASSED_TASK = f"{MAIN}.passed_task"
"""The path of a function without a name that was passed as the task."""
SCHEDULE_ARGUMENTS = ("optimizer", "total_steps", "steps_per_epoch")
"""Arguments that a schedule of one's own gets from hpctrain if its signature has them."""

_bound: ContextVar[tuple[str, Callable[..., Any]] | None] = ContextVar("bound", default=None)


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
        for optimizer in named_optimizers(node):
            check_optimizer(optimizer.key, optimizer.node, skipped=NAMED_KEYS if optimizer.name else OPTION_KEYS)
            if optimizer.schedule is not None:
                key = f"{optimizer.key}.schedule"
                schedule = schedule_of(key, optimizer.schedule)
                if isinstance(schedule, Mapping):
                    check_schedule(key, schedule)
    elif group == "schedule":
        check_schedule(group, node)
    elif group == "callbacks":
        for name, entry in node.items():
            _check_callback(f"callbacks.{name}", entry)
    else:
        _check_target(group, node)


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
    require_positive(f"{key}.lr", node.get("lr", 1.0), f"set {key}.lr to one")
    # the class gets the parameters first
    argument_names = _check_target(key, node, skipped=skipped, positional=1)
    class_options = {name: value for name, value in node.items() if name not in skipped and name != "_target_"}
    _check_values(key, node["_target_"], class_options)
    schema = _shipped_schema(node)
    for entry in entries_of(key, node):
        check_options(entry, argument_names, class_options)
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
        _check_values_by_schema(schema, key, options)
    for name, value in options.items():
        # no class of torch.optim takes null for a number
        if value is not None or target.startswith("torch.optim."):
            for check in COMMON_OPTION_CHECKS.get(name, ()):
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
    _check_target(key, node, provided=SCHEDULE_ARGUMENTS)


def _check_callback(key: str, node: Any) -> None:
    if not isinstance(node, Mapping):
        problem = "is not a callback: in a file of conf/callbacks, all keys are below a name of the callback's own"
        raise ConfigError(key, node, problem, f"write NAME: and indent {key.rpartition('.')[2]} below it")
    _check_target(key, node)
    target = node["_target_"]
    if (schema := _schema_of(target, "callbacks")) is not None:
        _check_values_by_schema(schema, key, node)
    else:
        check_callback(key, target)


def _check_target(
    key: str,
    node: Mapping[str, Any],
    *,
    skipped: Collection[str] = (),
    positional: int = 0,
    provided: Collection[str] = (),
) -> Collection[str] | None:
    """Check a class and its arguments; return the names of those that it takes, None if they aren't known."""
    target = _path_of(key, node)
    arguments = {name: value for name, value in node.items() if name != "_target_" and name not in skipped}
    for name, value in arguments.items():
        if isinstance(value, Mapping) and "_target_" in value:
            _check_target(f"{key}.{name}", value)
    if _shipped_schema(node) is not None:
        return arguments
    if is_own(target):
        return None
    try:
        signature = signature_of(*_find(key, target))
    except UnknownError:
        return None
    parameters = dict(list(signature.arguments.items())[positional:])
    for name, value in arguments.items():
        if name not in parameters and not signature.takes_any:
            remedy = f"it takes {listed(parameters)}" if parameters else "remove it: the class takes no argument"
            near = difflib.get_close_matches(name, [*parameters, *skipped], n=1)
            problem = f"{target} has no argument {name}"
            raise ConfigError(f"{key}.{name}", value, problem, f"did you mean {key}.{near[0]}?" if near else remedy)
    missing = [name for name, optional in parameters.items() if name not in (*arguments, *provided) and not optional]
    if missing:
        problem = f"needs the argument{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        remedy = f"add {' '.join(f'+{key}.{name}=VALUE' for name in missing)}"
        raise ConfigError(f"{key}._target_", target, problem, remedy)
    if (schema := _schema_of(target)) is not None:
        _check_values_by_schema(schema, key, arguments)
    return None if signature.takes_any else list(parameters)


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


def _shipped_schema(node: Mapping[str, Any]) -> type | None:
    """Return the schema of the option of hpctrain's own that has these keys: they are typed and checked already."""
    schema = _schema_of(node["_target_"])
    return schema if schema is not None and node.keys() == {field.name for field in fields(schema)} else None


def _find(key: str, target: str) -> tuple[ModuleSource, Definition]:
    try:
        return definition_of(target)
    except AbsentError as error:
        if not error.module:
            raise _module_not_found(key, target) from error
        near = difflib.get_close_matches(error.name, error.existing_names, n=1)
        corrected = target.replace(f"{error.module}.{error.name}", f"{error.module}.{near[0]}", 1) if near else ""
        public = sorted(name for name in error.existing_names if not name.startswith("_"))
        remedy = f"did you mean {corrected}?" if near else f"it has {listed(public) or 'no names'}"
        raise ConfigError(f"{key}._target_", target, str(error), remedy) from error
    except SyntaxError as error:
        problem = f"{error.filename}, line {error.lineno}, is not valid Python: {error.msg}"
        raise ConfigError(f"{key}._target_", target, problem, "correct the file") from error


def _module_not_found(key: str, target: str) -> ConfigError:
    first, _, tail = target.partition(".")
    modules = [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    problem = f"the module {first} was not found"
    if sys.flags.safe_path and first in modules:
        name = "PYTHONSAFEPATH" if os.environ.get("PYTHONSAFEPATH") else "python -P"
        problem += f": it is in this folder, where Python doesn't look with {name}"
        remedy = f"leave out {name}, or set PYTHONPATH={shlex.quote(str(Path.cwd()))}"
        return ConfigError(f"{key}._target_", target, problem, remedy)
    near = difflib.get_close_matches(first, modules, n=1)
    remedy = (
        f"did you mean {near[0]}.{tail}?" if near else "run the command in the folder that contains it, or install it"
    )
    return ConfigError(f"{key}._target_", target, problem, remedy)


def _check_values_by_schema(schema: type, key: str, values: Mapping[str, Any]) -> None:
    """Check values that a file of one's own gives to some of a schema's fields: their types, and as `Checked` does.

    Args:
        schema: a dataclass.
        key: full name of the node that has them.
        values: by name; others than the schema's are ignored.

    Raises:
        ConfigError: a value is wrong; names its key in the node.
    """
    node = OmegaConf.structured(schema)
    for name, checks in require.checks_of(schema).items():
        if name not in values:
            continue
        try:
            OmegaConf.update(
                node, name, values[name], merge=False
            )  # an assignment warns of conversions in OmegaConf 2.4
            # the class gets the value as it was written, and not as OmegaConf converts it
            is_converted = node[name] != values[name]
        # a number of hundreds of digits overflows
        except (OmegaConfBaseException, OverflowError) as error:
            raise require.wrong_type(schema, name, f"{key}.{name}", values[name]) from error
        # a text that OmegaConf converts is no number, so the checks of numbers would fail on it
        if not (is_converted and isinstance(values[name], str)):
            require.check_one(f"{key}.{name}", values[name], checks)
        if is_converted:
            raise require.wrong_type(schema, name, f"{key}.{name}", values[name])


def is_own(target: object) -> TypeGuard[str]:
    """Whether an import path names something of the program."""
    return isinstance(target, str) and target.startswith(f"{MAIN}.")


def own_targets(config: Config) -> dict[str, str]:
    """Return the keys that name classes of the program, with their import paths."""
    targets: dict[str, str] = {}

    def walk(key: str, value: object) -> None:
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inside, dict):
            for name, item in inside.items():
                walk(f"{key}.{name}" if key else str(name), item)
        elif key.endswith("._target_") and is_own(value):
            targets[key] = value

    walk("", asdict(config))
    return targets


def refuse_own_targets(config: Config, problem: str) -> None:
    """Refuse classes of the program, for a training in other processes.

    Raises:
        ConfigError: the configuration names one.
    """
    # nor are they pickled: what a class refers to can't be found reliably, and checkpoints would depend on code that no
    # file has
    for key, target in own_targets(config).items():
        name = target.rpartition(".")[2]
        remedy = f"train with hpctrain.fit, or move it into a module, such as my_task.py, and name my_task.{name}"
        raise ConfigError(key, target, problem, remedy)


def require_own_targets(config: Config) -> None:
    """Refuse classes of another program.

    Raises:
        ConfigError: this program doesn't define one that the configuration names.
    """
    for key, target in own_targets(config).items():
        if find_own(target) is None:
            problem = "only the program or notebook that started the run defines it"
            remedy = "resume it there, with hpctrain.Run(...).resume(); or move the class into a module, and name that"
            if target == PASSED_TASK:
                remedy = "there, pass the function again: fit(config, task=...), or Run(...).resume(task=...)"
            raise ConfigError(key, target, problem, remedy)


def find_own(target: str) -> Any | None:
    """Return what an import path stands for in this program; None if the program doesn't define it."""
    bound = _bound.get()
    if bound is not None and bound[0] == target:
        return bound[1]
    definition: Any = sys.modules.get(MAIN) if is_own(target) else None
    for name in target.split(".")[1:]:
        definition = getattr(definition, name, None)
    return definition


def path_of(maker: Callable[..., Any]) -> str:
    """Return the import path of a class or function; below `MAIN` if only this program has it."""
    module, name = getattr(maker, "__module__", None), getattr(maker, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and "<" not in name:
        return f"{module}.{name}"
    return PASSED_TASK


def require_maker(task: object) -> None:
    """Refuse a task that exists already.

    Raises:
        ConfigError: it isn't a class or function.
    """
    if not isinstance(task, type) and (not callable(task) or hasattr(task, "train_dataset")):
        name = type(task).__name__
        problem = "is an object, but each attempt makes its own, so that a resume is exact"
        raise ConfigError("task", f"a {name}", problem, f"pass the class {name}, or a function: lambda: {name}(...)")


def require_task(config: Config, task: Callable[..., Any]) -> None:
    """Refuse a task that isn't the configuration's.

    Raises:
        ConfigError: the configuration was composed for another one, or it isn't a class or function.
    """
    require_maker(task)
    target, passed_path = config.task["_target_"], path_of(task)
    if target != passed_path:
        problem = f"is not the task {passed_path} that was passed"
        raise ConfigError("task._target_", target, problem, "compose with hpctrain.compose([...], task=...)")


@contextmanager
def target_bound(target: str, maker: Callable[..., Any] | None) -> Iterator[None]:
    """Context manager in which an import path means ``maker``, in its thread alone; None changes nothing."""
    token = _bound.set(None if maker is None else (target, maker))
    try:
        yield
    finally:
        _bound.reset(token)
