from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from hpctrain.data.fetch import BatchFetcher, TensorBatches
from hpctrain.errors import TaskError


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


class Listed(Drawing):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [(index, float(torch.rand(()))) for index in indices]


class ListedPerSample(Listed):
    draws_per_sample = True


class Quiet(Drawing):
    draws_per_sample = False


class WholePerSample(TensorBatches):
    draws_per_sample = True

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return torch.tensor(index), torch.rand(())


def fetch(dataset: Dataset[Any], indices: list[int], epoch: int = 0) -> list[list[float]]:
    return [field.tolist() for field in BatchFetcher(dataset, seed=1)[epoch, np.array(indices)]]


@pytest.mark.parametrize(
    "dataset",
    [
        Drawing(),
        ListedPerSample(),
        WholePerSample(torch.zeros(10)),
        Subset(Drawing(), range(10)),
        Subset(Subset(ListedPerSample(), range(10)), range(10)),
        ConcatDataset([Drawing(), Drawing()]),
    ],
)
def test_the_draws_of_a_sample_do_not_depend_on_its_batch(dataset: Dataset[Any]) -> None:
    indices, draws = fetch(dataset, [4, 1, 2])
    assert indices == [4, 1, 2]
    assert [fetch(dataset, [index])[1][0] for index in (4, 1, 2)] == draws
    assert len({*draws, *fetch(dataset, [4, 1, 2], epoch=1)[1]}) == 6


def test_a_batch_at_a_time_draws_the_same_for_the_same_batch() -> None:
    torch.manual_seed(0)
    before = fetch(Listed(), [4, 1])
    torch.manual_seed(1)
    assert fetch(Listed(), [4, 1]) == before
    assert fetch(Listed(), [4, 1], epoch=1) != before
    assert fetch(Subset(Listed(), [4, 1]), [0, 1])[0] == [4, 1]


def test_a_dataset_that_draws_nothing_is_not_seeded() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2).tolist()
    torch.manual_seed(0)
    assert fetch(Quiet(), [4, 1]) == [[4, 1], expected]


def test_tensors_in_memory_are_fetched_whole() -> None:
    images, labels = torch.randn(10, 3), torch.arange(10)
    for dataset in (TensorBatches(images, labels), TensorDataset(images, labels)):
        batch = BatchFetcher(dataset, seed=1)[0, np.array([7, 7, 2])]
        assert torch.equal(batch[0], images[[7, 7, 2]])
        assert batch[1].tolist() == [7, 7, 2]


def test_parts_of_tensors_are_fetched_right() -> None:
    part, _ = random_split(TensorDataset(torch.arange(10)), [4, 6], torch.Generator().manual_seed(0))
    assert fetch(part, [0, 3]) == [[part.indices[0], part.indices[3]]]
    part = Subset(TensorBatches(torch.arange(10)), [5, 6])
    assert fetch(part, [1, 0]) == [[6, 5]]


@pytest.mark.parametrize("dataset", [Drawing(), Listed(), Quiet(), TensorDataset(torch.arange(3))])
def test_the_tasks_own_collation_is_used(dataset: Dataset[Any]) -> None:
    assert BatchFetcher(dataset, seed=1, collate_fn=len)[0, np.array([1, 2])] == 2


def test_several_datasets_in_a_dict_are_refused() -> None:
    several: Any = {"train": Drawing(), "test": Drawing()}
    with pytest.raises(TaskError, match="expected one dataset, but this dict has 'train', 'test': return one of them"):
        BatchFetcher(several, 0)


def test_a_loader_is_refused() -> None:
    loader: Any = DataLoader(Drawing())
    with pytest.raises(TaskError, match=r"got a DataLoader: return its dataset; .* \(trainer\.global_batch_size"):
        BatchFetcher(loader, 0)
