from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hpctrain.data.fetch import BatchDataset
from hpctrain.errors import ConfigError
from hpctrain.tasks.text import Text


class Uniform(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, 256)


def test_the_text_is_english_and_split_without_overlap() -> None:
    task = Text(context_length=64)
    train, held_out = task.train_dataset(), task.eval_dataset()
    everything = b"".join(bytes(train[index][0].tolist()) for index in range(len(train)))
    assert everything.count(b" the ") > 2000
    last_trained = bytes(train[len(train) - 1][1].tolist())
    first_held_out = bytes(held_out[0][0].tolist())
    text = bytes(task._text.tolist())
    assert text.index(last_trained) + 64 <= text.rindex(first_held_out)
    assert len(held_out) / (len(train) + len(held_out)) == pytest.approx(0.1, abs=0.01)


def test_targets_are_the_next_bytes() -> None:
    task = Text(context_length=3)
    windows, text = task.train_dataset(), task._text.tolist()
    assert isinstance(windows, BatchDataset)
    assert len(windows) == (round(len(text) * 0.9) - 1) // 3
    inputs, targets = windows.get_batch(torch.tensor([2, 0]))
    assert inputs.tolist() == [text[6:9], text[:3]]
    assert targets.tolist() == [text[7:10], text[1:4]]
    assert inputs.dtype == torch.int64
    assert [part.tolist() for part in windows[1]] == [text[3:6], text[4:7]]


def test_a_uniform_guess_costs_eight_bits_per_byte() -> None:
    task = Text(context_length=16)
    batch = task.eval_dataset().get_batch(torch.arange(5))
    total, count = task.evaluate(Uniform(), batch)["bits_per_byte"]
    assert count == 5
    assert float(total) / count == pytest.approx(8)
    assert task.loss(Uniform(), batch).item() == pytest.approx(math.log(256))


def test_the_default_model_takes_the_tasks_batches() -> None:
    task = Text(context_length=16)
    loss = task.loss(task.build_model(), task.train_dataset().get_batch(torch.arange(2)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.6)


def test_a_window_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.context_length=10000000"):
        Text(context_length=10**7).train_dataset()
    with pytest.raises(ConfigError, match=r"task\.held_out=0"):
        Text(held_out=0)
