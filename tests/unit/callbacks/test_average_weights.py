from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.callbacks.average_weights import FILE_NAME, AverageWeights
from hpctrain.checkpoint.warm_start import warm_start


def step_to(callback, training, steps):
    for step in steps:
        training.position.step = step
        with torch.no_grad():
            training.model.weight.fill_(float(step))
        callback.after_step(training)


@pytest.mark.parametrize(
    ("options", "mean"),
    [
        ({"start_fraction": 0.5}, 8.0),
        ({"start_fraction": 0.5, "every_steps": 2}, 8.0),
        ({"start_fraction": 0.0, "num_last": 3}, 9.0),
    ],
)
@pytest.mark.parametrize("stop", [3, 7, 9])
def test_the_average_is_written_and_read(training, options, mean, stop):
    watched, first, second = training(), AverageWeights(**options), AverageWeights(**options)
    step_to(first, watched, range(1, stop + 1))
    second.load_state_dict(first.state_dict())
    second.on_start(watched)
    step_to(second, watched, range(stop + 1, 11))
    second.on_end(watched)
    fresh = nn.Linear(2, 1)
    warm_start(fresh, watched.run_dir / FILE_NAME)
    assert fresh.weight.tolist() == [[mean, mean]]
    assert fresh.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize(("num_last", "mean"), [(None, 2.5), (2, 3.5)])
def test_weights_of_any_type_are_averaged(training, dtype, num_last, mean):
    watched = training()
    watched.model.weight = nn.Parameter(torch.zeros(1, 2, dtype=dtype))
    callback = AverageWeights(0.0, num_last=num_last)
    step_to(callback, watched, range(1, 5))
    callback.on_end(watched)
    saved = torch.load(watched.run_dir / FILE_NAME, weights_only=True)
    assert saved["weight"].dtype == dtype
    assert saved["weight"].tolist() == [[mean, mean]]


def test_other_ranks_hold_no_copies_after_a_resume(training):
    watched, first, second = training(), AverageWeights(0.0, num_last=3), AverageWeights(0.0, num_last=3)
    step_to(first, watched, range(1, 6))
    watched.rank = 1
    second.load_state_dict(first.state_dict())
    second.on_start(watched)
    assert second.terms == []


def test_counts_are_not_averaged(training):
    watched, callback = training(model=nn.BatchNorm1d(2)), AverageWeights(0.0)
    for step in (1, 2):
        watched.position.step = step
        watched.model.num_batches_tracked.fill_(step)
        watched.model.running_mean.fill_(float(step))
        callback.after_step(watched)
    callback.on_end(watched)
    saved = torch.load(watched.run_dir / FILE_NAME, weights_only=True)
    assert saved["num_batches_tracked"].item() == 2
    assert saved["running_mean"].tolist() == [1.5, 1.5]


def test_a_run_that_ends_before_its_start_writes_nothing_and_says_so(training, caplog):
    watched, callback = training(), AverageWeights(0.9)
    step_to(callback, watched, range(1, 4))
    callback.on_end(watched)
    assert not (watched.run_dir / FILE_NAME).exists()
    (said,) = caplog.messages
    assert said.endswith(
        "averaged.pt is not written: the run ended at 30% of its steps (start_fraction=0.9, every_steps=1)"
    )
