"""Check at submission, from the sources, that task or model has a plan; the ranks check the objects themselves."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

from hpctrain.config.main_module import is_own
from hpctrain.config.module_source import AbsentError, ModuleSource, UnknownError, bindings, qualified_name, syntax_tree
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
        method: the method that returns it.
        key: the key of the degree that requires it.
        sequential: whether an `nn.Sequential` needs no plan.
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
        problem = f"neither {model} nor {task} has a plan"
        if self.sequential:
            problem = f"{model} isn't an nn.Sequential, and neither it nor {task} has a plan"
        remedy = f"define {self.method} in one of them ({page('how_to/large_models.md')}), or use parallel=fsdp"
        return ConfigError(self.key, degree, problem, remedy)


TENSOR_PARALLEL = PlanKind("tensor_parallel_plan", "parallel.tensor_degree")
PIPELINE = PlanKind("pipeline_plan", "parallel.pipeline_degree", sequential=True)


def require_plan(config: Config, kind: PlanKind, degree: int) -> None:
    """Refuse to divide a model if its source and that of the task show that neither has a plan.

    A plan that another module gives to one of their classes isn't seen.

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
        module, _, name = built.rpartition(".")
        # none of torch's own classes has a plan; a function of torch.nn may return any model
        is_torchs = module in ("torch.nn", "torch.nn.modules") and name[:1].isupper()
        classes = [*chain, *([] if is_torchs else lineage_of(built))]
        own = [(source, one) for source, one in classes if (source.name, one.name) != BASE]
        names = {one.name for _, one in own}
        needs_none = kind.sequential and is_torchs and name == "Sequential"
        is_certain = not needs_none and not any(_may_have_plan(kind, source, node, names) for source, node in own)
    except (AbsentError, UnknownError, SyntaxError, OSError):
        return
    if is_certain:
        raise kind.missing(degree, model=name, task=task.rpartition(".")[2])


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
    if source.path is None or any(name in ANSWERS_FOR_OTHERS for name, _ in bindings(node.body)):
        return True
    text = source.path.read_bytes()
    if kind.method.encode() in text:
        return True
    nodes = list(ast.walk(syntax_tree(text, source.path)))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    bases = {id(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    used = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called | bases}
    return not used.isdisjoint(names)
