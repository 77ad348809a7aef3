from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from hpctrain.data.eval_loader import EvalLoader
from hpctrain.data.tensors import TensorBatches
from hpctrain.data.workers import Workers


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


@settings(deadline=None)
@given(num_samples=st.integers(0, 60), micro=st.integers(1, 9), world_size=st.integers(1, 9))
def test_every_sample_is_seen_exactly_once(num_samples: int, micro: int, world_size: int) -> None:
    dataset = TensorBatches(torch.arange(num_samples))
    seen, shares, numbers = [], [], []
    for rank in range(world_size):
        loader = EvalLoader(dataset, micro, rank=rank, world_size=world_size)
        batches = [batch[0].tolist() for batch in loader]
        assert len(batches) == len(loader)
        assert all(0 < len(batch) <= micro for batch in batches)
        numbers.append(len(batches))
        shares.append(sum(map(len, batches)))
        seen += [index for batch in batches for index in batch]
    assert seen == list(range(num_samples))
    assert max(shares) - min(shares) <= 1
    assert max(numbers) == loader.most_batches


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_pass_is_the_same_with_any_number_of_workers(num_workers: int) -> None:
    expected = [[field.tolist() for field in batch] for batch in EvalLoader(Drawing(), 2, rank=1, world_size=2)]
    loader = EvalLoader(Drawing(), 2, rank=1, world_size=2, workers=Workers(num_workers))
    for _ in range(2):
        assert [[field.tolist() for field in batch] for batch in loader] == expected


def test_a_rank_without_samples_starts_no_worker() -> None:
    loader = EvalLoader(TensorBatches(torch.arange(1)), 2, rank=0, world_size=2, workers=Workers(2))
    assert len(loader) == 0
    assert list(loader) == []
