from __future__ import annotations

import pytest
import torch

from hpctrain.data.fetch import BatchDataset, TensorBatches
from hpctrain.errors import TaskError


def test_a_batch_is_the_stack_of_its_samples() -> None:
    dataset = TensorBatches(torch.randn(5, 2), torch.arange(5))
    assert isinstance(dataset, BatchDataset)
    assert len(dataset) == 5
    images, labels = dataset.get_batch(torch.tensor([3, 0]))
    for row, index in enumerate((3, 0)):
        image, label = dataset[index]
        assert torch.equal(images[row], image)
        assert labels[row] == label


@pytest.mark.parametrize("lengths", [(), (3, 4)])
def test_lengths_must_agree(lengths: tuple[int, ...]) -> None:
    with pytest.raises(TaskError, match="equal lengths"):
        TensorBatches(*(torch.zeros(length) for length in lengths))
