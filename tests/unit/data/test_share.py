from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hpctrain.data.share import chosen_workers
from hpctrain.data.tensors import TensorBatches


class Plain(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Drawing(TensorBatches):
    draws_per_sample = True


@pytest.mark.parametrize("dataset", [TensorBatches(torch.arange(8)), TensorDataset(torch.arange(8)), Stream()])
def test_none_where_they_only_cost(dataset):
    assert chosen_workers(dataset, 16, on_gpu=True) == 0
    if not isinstance(dataset, IterableDataset):
        assert chosen_workers(Subset(dataset, [1, 2]), 16, on_gpu=True) == 0


@pytest.mark.parametrize("dataset", [Plain(), Drawing(torch.arange(8)), Subset(Plain(), [1])])
@pytest.mark.parametrize(
    ("cores", "on_gpu", "workers"),
    [(1, True, 0), (4, True, 3), (64, True, 8), (2, False, 0), (8, False, 2), (64, False, 8)],
)
def test_by_the_cores_of_the_rank(dataset, cores, on_gpu, workers):
    assert chosen_workers(dataset, cores, on_gpu=on_gpu) == workers
