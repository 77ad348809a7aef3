"""``conf/model``: the network. ``model=own``: the task builds it. Owner: hpctrain.models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class ConvNet(require.Checked):
    """A small convolutional net with batch norm."""

    _target_: str = "hpctrain.models.convnet.ConvNet"
    """Class to instantiate."""
    width: Annotated[int, require.at_least(1)] = 32
    """Channels of the first layer."""
    dropout: Annotated[float, require.between(0, 1)] = 0.0
    """Dropout probability before the last layer."""
    num_classes: Annotated[int, require.at_least(2)] = 10
    """Number of classes."""
    in_channels: Annotated[int, require.at_least(1)] = 1
    """Channels of an image."""


@dataclass(kw_only=True, slots=True)
class MLP(require.Checked):
    """A small multilayer perceptron over flattened samples."""

    _target_: str = "hpctrain.models.mlp.MLP"
    """Class to instantiate."""
    in_features: Annotated[int, require.at_least(1)] = 64
    """Numbers per sample."""
    width: Annotated[int, require.at_least(1)] = 64
    """Features of the hidden layers."""
    num_layers: Annotated[int, require.at_least(1)] = 2
    """Linear layers, including the last one."""
    num_classes: Annotated[int, require.at_least(2)] = 10
    """Number of classes."""
    dropout: Annotated[float, require.between(0, 1)] = 0.0
    """Dropout probability after each hidden layer."""


@dataclass(kw_only=True, slots=True)
class ResNet(require.Checked):
    """A residual network (ResNet v1.5) for images of 224 x 224 pixels or so; its weights are named as torchvision's."""

    _target_: str = "hpctrain.models.resnet.ResNet"
    """Class to instantiate."""
    depth: Annotated[int, require.one_of(18, 34, 50, 101)] = 50
    """Layers: 18, 34, 50 or 101."""
    num_classes: Annotated[int, require.at_least(2)] = 1000
    """Number of classes."""
    in_channels: Annotated[int, require.at_least(1)] = 3
    """Channels of an image."""
    zero_init_residual: bool = True
    """Initialise residual blocks as the identity."""


@dataclass(kw_only=True, slots=True)
class GPT(require.Checked):
    """A decoder-only transformer: small by default; `model=gpt2` to `model=gpt2_xl` are the sizes of GPT-2."""

    _target_: str = "hpctrain.models.gpt.GPT"
    """Class to instantiate."""
    vocab_size: Annotated[int, require.at_least(1)] = 256
    """Size of the vocabulary; 256 for bytes."""
    context_length: Annotated[int, require.at_least(1)] = 128
    """Longest sequence, in tokens."""
    num_layers: Annotated[int, require.at_least(1)] = 4
    """Blocks."""
    num_heads: Annotated[int, require.at_least(1)] = 4
    """Attention heads per block."""
    width: Annotated[int, require.at_least(1)] = 128
    """Features per token; a multiple of num_heads."""
    dropout: Annotated[float, require.between(0, 1)] = 0.0
    """Dropout probability in each block."""
