from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.models.resnet import ResNet

TORCHVISIONS = {
    18: (11_689_512, "66b04efc1dfd4b80"),
    34: (21_797_672, "4aa3e2bbbdc5e2fd"),
    50: (25_557_032, "614cd53ddf849669"),
    101: (44_549_160, "593b3bde446ee903"),
}
"""Parameters, and SHA-256 over the lines "name [shape]" of the state dict, of torchvision 0.29.2's resnetNN."""


@pytest.mark.parametrize("depth", TORCHVISIONS)
def test_names_shapes_and_order_are_torchvisions(depth: int) -> None:
    with torch.device("meta"):
        network = ResNet(depth)
    rows = "\n".join(f"{name} {list(value.shape)}" for name, value in network.state_dict().items())
    found = sum(p.numel() for p in network.parameters()), hashlib.sha256(rows.encode()).hexdigest()[:16]
    assert found == TORCHVISIONS[depth]


@pytest.mark.parametrize("depth", [18, 50])
def test_logits_of_any_size_and_number_of_channels(depth: int) -> None:
    network = ResNet(depth, num_classes=7, in_channels=1)
    assert network(torch.randn(2, 1, 40, 33)).shape == (2, 7)


@pytest.mark.parametrize("depth", [18, 50])
def test_a_stage_halves_and_a_bottleneck_does_it_in_the_middle(depth: int) -> None:
    network = ResNet(depth)
    strides = [module.stride for module in network.layer2[0].modules() if isinstance(module, nn.Conv2d)]
    assert strides == ([(2, 2), (1, 1), (2, 2)] if depth == 18 else [(1, 1), (2, 2), (1, 1), (2, 2)])
    assert network.layer2.eval()(network.layer1.eval()(torch.randn(1, 64, 8, 8))).shape[2:] == (4, 4)


def test_blocks_begin_as_the_identity_by_default() -> None:
    stream = torch.rand(2, 64, 8, 8)
    for zero_init_residual in (True, False):
        second = ResNet(18, zero_init_residual=zero_init_residual).layer1[1]
        assert torch.equal(second(stream), stream) == zero_init_residual


def test_another_depth_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.depth=42: .*18, 34, 50, 101"):
        ResNet(42)
