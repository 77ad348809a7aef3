"""Whether task or model has a plan for tensor parallelism, as far as their sources show it; the ranks ask them."""

from __future__ import annotations

import ast
from collections.abc import Collection

from hpctrain.config.main_module import is_own
from hpctrain.config.module_source import AbsentError, ModuleSource, UnknownError, bindings, qualified_name
from hpctrain.config.root import Config
from hpctrain.config.signature import lineage_of
from hpctrain.config.task_methods import BASE, Chain
from hpctrain.errors import ConfigError
from hpctrain.phrases import page

METHOD = "tensor_parallel_plan"
ANSWERS_FOR_OTHERS = ("__getattr__", "__getattribute__")


def require_plan(config: Config, degree: int) -> None:
    """Refuse tensor parallelism if it is certain that neither the task nor the model has a plan.

    Args:
        config: of a training.
        degree: number of ranks that are to compute each layer together.

    Raises:
        ConfigError: neither has one.
    """
    task, model = str(config.task["_target_"]), config.model["_target_"]
    if is_own(task) or (model is not None and is_own(model)):
        return
    try:
        chain = lineage_of(task)
        built = str(model) if model is not None else _built_by(chain)
        # of torch's own modules, none has a plan
        classes = [*chain, *([] if built.startswith("torch.nn.") else lineage_of(built))]
        own = [(source, one) for source, one in classes if (source.name, one.name) != BASE]
        names = {one.name for _, one in own}
        is_certain = not any(_may_have_plan(source, one, names) for source, one in own)
    except (AbsentError, UnknownError, SyntaxError, OSError):
        return
    if is_certain:
        raise without_plan(degree, model=built.rpartition(".")[2], task=task.rpartition(".")[2])


def without_plan(degree: int, *, model: str, task: str) -> ConfigError:
    """Return the error for a model whose layers the ranks can't divide.

    Args:
        degree: number of ranks that are to compute each layer together.
        model: its class.
        task: its class.
    """
    problem = f"{model} has no plan for it, and neither has {task}"
    remedy = f"define {METHOD} in one of them ({page('how_to/large_models.md')}), or use parallel=fsdp"
    return ConfigError("parallel.tensor_degree", degree, problem, remedy)


def _built_by(chain: Chain) -> str:
    """Return the import path of the class that a task's `build_model` returns, if it consists of that call.

    Raises:
        UnknownError: it does more, or it isn't the task's own.
    """
    for source, one in chain:
        found = [statement for name, statement in bindings(one.body) if name == "build_model"]
        if not found:
            continue
        method = found[0]
        if len(found) > 1 or not isinstance(method, ast.FunctionDef) or method.decorator_list:
            raise UnknownError
        body = method.body[1:] if ast.get_docstring(method) is not None else method.body
        returned = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
        name = qualified_name(source, returned.func) if isinstance(returned, ast.Call) else ""
        if "." not in name:
            raise UnknownError
        return name
    raise UnknownError


def _may_have_plan(source: ModuleSource, node: ast.ClassDef, names: Collection[str]) -> bool:
    """Whether a class may have a plan, or its module may give one to a class of these names."""
    if source.path is None or any(name in ANSWERS_FOR_OTHERS for name, _ in bindings(node.body)):
        return True
    text = source.path.read_text(encoding="utf-8", errors="replace")
    if METHOD in text:
        return True
    calls = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call))
    passed = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
    return not passed.isdisjoint(names)
