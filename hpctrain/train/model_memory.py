"""The memory that a rank needs for the model and what is trained of it; known before the first step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.parallel.local_part import local_part
from hpctrain.rank.determinism import random_states_restored
from hpctrain.train.ema import Ema
from hpctrain.train.optimizers import BuiltOptimizer

PROBE_SIZE = 4
"""Elements along each dimension of the parameter with which an optimizer is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes that a rank holds between the backward pass and the update, without activations.

    Attributes:
        weights: of parameters and buffers; with `precision=fp16_master`, both copies.
        gradients: of the parameters that are trained now; those that are unfrozen later are left out.
        optimizer: of the optimizers' states; None before the first step of an optimizer that isn't torch's.
        average: of the moving average.
    """

    weights: int
    gradients: int
    optimizer: int | None
    average: int

    @property
    def total(self) -> int:
        """The sum of what is known."""
        return self.weights + self.gradients + (self.optimizer or 0) + self.average


def model_memory(
    modules: Iterable[nn.Module],
    optimizers: Iterable[BuiltOptimizer],
    ema: Ema | None,
    gradient_bytes: Callable[[Tensor], int] | None = None,
) -> ModelMemory:
    """Compute what this rank holds of a model; of a sharded one, its shards.

    Args:
        modules: that hold the weights, and in `fp16_master` also the half copy that computes.
        optimizers: of the training, before or after its first step.
        ema: the moving average.
        gradient_bytes: returns the bytes that this rank holds of a parameter's gradient; None for those of its part.
    """
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    # other ranks have what is on `meta`
    weights = {id(tensor): tensor for tensor in tensors if not tensor.is_meta}
    trained = [tensor for tensor in weights.values() if tensor.requires_grad]
    states = [_state_bytes(built.optimizer) for built in optimizers]
    return ModelMemory(
        weights=sum(map(_bytes, weights.values())),
        gradients=sum(map(gradient_bytes or _bytes, trained)),
        optimizer=None if None in states else sum(filter(None, states)),
        average=0
        if ema is None
        else sum(_bytes(average) for average in iterate_tensors(ema.averages) if not average.is_meta),
    )


def _bytes(tensor: Tensor) -> int:
    return local_part(tensor).nbytes


def _state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    total = 0.0
    for group in optimizer.param_groups:
        ratios: dict[tuple[int, torch.dtype], float | None] = {}
        for parameter in group["params"]:
            if parameter.is_meta:
                continue
            if state := optimizer.state.get(parameter):
                total += sum(map(_bytes, iterate_tensors(state)))
                continue
            kind = parameter.dim(), parameter.dtype
            if kind not in ratios:
                ratios[kind] = _bytes_per_element(optimizer, group, local_part(parameter))
            if (ratio := ratios[kind]) is None:
                return None
            total += ratio * local_part(parameter).numel()
    return round(total)


def _bytes_per_element(optimizer: torch.optim.Optimizer, group: dict[str, object], part: Tensor) -> float | None:
    """Return the bytes of state per element of a parameter, by a step of a small one; None if that fails.

    Only torch's own classes are tried: another one may count steps, or draw, in attributes of its own.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    probe = nn.Parameter(torch.zeros((PROBE_SIZE,) * part.dim(), dtype=part.dtype, device=part.device))
    probe.grad = torch.zeros_like(probe)
    trial = object.__new__(type(optimizer))
    options = {name: copy.copy(value) for name, value in group.items() if name != "params"}
    trial.__dict__ |= {
        **vars(optimizer),
        "state": defaultdict(dict),
        "param_groups": [{**options, "params": [probe]}],
    }
    # the class's: a learning rate schedule of torch's replaces that of the object; torch wraps it to call the hooks of
    # this optimizer and of all, which may count steps
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    try:
        with random_states_restored([part.device] if part.device.type == "cuda" else []):
            step(trial)
    except (RuntimeError, TypeError, ValueError):
        return None
    state = [tensor for tensor in iterate_tensors(dict(trial.state[probe])) if tensor.numel() == probe.numel()]
    return sum(tensor.nbytes for tensor in state) / probe.numel()
