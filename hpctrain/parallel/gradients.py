"""The norm of gradients that ranks share in different ways, and their clipping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.parallel.local_part import local_part, local_parts

_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds it to the norm by which it divides."""


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients, 0-d, the same on every rank; collective.

    torch's own function needs all of them on one mesh.

    Args:
        gradients: perhaps DTensors, on meshes whose dimensions are named alike. An element that several ranks hold
            counts once.
    """
    # by the dimensions of the mesh over which they are cut
    groups: defaultdict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    process_groups: dict[str, dist.ProcessGroup] = {}
    for gradient in gradients:
        names = []
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            for name, placement in zip(mesh.mesh_dim_names or (), gradient.placements, strict=True):
                if not isinstance(placement, Replicate):
                    names.append(name)
                    process_groups[name] = mesh.get_group(name)
        groups[tuple(names)].append(local_part(gradient))
    keys = sorted(groups)
    norms = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(groups[key], 2.0))) for key in keys]
    # the squares of half precision would overflow
    squares = torch.stack(norms).double().square()
    for name, process_group in sorted(process_groups.items()):
        # of what isn't cut in this dimension, one rank counts
        counted = torch.tensor([name in key or not dist.get_rank(process_group) for key in keys])
        squares = torch.where(counted.to(squares.device), squares, 0.0)
        dist.all_reduce(squares, group=process_group)
    return squares.sum().sqrt().to(norms[0].dtype)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down to a bound of their norm, as `torch.nn.utils.clip_grads_with_norm_` does; not collective.

    Args:
        gradients: perhaps DTensors.
        norm: of all of them.
        max_norm: the bound.
    """
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    parts = local_parts(gradients)
    torch._foreach_mul_(parts, factor.to(parts[0].device))
