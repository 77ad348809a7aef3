from __future__ import annotations

import torch
from torch import nn

from hpctrain.models.convnet import ConvNet


def test_logits_of_any_image_size_and_number_of_channels() -> None:
    assert ConvNet(width=4)(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert ConvNet(width=4, num_classes=7, in_channels=3)(torch.zeros(2, 3, 5, 9)).shape == (2, 7)


def test_width_and_dropout_are_used() -> None:
    network = ConvNet(width=6, dropout=0.5)
    images = torch.randn(8, 1, 8, 8)
    assert [layer.out_channels for layer in network.modules() if isinstance(layer, nn.Conv2d)] == [6, 12, 12]
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))


def test_batch_norm_learns_statistics_in_training_only() -> None:
    network = ConvNet(width=4)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.eval()(torch.randn(8, 1, 8, 8))
    assert all(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())
    network.train()(torch.randn(8, 1, 8, 8))
    assert not any(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())
