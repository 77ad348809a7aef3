"""A dataset of tensors in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpctrain.errors import TaskError


class TensorBatches(Dataset[Any]):
    """A dataset whose samples are the rows of tensors; a batch costs one `index_select` per tensor.

    Args:
        tensors: at least one, each of shape [num_samples, ...].

    Raises:
        TaskError: no tensor was given, or their lengths differ.

    Example:
        Ten samples of three features and a label each::

            TensorBatches(torch.randn(10, 3), torch.arange(10))
    """

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise TaskError(f"TensorBatches needs one tensor or more of equal lengths, got lengths {lengths}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """See `BatchDataset`."""
        # a list, since a generator takes longer than the rest of this line
        return tuple([torch.index_select(tensor, 0, indices) for tensor in self.tensors])
