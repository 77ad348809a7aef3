"""``conf/model``: the network. ``model=own``: the task builds it. Owner: hpctrain.models."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class ConvNet:
    """A small convolutional net with batch norm."""

    _target_: str = "hpctrain.models.convnet.ConvNet"
    """Class to instantiate."""
    width: int = 32
    """Channels of the first layer."""
    dropout: float = 0.0
    """Dropout probability before the last layer."""
    num_classes: int = 10
    """Number of classes."""
    in_channels: int = 1
    """Channels of an image."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("model.width", self.width, 1)
        require.at_least("model.in_channels", self.in_channels, 1)
        require.at_least("model.num_classes", self.num_classes, 2)
        require.between("model.dropout", self.dropout, 0, 1)


@dataclass(kw_only=True, slots=True)
class MLP:
    """A small multilayer perceptron over flattened samples."""

    _target_: str = "hpctrain.models.mlp.MLP"
    """Class to instantiate."""
    in_features: int = 64
    """Numbers per sample."""
    width: int = 64
    """Features of the hidden layers."""
    num_layers: int = 2
    """Linear layers, including the last one."""
    num_classes: int = 10
    """Number of classes."""
    dropout: float = 0.0
    """Dropout probability after each hidden layer."""

    def __post_init__(self) -> None:
        """Check single values."""
        for key in ("in_features", "width", "num_layers"):
            require.at_least(f"model.{key}", getattr(self, key), 1)
        require.at_least("model.num_classes", self.num_classes, 2)
        require.between("model.dropout", self.dropout, 0, 1)


@dataclass(kw_only=True, slots=True)
class ResNet:
    """A residual network (ResNet v1.5) for images of 224 x 224 pixels or so; its weights are named as torchvision's."""

    _target_: str = "hpctrain.models.resnet.ResNet"
    """Class to instantiate."""
    depth: int = 50
    """Layers: 18, 34, 50 or 101."""
    num_classes: int = 1000
    """Number of classes."""
    in_channels: int = 3
    """Channels of an image."""
    zero_init_residual: bool = True
    """Initialise residual blocks as the identity."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.one_of("model.depth", str(self.depth), ("18", "34", "50", "101"))
        require.at_least("model.in_channels", self.in_channels, 1)
        require.at_least("model.num_classes", self.num_classes, 2)


@dataclass(kw_only=True, slots=True)
class GPT:
    """A decoder-only transformer: small by default; `model=gpt2` to `model=gpt2_xl` are the sizes of GPT-2."""

    _target_: str = "hpctrain.models.gpt.GPT"
    """Class to instantiate."""
    vocab_size: int = 256
    """Size of the vocabulary; 256 for bytes."""
    context_length: int = 128
    """Longest sequence, in tokens."""
    num_layers: int = 4
    """Blocks."""
    num_heads: int = 4
    """Attention heads per block."""
    width: int = 128
    """Features per token; a multiple of num_heads."""
    dropout: float = 0.0
    """Dropout probability in each block."""

    def __post_init__(self) -> None:
        """Check single values."""
        for key in ("vocab_size", "context_length", "num_layers", "num_heads", "width"):
            require.at_least(f"model.{key}", getattr(self, key), 1)
        require.between("model.dropout", self.dropout, 0, 1)
