from __future__ import annotations

import torch

from hpctrain.models.mlp import MLP


def test_shapes_follow_the_arguments() -> None:
    network = MLP(in_features=12, width=5, num_layers=3, num_classes=4)
    assert network(torch.zeros(2, 3, 2, 2)).shape == (2, 4)
    assert [tuple(p.shape) for p in network.parameters() if p.dim() == 2] == [(5, 12), (5, 5), (4, 5)]


def test_one_layer_is_linear() -> None:
    network = MLP(in_features=3, num_layers=1, num_classes=2)
    one, two = torch.randn(2, 1, 3)
    torch.testing.assert_close(network(one) + network(two) - network(torch.zeros(1, 3)), network(one + two))
