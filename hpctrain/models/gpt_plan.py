"""Tensor and sequence parallelism for a GPT, whose layers ranks compute together (Korthikanti et al. 2022)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from hpctrain.parallel.tensor_parallel import FusedColumnwise

POSITIONS = Shard(1)
"""Between the blocks, each rank has some of the positions of all sequences."""


def tensor_parallel_plan(num_heads: int) -> dict[str, ParallelStyle]:
    """Return the plan of a GPT with so many attention heads."""
    return {
        # a rank has the weights of some tokens, and adds up with the others what they look up
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=POSITIONS),
        "places": _LookUpOwnPositions(),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": _gather_positions(2),
        "blocks.*.attention.qkv": FusedColumnwise(3, num_heads),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=POSITIONS),
        "blocks.*.feed_forward_norm": SequenceParallel(),
        "blocks.*.feed_forward": _gather_positions(1),
        "blocks.*.feed_forward.into": ColwiseParallel(),
        "blocks.*.feed_forward.out": RowwiseParallel(output_layouts=POSITIONS),
        "norm": SequenceParallel(),
        # all positions, and the logits of some tokens
        "head": _gather_positions(2),
    }


def _gather_positions(num_inputs: int) -> ParallelStyle:
    """Gather all positions of a module's first input."""
    unchanged: list[Any] = [None] * (num_inputs - 1)
    return PrepareModuleInput(
        input_layouts=(POSITIONS, *unchanged), desired_input_layouts=(Replicate(), *unchanged), use_local_output=False
    )


class _LookUpOwnPositions(ParallelStyle):
    """An embedding that each rank has whole, and reads for its own positions."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch declares that these return nothing, and uses what they return
        before: Any = _own_positions
        after: Any = _to_local
        return distribute_module(module, device_mesh, None, before, after)


def _own_positions(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False).redistribute(placements=[POSITIONS])


def _to_local(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Tensor:
    local: Tensor = output.to_local()
    return local
