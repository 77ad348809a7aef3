"""Check the methods of a task's class: those it needs, what they are called with, and names that look like mistakes."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from hpctrain.config.module_source import ModuleSource, UnknownError, bindings
from hpctrain.config.named_optimizers import NamedOptimizer, losses_of, named_optimizers
from hpctrain.config.root import Config
from hpctrain.config.signature import lineage_of, unfit
from hpctrain.errors import ConfigError
from hpctrain.phrases import listed

BASE = ("hpctrain.tasks.task", "Task")
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

Chain = Sequence[tuple[ModuleSource, ast.ClassDef]]


def check_task(config: Config) -> None:
    """Check the class of the task as far as its source shows it; the ranks check the class itself.

    Raises:
        ConfigError: it isn't a task, lacks a method, or has one that can't be called.
    """
    target = str(config.task["_target_"])
    optimizers = named_optimizers(config.optimizer)
    try:
        chain = lineage_of(target)
    except (UnknownError, SyntaxError):
        return
    if BASE not in [(source.name, one.name) for source, one in chain]:
        raise not_a_task(target)
    own = _own(chain)
    require_methods(target, _methods(own), optimizers)
    known = called_methods(losses_of(optimizers))
    for one in own:
        for name, statement in bindings(one.body):
            if isinstance(statement, ast.FunctionDef) and name in known:
                why = unfit(statement, 1 + len(known[name]))
                if why is not None:
                    raise cant_be_called(target, name, known[name], why)


def uncalled_methods(config: Config) -> list[str]:
    """Return a line on each method that looks as if hpctrain called it, as far as the source of the task shows."""
    target = str(config.task["_target_"])
    try:
        own = _own(lineage_of(target))
    except (UnknownError, SyntaxError):
        return []
    mentioned = called_methods(losses_of(named_optimizers(config.optimizer))).keys() | {
        name for one in own for name in _mentioned(one)
    }
    methods = [name for one in own for name, statement in bindings(one.body) if isinstance(statement, ast.FunctionDef)]
    return warnings_about(target, methods, mentioned)


def may_be_evaluated(config: Config) -> bool:
    """Whether the task may have data to evaluate on; False only if its source shows that it has none."""
    try:
        own = _own(lineage_of(str(config.task["_target_"])))
    except (UnknownError, SyntaxError, KeyError):
        return True
    assigned = {
        each.attr
        for one in own
        for each in ast.walk(one)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    return "eval_dataset" in assigned.union(_methods(own))


def called_methods(losses: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the methods of a task that the training calls, and with what.

    Args:
        losses: methods that compute losses, as the configuration names them.
    """
    return {**METHODS, **dict.fromkeys(losses, METHODS["loss"])}


def require_methods(target: str, methods: Collection[str], optimizers: Sequence[NamedOptimizer]) -> None:
    """Require the data and the losses.

    Args:
        target: the task's class.
        methods: that it has.
        optimizers: of the configuration, whose losses they have to include.

    Raises:
        ConfigError: it lacks one.
    """
    for each in optimizers:
        if each.loss in METHODS and each.loss != "loss":
            problem = f"has another purpose: it is called as {each.loss}({', '.join(METHODS[each.loss])})"
            raise ConfigError(f"{each.key}.loss", each.loss, problem, "name a method that computes a loss")
        if each.loss in methods:
            continue
        if not each.name:
            raise lacks(target, each.loss)
        public = [name for name in methods if not name.startswith("_")]
        near = difflib.get_close_matches(each.loss, public, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"define it; the class has {listed(public)}"
        raise ConfigError(f"{each.key}.loss", each.loss, f"{target} has no such method", remedy)
    if "train_dataset" not in methods:
        raise lacks(target, "train_dataset")


def lacks(target: str, method: str) -> ConfigError:
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
    found = []
    for method in dict.fromkeys(methods):
        if method in mentioned or method.startswith("_"):
            continue
        if remedy := _remedy(method):
            problem = f"has {method}, which hpctrain does not call"
            found.append(f"task._target_={target} {problem}: {remedy} (or begin the name with _ if this is intended)")
    return found


def _remedy(method: str) -> str:
    """Return what to write instead of a method; empty if its name isn't one of Lightning's, nor almost one of ours."""
    if method in METHODS_OF_LIGHTNING:
        return METHODS_OF_LIGHTNING[method]
    if HOOK_OF_LIGHTNING.fullmatch(method):
        return "write a callback"
    near = difflib.get_close_matches(method, METHODS, n=1, cutoff=CLOSE)
    return f"did you mean {near[0]}?" if near else ""


def cant_be_called(target: str, method: str, arguments: Sequence[str], why: str) -> ConfigError:
    """Return the error for a method with other arguments."""
    problem = f"its {method} can't be called: {why}"
    return ConfigError("task._target_", target, problem, f"write def {method}({', '.join(('self', *arguments))})")


def not_a_task(target: str) -> ConfigError:
    """Return the error for a class that isn't a task."""
    return ConfigError("task._target_", target, "is not a subclass of hpctrain.tasks.Task", "derive the class from it")


def _own(chain: Chain) -> list[ast.ClassDef]:
    return [one for source, one in chain if (source.name, one.name) != BASE]


def _methods(classes: Sequence[ast.ClassDef]) -> list[str]:
    """Return the names that classes define, but for those that the first class to define them sets to a constant."""
    methods: dict[str, bool] = {}
    for one in classes:
        constants = _constants(one)
        for name, _ in bindings(one.body):
            methods.setdefault(name, name not in constants)
    return [name for name, is_method in methods.items() if is_method]


def _constants(node: ast.ClassDef) -> set[str]:
    return {
        target.id
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    }


def _mentioned(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute | ast.Name) and isinstance(each.ctx, ast.Load):
            yield each.attr if isinstance(each, ast.Attribute) else each.id
