"""The mesh of ranks: how many replicas of the model there are, and how the ranks that hold one divide it."""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpctrain.config.optimizer import losses_of, named_optimizers, refuse_unfreezing
from hpctrain.config.parallel import Parallel
from hpctrain.config.root import Config
from hpctrain.config.source import Chain, ModuleSource, UnknownError, bindings, class_chain, qualified_name, syntax_tree
from hpctrain.config.target import is_own
from hpctrain.config.task_checks import TASK
from hpctrain.errors import ConfigError
from hpctrain.phrases import all_of, counted, page


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The degrees of a mesh; their product is the number of ranks.

    Ranks with consecutive numbers have the same layers. Among them, ranks with consecutive numbers share a replica, so
    that it stays inside a node if it fits there. The same holds for the ranks that compute each layer together.

    Attributes:
        replicate: number of replicas.
        shard: number of shards of a replica, or of each stage of it.
        tensor: number of ranks that compute each layer together, on the same samples.
        pipeline: number of groups of ranks among which the layers are divided.
    """

    replicate: int
    shard: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of `tensor` x `pipeline` ranks; each of them has samples of its own."""
        return self.replicate * self.shard

    @property
    def replica_size(self) -> int:
        """Number of ranks that hold a replica together."""
        return self.shard * self.tensor * self.pipeline

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that have the same layers."""
        return self.replicate * self.shard * self.tensor

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by name, outermost first; `pipeline` and `tensor` only if they are more than 1."""
        degrees = {name: getattr(self, name) for name in ("pipeline", "replicate", "shard", "tensor")}
        return {name: degree for name, degree in degrees.items() if degree > 1 or name in ("replicate", "shard")}

    def position(self, rank: int) -> int:
        """The place of a rank in the pipeline, from 0 for the ranks with the model's first layers.

        The first ranks are the last in the pipeline: rank zero writes the log, and the last stage computes the loss.
        """
        return self.pipeline - 1 - rank // self.ranks_per_stage

    def picture(self, hosts: list[str], stages_per_rank: int = 1) -> list[str]:
        """Draw the mesh, a line for each replica and each place in the pipeline: its ranks, by node.

        Args:
            hosts: of all ranks, in rank order.
            stages_per_rank: of a pipeline.
        """
        lines, size = [], self.shard * self.tensor
        for replica, position in itertools.product(range(self.replicate), range(self.pipeline)):
            first = (self.pipeline - 1 - position) * self.ranks_per_stage + replica * size
            on_nodes: dict[str, list[int]] = {}
            for rank in range(first, first + size):
                on_nodes.setdefault(hosts[rank], []).append(rank)
            # consecutive on each node
            spans = [
                f"{ranks[0]}-{ranks[-1]} on {host}" if len(ranks) > 1 else f"{ranks[0]} on {host}"
                for host, ranks in on_nodes.items()
            ]
            stages = [str(position + turn * self.pipeline) for turn in range(stages_per_rank)]
            part = f", stage{'s' * (len(stages) > 1)} {all_of(stages)}" if self.pipeline > 1 else ""
            lines.append(f"replica {replica}{part}: rank{'s' * (size > 1)} {', '.join(spans)}")
        return lines


def mesh_shape(parallel: Parallel, world_size: int, local_world_size: int) -> MeshShape | None:
    """Return the mesh of a run's ranks; None unless parallel=mesh.

    Args:
        parallel: of the configuration.
        world_size: number of ranks.
        local_world_size: ranks of a node.

    Raises:
        ConfigError: the degrees don't fit the number of ranks.
    """
    if parallel.kind != "mesh":
        return None
    tensor = local_world_size if parallel.tensor_degree is None else parallel.tensor_degree
    shard = parallel.shard_degree
    if shard is None:
        shard = local_world_size // tensor if tensor > 0 and local_world_size % tensor == 0 else local_world_size
    degrees = {
        "shard": shard,
        "replicate": parallel.replicate_degree,
        "tensor": tensor,
        "pipeline": parallel.pipeline_degree,
    }
    shape = MeshShape(**_without_open(degrees, world_size))
    if local_world_size % shape.tensor:
        problem = f"doesn't divide the {counted(local_world_size, 'rank')} of a node, which send each other every layer"
        raise ConfigError("parallel.tensor_degree", shape.tensor, problem, f"use one of {_divisors(local_world_size)}")
    return shape


def shares_and_stages(parallel: Parallel, world_size: int, local_world_size: int) -> tuple[int, int]:
    """Return how many shares a run's samples have, and among how many groups of ranks the layers are divided.

    There is a share for each rank, or for each group of ranks that has the same samples.

    Args:
        parallel: of the configuration.
        world_size: number of ranks.
        local_world_size: ranks of a node.

    Raises:
        ConfigError: the degrees don't fit the number of ranks.
    """
    shape = mesh_shape(parallel, world_size, local_world_size)
    return (world_size, 1) if shape is None else (shape.data_parallel_size, shape.pipeline)


