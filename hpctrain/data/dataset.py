"""The optional protocols of a dataset, beyond `__len__` and `__getitem__`, that the loader uses."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


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
