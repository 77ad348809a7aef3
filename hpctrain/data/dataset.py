"""The optional protocols of a dataset, beyond `__len__` and `__getitem__`, that the loader uses; and tensors as one."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpctrain.errors import TaskError


@runtime_checkable
class BatchDataset(Protocol):
    """A dataset that returns many samples at once, already collated; for data in memory.

    No base class is needed: any `torch.utils.data.Dataset` with these methods conforms.

    The loader uses the first of these protocols that a dataset has:

    1. `get_batch(indices)`, this protocol: one call per micro-batch, no collation, no seeding;
    2. `__getitems__(indices)`, PyTorch's own: one call per micro-batch returns the list of samples, which are collated;
    3. `__getitem__(index)`: one call per sample.

    The attribute `draws_per_sample` is true if the samples use the global generators of `random`, NumPy and PyTorch,
    such as for augmentation. True: samples come one by one through `__getitem__`, and before each the generators are
    seeded from (seed, epoch, index), so that the draws are the same at any world size and with any number of workers.
    False: nothing is seeded. Without the attribute it is True for 3 and False for 1; for 2 the generators are seeded
    once per micro-batch, which is exact for a resume, but not across world sizes.

    Example:
        A table in memory, from which a batch is one indexing operation::

            class Table(torch.utils.data.Dataset):
                def __init__(self, rows, targets):
                    self.rows, self.targets = rows, targets

                def __len__(self):
                    return len(self.rows)

                def __getitem__(self, index):
                    return self.rows[index], self.targets[index]

                def get_batch(self, indices):
                    return self.rows[indices], self.targets[indices]
    """

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def get_batch(self, indices: Tensor) -> Any:
        """The samples at these indices, stacked.

        Args:
            indices: int64 of shape [n], on the CPU, n >= 1; may repeat.

        Returns:
            The batch for the task's `loss` and `evaluate`, on the CPU.
        """
        ...


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
