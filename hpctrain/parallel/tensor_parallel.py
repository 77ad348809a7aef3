"""Divide the layers of a model among ranks that compute them together (tensor parallelism).

Not the asynchronous kind, which needs symmetric memory of GPUs. These are functions and not a `Replica`, because FSDP
and pipelines both combine with them.

Why it is like this: docs/adr/0024-models-sharded-over-a-mesh.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import linear

from hpctrain.config.mesh import TENSOR_PARALLEL
from hpctrain.errors import ConfigError, TaskError
from hpctrain.parallel.blocks import matches_name
from hpctrain.phrases import listed

KEY = "parallel.tensor_degree"
_open_contexts = ExitStack()


class FusedColumnwise(ParallelStyle):
    """Divides a linear layer whose rows are several matrices of equal size, such as queries, keys and values.

    `ColwiseParallel` would give the first ranks all queries. With this style, each rank has its own rows of each
    matrix, in the same order: of `nn.Linear(width, 3 * width)` the queries, keys and values of its own heads. The input
    is the same on all ranks; the result is a plain tensor with this rank's features.

    Args:
        parts: number of matrices.
        heads: number of attention heads, which the ranks divide among themselves.
    """

    def __init__(self, parts: int, heads: int) -> None:
        super().__init__()
        self.parts = parts
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if self.heads % ranks:
            fitting = [str(number) for number in range(1, ranks + 1) if self.heads % number == 0]
            problem = f"doesn't divide the {self.heads} attention heads of the model"
            raise ConfigError(KEY, ranks, problem, f"use one of {', '.join(fitting)}")
        layer = cast(nn.Linear, module)
        layer.weight = nn.Parameter(self._cut(layer.weight.detach(), device_mesh))
        if layer.bias is not None:
            # whole on each rank: FSDP2 can cut it in its only dimension, and only at one place
            layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), device_mesh, [Replicate()]))
        rank = device_mesh.get_local_rank()

        def forward(features: Tensor) -> Tensor:
            # in plain tensors: DTensor has no rule for a product with such a weight
            if isinstance(features, DTensor):
                features = features.to_local(grad_placements=[Partial()])
            weight = cast(DTensor, layer.weight).to_local()
            bias = None
            if layer.bias is not None:
                whole_bias = cast(DTensor, layer.bias).to_local(grad_placements=[Partial()])
                bias = whole_bias.view(self.parts, ranks, -1)[:, rank].flatten()
            return linear(features, weight, bias)

        layer.forward = forward  # type: ignore[method-assign, assignment]
        return module

    def _cut(self, weight: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return this rank's rows of each matrix."""
        # not rows in the order of heads: existing checkpoints and initial weights would have another meaning
        placement: Placement = _StridedShard(0, split_factor=self.parts)
        parts = weight.view(self.parts, mesh.size(), -1, weight.shape[1])
        rows = parts[:, mesh.get_local_rank()].flatten(0, 1)
        shape: Any = weight.shape
        return DTensor.from_local(
            rows.contiguous(), mesh, [placement], run_check=False, shape=shape, stride=weight.stride()
        )


def find_plan(model: nn.Module, task: object, ranks: int) -> Mapping[str, ParallelStyle]:
    """Return the plan of the task, or else that of the model; none is guessed: a wrong one computes something else.

    Args:
        model: of the training.
        task: of the training.
        ranks: number of ranks that are to compute each layer together.

    Raises:
        ConfigError: neither has one.
        TaskError: it isn't a plan.
    """
    for owner in (task, model):
        make = getattr(owner, TENSOR_PARALLEL.method, None)
        plan = None if make is None else make()
        if plan is None:
            continue
        if not isinstance(plan, Mapping) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
            name = f"{type(owner).__name__}.{TENSOR_PARALLEL.method}"
            raise TaskError(f"{name} must return a dict of names and styles of torch.distributed.tensor.parallel")
        return plan
    raise TENSOR_PARALLEL.missing(ranks, model=type(model).__name__, task=type(task).__name__)


def divide(model: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Divide the layers of a model by a plan, in place; collective if its parameters have values.

    Parameters stay frozen, and those that modules share stay shared. Those that the plan doesn't name stay plain: as
    DTensors, they would meet plain inputs in their modules, which fails. Each rank updates its copy of them: the copies
    stay equal as far as operations are deterministic. From then on, cross-entropy of logits whose classes are divided
    among ranks is computed without gathering them.

    Args:
        model: on any device, or on `meta`; not sharded yet.
        plan: of styles, by names as `matches_name` takes them.
        mesh: of the ranks that compute each layer together.

    Raises:
        TaskError: a name matches no module, or two modules share a parameter that the plan divides in different ways.
        ConfigError: the layers can't be divided among so many ranks.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern, style in plan.items():
        matching = [module for name, module in modules.items() if matches_name(name, pattern)]
        if not matching:
            raise TaskError(f"tensor_parallel_plan names {pattern}, but the model has {listed(modules)}")
        for module in matching:
            parallelize_module(module, mesh, style)
    _restore_sharing(model, before)
    # It warns of the two steps in which it gathers a weight that two dimensions of the mesh cut: a callback may ask for
    # that, and the training never does.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # Torch has this as a context around the forward and the backward pass. These belong to different functions here,
    # and without the context, the operations that it replaces gather all logits.
    _open_contexts.close()
    _open_contexts.enter_context(loss_parallel())


def _restore_sharing(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Restore what modules shared, and what was frozen: dividing a layer gives it new parameters."""
    first: dict[int, str] = {}
    for name, old in before.items():
        parameter = model.get_parameter(name)
        parameter.requires_grad_(old.requires_grad)
        if (first_name := first.setdefault(id(old), name)) == name:
            continue
        first_parameter = model.get_parameter(first_name)
        if _layout(parameter) != _layout(first_parameter):
            raise TaskError(
                f"tensor_parallel_plan divides {first_name} and {name} in different ways, but they are one parameter: "
                "give both modules styles that divide it alike"
            )
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, first_parameter)


def _layout(tensor: Tensor) -> object:
    return tensor.placements if isinstance(tensor, DTensor) else None


def second_dimension_is_cut(parameter: Tensor) -> bool:
    """Whether FSDP2 has to cut a parameter in its second dimension, since the first one has several matrices."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return any(isinstance(placement, _StridedShard) for placement in placements)