def _without_open(degrees: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the degrees with that of -1 replaced by what the others leave."""
    fixed = {name: degree for name, degree in degrees.items() if degree != -1}
    product = math.prod(fixed.values())
    is_open = len(fixed) < len(degrees)
    if product == world_size or (is_open and world_size % product == 0):
        return {name: world_size // product if degree == -1 else degree for name, degree in degrees.items()}
    if is_open:
        for name, degree in fixed.items():
            if world_size % degree:
                problem = f"doesn't divide {counted(world_size, 'rank')}"
                raise ConfigError(f"parallel.{name}_degree", degree, problem, f"use one of {_divisors(world_size)}")
    key, *names = [name for name, degree in fixed.items() if degree != 1 or name in ("shard", "replicate")]
    with_others = all_of([f"parallel.{name}_degree={fixed[name]}" for name in names])
    problem = f"with {with_others} needs {product} ranks{' or a multiple' * is_open}, but there are {world_size}"
    remedy = "change one of them" if is_open else "set one of them to -1: what the others leave"
    if len(names) == 1 and not is_open:
        remedy = "set one of the two to -1: what the other leaves"
    raise ConfigError(f"parallel.{key}_degree", fixed[key], problem, remedy)


def _divisors(number: int) -> str:
    return ", ".join(str(degree) for degree in range(1, number + 1) if number % degree == 0)


def keeps_gradients_whole(parallel: Parallel, shape: MeshShape) -> bool:
    """Whether gradients stay whole until the last micro-batch of a step, and are reduced to those of shards only there.

    This is also so where a rank's shard is the whole weight: it saves no memory to reduce them in each micro-batch, and
    takes two copies. With `cpu_offload`, gradients leave the GPU in each micro-batch.

    Args:
        parallel: of the configuration.
        shape: of the mesh.
    """
    return parallel.keep_gradients_whole or (shape.shard == 1 and not parallel.cpu_offload)


WITH_MESH: tuple[tuple[str, object, str, str], ...] = (
    ("trainer.channels_last", False, "reorders weights, which parallel=mesh cuts into shards", "set it to false"),
    (
        "trainer.compile_mode",
        "default",
        "uses CUDA graphs, in which the weights that parallel=mesh gathers have no fixed place",
        "set it to default",
    ),
    (
        "cluster.gpus_per_process",
        1,
        "spreads a model over the GPUs of a process, and parallel=mesh has one GPU per process",
        "set it to 1",
    ),
    (
        "checkpoint.safetensors",
        False,
        "needs the whole model in one process, which parallel=mesh avoids",
        "set it to false, and use `python -m hpctrain export RUN` afterwards",
    ),
)
"""Key, the only value that works with a mesh, what any other does, and what to do instead."""
GPT = "hpctrain.models.gpt.GPT"
MUON = "torch.optim.Muon"
ATTRIBUTE_HOOKS = ("__getattr__", "__getattribute__")


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


def check_mesh(config: Config, mesh: MeshShape | None) -> None:
    """Check the mesh of a training, if it has one.

    Args:
        config: of the training.
        mesh: of its ranks; None without one.

    Raises:
        ConfigError: a key doesn't work with a mesh, or with this one.
    """
    if mesh is None:
        return
    _check_stages(config.parallel, mesh.pipeline)
    if config.parallel.cpu_offload and mesh.num_ranks == 1:
        problem = "has no effect with 1 rank, which shards nothing"
        raise ConfigError("parallel.cpu_offload", True, problem, "use 2 ranks or more, or leave it out")
    if (formats := config.precision.formats).copy:
        problem = "keeps a half copy next to the fp32 weights, as parallel=mesh does by itself"
        raise ConfigError("precision.kind", formats.kind, problem, f"use precision={formats.by_autocast}")
    for key, allowed, problem, remedy in WITH_MESH:
        if (value := operator.attrgetter(key)(config)) != allowed:
            raise ConfigError(key, value, problem, remedy)
    if "average_weights" in config.callbacks:
        problem = "averages whole weights on one rank, which parallel=mesh avoids"
        raise ConfigError("callbacks.average_weights", "...", problem, "use trainer.ema_decay")
    optimizers = named_optimizers(config.optimizer)
    if len(losses_of(optimizers)) > 1:
        problem = "doesn't work with several losses: gradients are computed for all weights that a mesh gathers"
        raise ConfigError("parallel.kind", "mesh", problem, "use parallel=ddp")
    if mesh.pipeline > 1:
        if "log_weights" in config.callbacks:
            problem = "logs weights on rank zero, which has only the last stage of a pipeline"
            raise ConfigError("callbacks.log_weights", "...", problem, "leave it out")
        _require_plan(config, PIPELINE, mesh.pipeline)
    if mesh.tensor > 1:
        _check_tensor_parallel(config, mesh.tensor)
    problem = "doesn't work with parallel=mesh: what is trained is fixed once the model is sharded"
    refuse_unfreezing(optimizers, problem, "leave it out, or use parallel=ddp")


def _check_stages(parallel: Parallel, degree: int) -> None:
    """Refuse keys of a pipeline without one, and another number of stages than it has."""
    num_stages = degree * parallel.stages_per_rank
    for key, default in (("stages_per_rank", 1), ("stages", [])):
        if degree == 1 and (value := getattr(parallel, key)) != default:
            problem = "has no effect with parallel.pipeline_degree=1"
            raise ConfigError(f"parallel.{key}", value, problem, "leave it out, or use parallel=pp with several ranks")
    if parallel.stages and len(parallel.stages) != num_stages - 1:
        stages = f"parallel.pipeline_degree={degree} with parallel.stages_per_rank={parallel.stages_per_rank}"
        problem = f"begins {counted(len(parallel.stages) + 1, 'stage')}, and {stages} has {num_stages}"
        remedy = f"name the {num_stages - 1} modules with which the second stage and each further one begins"
        raise ConfigError("parallel.stages", parallel.stages, problem, remedy)


def _check_tensor_parallel(config: Config, degree: int) -> None:
    """Refuse what doesn't work if several ranks compute each layer together."""
    for optimizer in named_optimizers(config.optimizer):
        if (target := optimizer.node["_target_"]) == MUON:
            problem = "needs whole matrices, and with parallel.tensor_degree above 1 a rank holds parts of them"
            raise ConfigError(f"{optimizer.key}._target_", target, problem, "use optimizer=adamw, or parallel=fsdp")
    model = config.model
    if model["_target_"] == GPT and model["num_heads"] % degree:
        problem = f"doesn't divide model.num_heads={model['num_heads']}"
        fitting = [str(number) for number in range(1, degree + 1) if model["num_heads"] % number == 0]
        raise ConfigError("parallel.tensor_degree", degree, problem, f"use one of {', '.join(fitting)}")
    _require_plan(config, TENSOR_PARALLEL, degree)


def _require_plan(config: Config, kind: PlanKind, degree: int) -> None:
    """Refuse to divide a model if its source and that of the task show that neither has a plan.

    A plan that another module gives to one of their classes isn't seen. The ranks check the objects themselves.
    """
    task, model = str(config.task["_target_"]), config.model["_target_"]
    if is_own(task) or (model is not None and is_own(model)):
        return
    try:
        chain = class_chain(task)
        built = str(model) if model is not None else _built_by(chain)
        module, _, name = built.rpartition(".")
        # none of torch's own classes has a plan; a function of torch.nn may return any model
        is_torchs = module in ("torch.nn", "torch.nn.modules") and name[:1].isupper()
        classes = [*chain, *([] if is_torchs else class_chain(built))]
        classes = [(source, node) for source, node in classes if (source.name, node.name) != TASK]
        names = {node.name for _, node in classes}
        needs_none = kind.sequential and is_torchs and name == "Sequential"
        is_certain = not needs_none and not any(_may_have_plan(kind, source, node, names) for source, node in classes)
    except (UnknownError, SyntaxError, OSError):
        return
    if is_certain:
        raise kind.missing(degree, model=name, task=task.rpartition(".")[2])


def _built_by(chain: Chain) -> str:
    """Return the import path of the class that a task's `build_model` returns, if it consists of that call.

    Raises:
        UnknownError: it does more, or it isn't the task's own.
    """
    for source, class_node in chain:
        definitions = [statement for name, statement in bindings(class_node.body) if name == "build_model"]
        if not definitions:
            continue
        method = definitions[0]
        if len(definitions) > 1 or not isinstance(method, ast.FunctionDef) or method.decorator_list:
            raise UnknownError
        body = method.body[1:] if ast.get_docstring(method) is not None else method.body
        expression = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
        name = qualified_name(source, expression.func) if isinstance(expression, ast.Call) else ""
        if "." not in name:
            raise UnknownError
        return name
    raise UnknownError


def _may_have_plan(kind: PlanKind, source: ModuleSource, node: ast.ClassDef, names: Collection[str]) -> bool:
    """Whether a class may have a plan, or its module may give one to a class of these names."""
    if source.path is None or any(name in ATTRIBUTE_HOOKS for name, _ in bindings(node.body)):
        return True
    text = source.path.read_bytes()
    if kind.method.encode() in text:
        return True
    nodes = list(ast.walk(syntax_tree(text, source.path)))
    callees = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    bases = {id(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    used_names = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in callees | bases}
    return not used_names.isdisjoint(names)
