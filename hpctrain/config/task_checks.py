"""Checks of the class of a task or a callback, by its source alone; the ranks check the class itself."""

from __future__ import annotations

import ast
import contextlib
import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from hpctrain.config.optimizer import NamedOptimizer, losses_of, named_optimizers
from hpctrain.config.root import Config
from hpctrain.config.source import UnknownError, bindings, class_chain
from hpctrain.errors import ConfigError
from hpctrain.phrases import listed

TASK = ("hpctrain.tasks.task", "Task")
"""The module and the name of the class that tasks derive from."""
METHODS: Mapping[str, Sequence[str]] = {
    "prepare": (),
    "build_model": (),
    "place": ("model", "devices"),
    "tensor_parallel_plan": (),
    "pipeline_plan": (),
    "train_dataset": (),
    "order": ("num_samples", "seed"),
    "eval_dataset": (),
    "loss": ("model", "batch"),
    "evaluate": ("model", "batch"),
    "derive": ("means",),
    "build_metrics": (),
    "compute_metrics": ("samples",),
    "num_samples": ("batch",),
    "loss_weight": ("batch",),
    "to_device": ("batch", "device"),
    "state_dict": (),
    "load_state_dict": ("state",),
}
"""The methods of a task that the training calls, and with what."""
METHODS_OF_LIGHTNING = {
    "training_step": "define loss(self, model, batch)",
    "validation_step": "define evaluate(self, model, batch)",
    "test_step": "define evaluate(self, model, batch)",
    "configure_optimizers": "choose optimizer=NAME and schedule=NAME",
    "train_dataloader": "define train_dataset(self)",
    "val_dataloader": "define eval_dataset(self)",
    "test_dataloader": "define eval_dataset(self)",
    "prepare_data": "define prepare(self)",
    "setup": "build the data in train_dataset and eval_dataset",
    "configure_model": "define build_model(self)",
    "configure_callbacks": "choose callbacks=[NAME]",
    "configure_gradient_clipping": "set trainer.clip_grad_norm",
    "transfer_batch_to_device": "define to_device(self, batch, device)",
    "on_save_checkpoint": "define state_dict(self)",
    "on_load_checkpoint": "define load_state_dict(self, state)",
}
"""Methods of a LightningModule or LightningDataModule, and what does the same here."""
HOOK_OF_LIGHTNING = re.compile(r"on_(fit|train|validation|test|before|after)_\w+|(training|validation|test)_epoch_end")
CLOSE = 0.85
"""Similarity (`difflib`) from which a name is taken for a typo of a method: `evalute`, but not `d_loss` or `losses`."""
CALLBACK = "hpctrain.callbacks.callback.Callback"
"""The class that callbacks derive from."""
HOOKS: Mapping[str, Sequence[str]] = {
    "on_start": ("training",),
    "before_step": ("training",),
    "after_backward": ("training",),
    "after_step": ("training",),
    "after_evaluation": ("training", "metrics"),
    "after_save": ("training",),
    "on_stop": ("training",),
    "on_end": ("training",),
}
"""The methods of a callback that the training calls, and with what. A new one is also a method of `Callback`, and the
training loop calls it, by `Callbacks.hooks` of hpctrain.train.callbacks."""
STATE_METHODS = ("state_dict", "load_state_dict")
"""The methods that save and restore a callback's state."""
CLOSE_TO_A_HOOK = 0.9
"""Similarity from which a name is taken for a typo of a hook: `aftr_step`, but not `load_state`."""


def check_task(config: Config) -> None:
    """Check the class of the task.

    Raises:
        ConfigError: it isn't a task, lacks a method, or has one that can't be called.
    """
    target, optimizers = _target(config), named_optimizers(config.optimizer)
    try:
        classes = _own_classes(config)
    except UnknownError:
        return
    _require_methods(target, _methods(classes), optimizers)
    for node in classes:
        _check_arguments("task", target, node, called_methods(losses_of(optimizers)))


def uncalled_methods(config: Config) -> list[str]:
    """Return a line on each method that looks as if hpctrain called it, as far as the source of the task shows."""
    try:
        classes = _own_classes(config)
    except UnknownError:
        return []
    mentioned = {name for node in classes for name in _mentioned(node)}
    mentioned.update(called_methods(losses_of(named_optimizers(config.optimizer))))
    return warnings_about(_target(config), [name for node in classes for name in _functions(node)], mentioned)


def may_be_evaluated(config: Config) -> bool:
    """Whether the task may have data to evaluate on; False only if its source shows that it has none."""
    try:
        classes = _own_classes(config)
    except UnknownError:
        return True
    return "eval_dataset" in _methods(classes) or any("eval_dataset" in _stored(node) for node in classes)


