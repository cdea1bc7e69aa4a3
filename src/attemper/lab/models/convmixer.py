"""ConvMixer, a network that mixes patches without attention. Trockman and Kolter, Patches Are All You Need?, 2022.

It serves the question whether attention needs its skip connection more than other ways of mixing do, so both of its
skips can be left out.
"""

from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.patch_size import patch_for


class MixerBlock(nn.Module):
    """Mix space, channel by channel, then mix channels, place by place."""

    def __init__(self, width: int, kernel: int, spatial_skip: bool, channel_skip: bool) -> None:
        super().__init__()
        self.spatial = _layer(nn.Conv2d(width, width, kernel, groups=width, padding="same"))
        self.channel = _layer(nn.Conv2d(width, width, 1))
        self.spatial_skip = spatial_skip
        self.channel_skip = channel_skip

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.spatial(x) if self.spatial_skip else self.spatial(x)
        out: Tensor = mixed + self.channel(mixed) if self.channel_skip else self.channel(mixed)
        return out


class ConvMixer(nn.Module):
    """Patches, blocks, mean over all places, classes: (B, C, H, W) → (B, classes)."""

    def __init__(
        self,
        shape: InputShape,
        *,
        width: int,
        depth: int,
        kernel: int,
        patch: int,
        spatial_skip: bool,
        channel_skip: bool,
    ) -> None:
        super().__init__()
        self.patches = _layer(nn.Conv2d(shape.channels, width, patch, stride=patch))
        self.blocks = nn.Sequential(*(MixerBlock(width, kernel, spatial_skip, channel_skip) for _ in range(depth)))
        self.head = nn.Linear(width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def _layer(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.GELU(), nn.BatchNorm2d(convolution.out_channels))


def convmixer(
    shape: InputShape,
    *,
    width: int = 256,
    depth: int = 8,
    kernel: int = 5,
    patch: int | None = None,
    spatial_skip: bool = True,
    channel_skip: bool = True,
) -> nn.Module:
    """A ConvMixer with a skip round the mixing of space and one round the mixing of channels.

    patch: side of a patch in pixels; None: whatever gives about 8 × 8 patches.
    spatial_skip, channel_skip: whether they are there. The published network has the first one alone.
    """
    patch = patch_for(shape) if patch is None else patch
    if shape.height < patch or shape.width < patch:
        raise ParameterError(f"patch is {patch}; the images have {shape.height} × {shape.width} pixels.")
    if kernel % 2 == 0:
        raise ParameterError(f"kernel is {kernel}; it must be odd, so that it has a middle.")
    return ConvMixer(
        shape,
        width=width,
        depth=depth,
        kernel=kernel,
        patch=patch,
        spatial_skip=spatial_skip,
        channel_skip=channel_skip,
    )
