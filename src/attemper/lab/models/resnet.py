"""ResNet for small images. He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2.

It serves the question whether attention needs its skip connection more than convolutions do, so its skips can be left
out: the "plain" network of that paper.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.tasks.base import InputShape

STAGES = 3
LAYERS = 2
"""Convolutions of a block."""


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions with batch norm, and round them a skip without parameters: ReLU(x + branch(x))."""

    def __init__(self, given: int, width: int, stride: int, skip: bool) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _convolution(given, width, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _convolution(width, width, 1),
            nn.BatchNorm2d(width),
        )
        self.stride, self.more, self.skip = stride, width - given, skip

    def shortcut(self, x: Tensor) -> Tensor:
        """x as the branch's output is shaped: every other place, and zeros for the channels that are new."""
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.branch(x)
        return F.relu(self.shortcut(x) + branch if self.skip else branch)


class ResNet(nn.Module):
    """A convolution, three stages of blocks, mean over all places, classes: (B, C, H, W) → (B, classes)."""

    def __init__(self, shape: InputShape, *, width: int, depth: int, skip: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(shape.channels, width, 1), nn.BatchNorm2d(width), nn.ReLU())
        blocks, given = [], width
        for stage in range(STAGES):
            for at in range(blocks_per_stage(depth)):
                blocks.append(ResidualBlock(given, width << stage, 2 if stage and not at else 1, skip))
                given = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(given, shape.classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def _convolution(given: int, width: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(given, width, 3, stride, padding=1, bias=False)


def blocks_per_stage(depth: int) -> int:
    """How many blocks each of the three stages has, of a network with so many layers with weights.

    >>> blocks_per_stage(20)
    3
    """
    blocks, left = divmod(depth - 2, STAGES * LAYERS)
    if left or blocks < 1:
        raise ParameterError(f"depth is {depth}; it must be 6n + 2, such as 8, 14, 20, 32, 44, 56.")
    return blocks


def resnet(shape: InputShape, *, width: int = 16, depth: int = 20, skip: bool = True) -> nn.Module:
    """The CIFAR network of the ResNet paper, with batch norm and skips without parameters.

    width: channels of the first stage; the second has twice, the third four times as many.
    depth: layers with weights, 6n + 2.
    skip: whether blocks have their skip connection; without any it is the paper's plain network.
    """
    return ResNet(shape, width=width, depth=depth, skip=skip)