def called_methods(losses: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the methods of a task that the training calls, and with what.

    Args:
        losses: methods that compute losses, as the configuration names them.
    """
    return {**METHODS, **dict.fromkeys(losses, METHODS["loss"])}


def _require_methods(target: str, methods: Collection[str], optimizers: Sequence[NamedOptimizer]) -> None:
    """Require the data and the losses.

    Args:
        target: the task's class.
        methods: that it has.
        optimizers: of the configuration, whose losses they have to include.

    Raises:
        ConfigError: it lacks one.
    """
    for optimizer in optimizers:
        if optimizer.loss in METHODS and optimizer.loss != "loss":
            problem = f"has another purpose: it is called as {optimizer.loss}({', '.join(METHODS[optimizer.loss])})"
            raise ConfigError(f"{optimizer.key}.loss", optimizer.loss, problem, "name a method that computes a loss")
        if optimizer.loss in methods:
            continue
        if not optimizer.name:
            raise missing_method_error(target, optimizer.loss)
        public = [name for name in methods if not name.startswith("_")]
        near = difflib.get_close_matches(optimizer.loss, public, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"define it; the class has {listed(public)}"
        raise ConfigError(f"{optimizer.key}.loss", optimizer.loss, f"{target} has no such method", remedy)
    if "train_dataset" not in methods:
        raise missing_method_error(target, "train_dataset")


def missing_method_error(target: str, method: str) -> ConfigError:
    """Return the error for a class without a method that it needs."""
    arguments = ", ".join(("self", *METHODS.get(method, ())))
    return ConfigError("task._target_", target, f"has no method {method}", f"define {method}({arguments})")


def warnings_about(target: str, methods: Collection[str], mentioned: Collection[str]) -> list[str]:
    """Return a line on each method that looks as if hpctrain called it, and that the class doesn't call itself.

    They aren't errors, since a user's other code may call such a method.

    Args:
        target: the task's class.
        methods: names of its methods.
        mentioned: names that the class itself uses, and those that the training calls.
    """
    lines = []
    for method in dict.fromkeys(methods):
        if method in mentioned or method.startswith("_"):
            continue
        if remedy := _remedy(method):
            problem = f"has {method}, which hpctrain does not call"
            lines.append(f"task._target_={target} {problem}: {remedy} (or begin the name with _ if this is intended)")
    return lines


def _remedy(method: str) -> str:
    """Return what to write instead of a method; empty if its name isn't one of Lightning's, nor almost one of ours."""
    if method in METHODS_OF_LIGHTNING:
        return METHODS_OF_LIGHTNING[method]
    if HOOK_OF_LIGHTNING.fullmatch(method):
        return "write a callback"
    near = difflib.get_close_matches(method, METHODS, n=1, cutoff=CLOSE)
    return f"did you mean {near[0]}?" if near else ""


def call_mismatch_error(key: str, target: str, method: str, arguments: Sequence[str], why: str) -> ConfigError:
    """Return the error for a method or hook with other arguments than it is called with.

    Args:
        key: full name of the node that names the class.
        target: the class.
        method: its method.
        arguments: that it is called with.
        why: that fails.
    """
    problem = f"its {method} can't be called: {why}"
    return ConfigError(f"{key}._target_", target, problem, f"write def {method}({', '.join(('self', *arguments))})")


def _check_arguments(key: str, target: str, node: ast.ClassDef, calls: Mapping[str, Sequence[str]]) -> None:
    """Refuse methods of a class that don't take the arguments that they are called with."""
    for name, method in _functions(node).items():
        if name not in calls or method.decorator_list:
            continue
        signature, num_passed = method.args, 1 + len(calls[name])
        names = [argument.arg for argument in (*signature.posonlyargs, *signature.args)]
        num_needed = len(names) - len(signature.defaults) + sum(default is None for default in signature.kw_defaults)
        if num_passed < num_needed or (num_passed > len(names) and signature.vararg is None):
            raise call_mismatch_error(key, target, name, calls[name], f"it takes {', '.join(names)}")


def check_callback(key: str, target: str) -> None:
    """Check the class of a callback.

    Args:
        key: full name of its entry.
        target: the class's import path.

    Raises:
        ConfigError: it isn't a callback, or has a method that looks like a hook and isn't one, or can't be called.
    """
    try:
        chain = class_chain(target)
    except UnknownError:
        return
    names = [f"{source.name}.{node.name}" for source, node in chain]
    if CALLBACK not in names:
        raise not_a_callback(key, target)
    defined: list[str] = []
    for _, node in chain[: names.index(CALLBACK)]:
        for name, statement in bindings(node.body):
            defined.append(name)
            if isinstance(statement, ast.FunctionDef) and (mistake := unknown_hook_error(key, target, name)):
                raise mistake
            if isinstance(statement, ast.AsyncFunctionDef) and name in HOOKS and not statement.decorator_list:
                raise not_plain_function_error(key, target, name, "a coroutine")
        _check_arguments(key, target, node, HOOKS)
    if (mistake := incomplete_state_error(key, target, defined)) is not None:
        raise mistake


def not_a_callback(key: str, target: str) -> ConfigError:
    """Return the error for a class that isn't a callback."""
    problem = "is not a subclass of hpctrain.callbacks.Callback"
    return ConfigError(f"{key}._target_", target, problem, "derive the class from it")


def unknown_hook_error(key: str, target: str, method: str) -> ConfigError | None:
    """Return the error for a method that looks like a hook and isn't one; None for any other.

    Args:
        key: full name of the callback's entry.
        target: its class.
        method: name of a method.
    """
    method_names = (*HOOKS, *STATE_METHODS)
    if method in method_names or method.startswith("_"):
        return None
    looks_like_a_hook = re.match("(on|before|after)_", method)
    near = difflib.get_close_matches(method, method_names, n=1, cutoff=0.0 if looks_like_a_hook else CLOSE_TO_A_HOOK)
    if not near:
        return None
    problem = f"has {method}, which is not a hook and would never be called"
    remedy = f"did you mean {near[0]}? The hooks are {', '.join(HOOKS)}; begin the name of any other method with _"
    return ConfigError(f"{key}._target_", target, problem, remedy)


def not_plain_function_error(key: str, target: str, hook: str, kind: str) -> ConfigError:
    """Return the error for a hook whose call would only make an object, and run nothing.

    Args:
        key: full name of the callback's entry.
        target: its class.
        hook: the name of its method.
        kind: what it is instead of a plain function: `a coroutine` or `a generator`.
    """
    problem = f"its {hook} is {kind}, so calling it would run nothing"
    return ConfigError(f"{key}._target_", target, problem, f"write a plain def {hook}, without async or yield")


def incomplete_state_error(key: str, target: str, defined: Collection[str]) -> ConfigError | None:
    """Return the error for a class that has one of the two methods of the state and lacks the other; None if not.

    Args:
        key: full name of the callback's entry.
        target: its class.
        defined: names of the methods that it overrides.
    """
    state_methods = [name for name in STATE_METHODS if name in defined]
    if len(state_methods) != 1:
        return None
    (missing,) = set(STATE_METHODS) - set(state_methods)
    problem = f"has {state_methods[0]} and not {missing}, so a resume would lose the state"
    return ConfigError(f"{key}._target_", target, problem, f"define {missing}, too")


def metric_name(config: Config) -> str | None:
    """Return the metric's name, as the task's `evaluate` names it; None if only the task's class itself can tell."""
    if config.checkpoint.metric is not None:
        return config.checkpoint.metric
    name = _constants_of(config).get("metric")
    return name if isinstance(name, str) else None


def metric_mode(config: Config) -> str | None:
    """Return `min` or `max`: which values of the metric are better; None if only the task's class itself can tell."""
    checkpoint = config.checkpoint
    if checkpoint.metric_mode is not None:
        return checkpoint.metric_mode
    constants = _constants_of(config)
    if checkpoint.metric in (None, constants.get("metric")):
        mode = constants.get("metric_mode")
        return mode if mode in ("min", "max") else None
    return "min" if checkpoint.metric == "loss" else None


def may_have_mode(config: Config) -> bool:
    """Whether something may define which values of the metric are better; False only if nothing can."""
    name = _constants_of(config).get("metric")
    return metric_mode(config) is not None or name is None or config.checkpoint.metric in (None, name)


def _constants_of(config: Config) -> dict[str, object]:
    """Return the constants that the task's class or its bases set in their bodies, and nothing else sets or defines."""
    constants: dict[str, ast.expr | None] = {}
    with contextlib.suppress(UnknownError):
        for _, node in reversed(class_chain(_target(config))):
            constants |= _assigned(node)
            for name in (*_stored(node), *_functions(node)):
                constants.pop(name, None)
    return {name: value.value for name, value in constants.items() if isinstance(value, ast.Constant)}


def _target(config: Config) -> str:
    """Return the import path of the task's class; empty for a stored configuration without a task."""
    return str((config.task or {}).get("_target_", ""))


def _own_classes(config: Config) -> list[ast.ClassDef]:
    """Return the task's class and its bases without hpctrain's.

    Raises:
        ConfigError: it isn't a task.
        UnknownError: as `class_chain`.
    """
    chain = class_chain(_target(config))
    classes = [node for source, node in chain if (source.name, node.name) != TASK]
    if len(classes) == len(chain):
        problem = "is not a subclass of hpctrain.tasks.Task"
        raise ConfigError("task._target_", _target(config), problem, "derive the class from it")
    return classes


def _functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {name: statement for name, statement in bindings(node.body) if isinstance(statement, ast.FunctionDef)}


def _methods(classes: Sequence[ast.ClassDef]) -> list[str]:
    """Return the names that classes define, but for those that the first class to define them sets to a constant."""
    methods: dict[str, bool] = {}
    for node in classes:
        assigned = _assigned(node)
        for name, _ in bindings(node.body):
            methods.setdefault(name, not isinstance(assigned.get(name), ast.Constant))
    return [name for name, is_method in methods.items() if is_method]


def _assigned(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return what a class's body assigns to names."""
    return {
        target.id: statement.value
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    }


def _stored(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class's methods set, such as `self.NAME = ...`."""
    attributes = (attribute for attribute in ast.walk(node) if isinstance(attribute, ast.Attribute))
    return {attribute.attr for attribute in attributes if isinstance(attribute.ctx, ast.Store)}


def _mentioned(node: ast.ClassDef) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute | ast.Name) and isinstance(child.ctx, ast.Load):
            yield child.attr if isinstance(child, ast.Attribute) else child.id
