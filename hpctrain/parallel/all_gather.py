"""All ranks' tensors on every rank, with gradients: for losses over the samples of the whole micro-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.parallel.mesh import group_with_other_samples


def all_gather_with_grad(tensor: Tensor) -> Tensor:
    """Concatenate the tensors of all ranks, in the order of the ranks; collective, also in the backward pass.

    The gradient of a rank's tensor is the sum of what all ranks' losses contribute to it. DDP then averages the
    gradients of the weights, so that training follows the mean of the ranks' losses, each over its own samples against
    those of all ranks. Without a process group, as in a run with one rank, the result is the tensor itself.

    For `Task.loss` only: ranks don't evaluate equally many batches. Ranks must pass the same number of rows. An epoch's
    last step can be smaller on some ranks, or repeat a sample on a rank that has none left: set `data.drop_last`, and a
    global batch size that the number of ranks times the micro-batch size divides.

    Of ranks that compute each layer together, on the same samples, one counts.

    Args:
        tensor: of shape [n, ...], on this rank's device; the same shape and dtype on every rank.

    Returns:
        Shape [world_size * n, ...]; this rank's rows start at rank * n.

    Raises:
        RuntimeError: the process group refuses the tensors, as gloo does if their sizes differ.
    """
    if not dist.is_initialized():
        return tensor
    gathered: Tensor = _AllGather.apply(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return gathered


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004 - torch passes it
        group = group_with_other_samples()
        size = dist.get_world_size(group)
        gathered = tensor.new_empty((size * len(tensor), *tensor.shape[1:]))
        dist.all_gather(list(gathered.chunk(size)), tensor.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004 - torch passes it
        group = group_with_other_samples()
        gradient = gradients[0].contiguous()
        received = torch.empty_like(gradient)
        # not reduce_scatter: here the ranks' parts are added in one fixed order, with any backend
        dist.all_to_all_single(received, gradient, group=group)
        return received.view(dist.get_world_size(group), -1, *gradient.shape[1:]).sum(0)
