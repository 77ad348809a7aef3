import math

import pytest
import torch

from hpctrain.config.trainer import Trainer
from hpctrain.distributed.compiler import spare_compiler
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.update import Clipping, Update


def clipped(**options):
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, -4.0])
    unused = torch.zeros(1, requires_grad=True)
    clipping = Clipping.configured(Trainer(**options), torch.optim.SGD([weight, unused], lr=1.0))
    norm = clipping()
    return weight.grad.tolist(), None if norm is None else norm.item()


@pytest.mark.parametrize(
    ("options", "gradients", "norm"),
    [
        ({"clip_grad_norm": 0.5}, [0.3, -0.4], 5.0),
        ({"clip_grad_norm": 50.0}, [3.0, -4.0], 5.0),
        ({"clip_grad_value": 3.5}, [3.0, -3.5], None),
        ({"clip_grad_norm": 0.5, "clip_grad_value": 0.35}, [0.3, -0.35], 5.0),
        ({"log_grad_norm": True}, [3.0, -4.0], 5.0),
        ({"log_grad_norm": True, "clip_grad_value": 1.0}, [1.0, -1.0], 5.0),
    ],
)
def test_by_norm_first_and_then_by_value(options, gradients, norm):
    found, measured = clipped(**options)
    assert found == pytest.approx(gradients, rel=1e-5)
    assert measured == (None if norm is None else pytest.approx(norm))


def test_nothing_where_nothing_is_configured():
    assert Clipping.configured(Trainer(), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)) is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spared", [False, True])
def test_updates_that_overflow_are_counted_as_skipped(fused, spared):
    if spared:
        spare_compiler()
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    update = Update(optimizer, LearningRate(optimizer, lambda _: 1.0), scaler=scaler)
    for factor, skipped, scale in [(1.0, 0, 8.0), (math.inf, 1, 4.0), (math.nan, 2, 2.0), (1.0, 2, 2.0)]:
        before, skipped_before = weight.detach().clone(), update.num_skipped
        scaler.scale((weight * factor).sum()).backward()
        assert update() is (update.num_skipped == skipped_before)
        scaler.update()
        assert update.num_skipped == skipped
        assert weight.grad is None
        assert torch.equal(weight, before) is (skipped > skipped_before)
        assert scaler.get_scale() == scale
