"""Whether task or model has a plan for its layers or stages, as far as their sources show it; the ranks ask them."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

from hpctrain.config.main_module import is_own
from hpctrain.config.module_source import AbsentError, ModuleSource, UnknownError, bindings, qualified_name
from hpctrain.config.root import Config
from hpctrain.config.signature import lineage_of
from hpctrain.config.task_methods import BASE, Chain
from hpctrain.errors import ConfigError
from hpctrain.phrases import page

ANSWERS_FOR_OTHERS = ("__getattr__", "__getattribute__")


@dataclass(frozen=True, slots=True)
class PlanKind:
    """A kind of plan that a task or a model may have.

    Attributes:
        method: that returns it.
        key: of the degree that requires it.
        sequential: whether an `nn.Sequential` needs none.
    """

    method: str
    key: str
    sequential: bool = False

    def missing(self, degree: int, *, model: str, task: str) -> ConfigError:
        """Return the error for a model that has to be divided, and has no such plan.

        Args:
            degree: that requires it.
            model: its class.
            task: its class.
        """
        owners = f"{model} has no plan for it, and neither has {task}"
        problem = f"{model} isn't an nn.Sequential, and neither it nor {task} has a plan" if self.sequential else owners
        remedy = f"define {self.method} in one of them ({page('how_to/large_models.md')}), or use parallel=fsdp"
        return ConfigError(self.key, degree, problem, remedy)


TENSOR_PARALLEL = PlanKind("tensor_parallel_plan", "parallel.tensor_degree")
PIPELINE = PlanKind("pipeline_plan", "parallel.pipeline_degree", sequential=True)


def require_plan(config: Config, kind: PlanKind, degree: int) -> None:
    """Refuse to divide a model if it is certain that neither the task nor the model has a plan.

    Args:
        config: of a training.
        kind: of the plan.
        degree: that requires it.

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
        is_torchs = built.startswith("torch.nn.")
        classes = [*chain, *([] if is_torchs else lineage_of(built))]
        own = [(source, one) for source, one in classes if (source.name, one.name) != BASE]
        names = {one.name for _, one in own}
        is_sequential = kind.sequential and is_torchs and built.rpartition(".")[2] == "Sequential"
        is_certain = not is_sequential and not any(_may_have_plan(kind, *one, names) for one in own)
    except (AbsentError, UnknownError, SyntaxError, OSError):
        return
    if is_certain:
        raise kind.missing(degree, model=built.rpartition(".")[2], task=task.rpartition(".")[2])


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


def _may_have_plan(kind: PlanKind, source: ModuleSource, node: ast.ClassDef, names: Collection[str]) -> bool:
    """Whether a class may have a plan, or its module may give one to a class of these names."""
    if kind.sequential and node.name == "Sequential":
        return True
    if source.path is None or any(name in ANSWERS_FOR_OTHERS for name, _ in bindings(node.body)):
        return True
    text = source.path.read_text(encoding="utf-8", errors="replace")
    if kind.method in text:
        return True
    calls = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call))
    passed = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
    return not passed.isdisjoint(names)
