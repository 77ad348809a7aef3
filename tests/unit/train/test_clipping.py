import pytest
import torch

from hpctrain.config.trainer import Trainer
from hpctrain.train.clipping import Clipping


def clipped(**options):
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, -4.0])
    unused = torch.zeros(1, requires_grad=True)
    clipping = Clipping.of(Trainer(**options), torch.optim.SGD([weight, unused], lr=1.0))
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
    assert Clipping.of(Trainer(), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)) is None
