from __future__ import annotations

import importlib.util

import pytest
import torch

from hpctrain.tasks.keras_digits import KerasDigits

if importlib.util.find_spec("keras") is None:
    pytest.skip('pip install "hpctrain[keras]"', allow_module_level=True)


def test_it_is_the_convnet_of_the_guide() -> None:
    model = KerasDigits().build_model()
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert [shape for shape in shapes if len(shape) == 4] == [(3, 3, 1, 12), (6, 6, 12, 24), (6, 6, 24, 32)]
    assert [shape for shape in shapes if len(shape) == 2] == [(32, 256), (256, 10)]
    assert sum(name.endswith("moving_variance") for name, _ in model.named_buffers()) == 3


def test_a_batch_is_learned_and_a_penalty_counts() -> None:
    torch.manual_seed(0)
    task = KerasDigits(dropout=0.0, weight_penalty=0.1)
    model, batch = task.build_model(), task.train_dataset().get_batch(torch.arange(32))
    penalty = model(batch[0].permute(0, 2, 3, 1))[1]
    assert penalty > 1
    assert task.loss(model, batch) > penalty + 1.5
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    correct, count = task.evaluate(model, batch)["accuracy"]
    assert (int(correct), count) == (32, 32)


def test_larger_accuracy_is_better() -> None:
    assert (KerasDigits.metric, KerasDigits.metric_mode) == ("accuracy", "max")
