"""Residual networks."""

from __future__ import annotations

from torch import Tensor, nn

from hpctrain.errors import ConfigError

LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Depth -> residual blocks per stage."""


class ResNet(nn.Module):
    """A residual network (He et al., 2015), version 1.5: the 3 x 3 convolution of a bottleneck has the stride.

    Modules, parameters and their order are those of torchvision's `resnet18` to `resnet101`, so that either loads the
    other's state dict.

    Args:
        depth: 18, 34, 50 or 101 layers: basic blocks up to 34, bottlenecks from 50.
        num_classes: number of logits.
        in_channels: channels of the images.
        zero_init_residual: start every block as the identity, with a weight of zero in its last norm (Goyal et al.,
            2017); torchvision's default is false.

    Raises:
        ConfigError: the depth isn't one of these.
    """

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(
        self, depth: int = 50, num_classes: int = 1000, in_channels: int = 3, zero_init_residual: bool = True
    ) -> None:
        super().__init__()
        if depth not in LAYERS:
            raise ConfigError("model.depth", depth, "unknown depth", f"choose one of {', '.join(map(str, LAYERS))}")
        block = _Basic if depth < 50 else _Bottleneck
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for stage, num_blocks in enumerate(LAYERS[depth]):
            width = 64 * 2**stage
            blocks: list[nn.Module] = []
            for index in range(num_blocks):
                # the max pooling has already halved the resolution for the first stage
                blocks.append(block(inputs, width, stride=2 if stage and not index else 1))
                inputs = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        self._initialise(zero_init_residual)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, in_channels, height, width]."""
        # stages of the model after the first one get what the one before has computed
        stream = self.maxpool(self.relu(self.bn1(self.conv1(images)))) if self.conv1 else images
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            stream = stage(stream)
        if not self.fc:
            return stream
        logits: Tensor = self.fc(self.avgpool(stream).flatten(1))
        return logits

    def pipeline_plan(self) -> list[str | tuple[str, ...]]:
        """Return the modules between which the model may be cut into stages (`parallel.pipeline_degree`)."""
        return [("conv1", "bn1", "relu", "maxpool"), "layer1.*", "layer2.*", "layer3.*", "layer4.*", ("avgpool", "fc")]

    def _initialise(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, _Basic | _Bottleneck):
                nn.init.zeros_(module.last_norm.weight)


class _Basic(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, stream: Tensor) -> Tensor:
        branch = self.relu(self.bn1(self.conv1(stream)))
        branch = self.bn2(self.conv2(branch))
        out: Tensor = self.relu(branch + (stream if self.downsample is None else self.downsample(stream)))
        return out


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, stream: Tensor) -> Tensor:
        branch = self.relu(self.bn1(self.conv1(stream)))
        branch = self.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        out: Tensor = self.relu(branch + (stream if self.downsample is None else self.downsample(stream)))
        return out


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    # no bias: the batch norm that follows subtracts it again
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
