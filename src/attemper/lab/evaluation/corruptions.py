"""Common corruptions of images at five severities, in the spirit of Hendrycks and Dietterich, ICLR 2019.

All of them are drawn here: nothing is downloaded, and images may have any size and number of channels. Blurs grow with
the image, so that a severity looks alike at 32 and at 224 pixels. The figures are not those of ImageNet-C or CIFAR-10-C
and must not be put beside them.
"""

import io
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ParameterError, suggestion
from attemper.lab.tasks.seed_streams import generator as stream

SEVERITIES = (1, 2, 3, 4, 5)


def corrupt(pixels: Tensor, name: str, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupted copies of images.

    pixels: (B, C, H, W) in [0, 1], and so is what comes back, on the same device.
    name: one of `CORRUPTIONS`. severity: 1 (mild) to 5.
    seed: of whatever is drawn, the same for all severities and on every device.

    >>> images = torch.rand(2, 3, 16, 16)
    >>> corrupt(images, "fog", 3).shape
    torch.Size([2, 3, 16, 16])
    """
    if name not in CORRUPTIONS:
        known = ", ".join(CORRUPTIONS)
        raise ParameterError(f"There is no corruption '{name}'.{suggestion(name, CORRUPTIONS)} There are: {known}.")
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ParameterError(f"The severity is {severity!r}; it must be a whole number from 1 to 5.")
    return CORRUPTIONS[name](pixels, severity - 1, stream(seed, "corruption", name)).clamp(0, 1)


# ---------------------------------------------------------------------------------------------------------------- noise
def gaussian_noise(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """The same to all pixels: thermal noise."""
    deviation = (0.08, 0.12, 0.18, 0.26, 0.38)[level]
    return x + deviation * torch.randn(x.shape, generator=draw).to(x)


def shot_noise(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """Light that arrives photon by photon: more noise where there is more light."""
    photons = (60.0, 25.0, 12.0, 5.0, 3.0)[level]
    return torch.poisson(x.cpu().float() * photons, generator=draw).to(x) / photons


def impulse_noise(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """Salt and pepper: dead pixels and hot ones."""
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[level]
    hit = torch.rand(x.shape, generator=draw).to(x) < share
    return torch.where(hit, (torch.rand(x.shape, generator=draw) < 0.5).to(x), x)


# ----------------------------------------------------------------------------------------------------------------- blur
def defocus_blur(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """A lens out of focus: every point becomes a disc."""
    radius = (0.5, 0.6, 0.7, 0.85, 1.0)[level] + (0.010, 0.015, 0.022, 0.030, 0.038)[level] * min(x.shape[-2:])
    rows, columns = _offsets(math.ceil(radius), x)
    disc = (radius + 0.5 - (rows.square() + columns.square()).sqrt()).clamp(0, 1)
    return _filtered(x, disc.expand(len(x), -1, -1))


def motion_blur(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """A camera that moved: every point becomes a line, in each image in another direction."""
    length = (0.4, 0.8, 1.2, 1.6, 2.0)[level] + (0.02, 0.035, 0.05, 0.065, 0.08)[level] * min(x.shape[-2:])
    angle = (math.pi * torch.rand(len(x), 1, 1, generator=draw)).to(x)
    rows, columns = _offsets(math.ceil(length / 2), x)
    along = columns * angle.cos() + rows * angle.sin()
    beyond = (along.abs() - length / 2).clamp(min=0)
    across = rows * angle.cos() - columns * angle.sin()
    return _filtered(x, (1 - (beyond.square() + across.square()).sqrt()).clamp(min=0))


def _offsets(reach: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """How far each cell of a square kernel is from its middle, downwards and to the right."""
    line = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    return line[:, None], line[None, :]


def _filtered(x: Tensor, kernels: Tensor) -> Tensor:
    """Every image (C, H, W) filtered by its own kernel (k, k), which is scaled to the sum 1; edges are continued."""
    batch, channels, height, width = x.shape
    reach = kernels.shape[-1] // 2
    kernels = (kernels / kernels.sum((1, 2), keepdim=True)).repeat_interleave(channels, 0)[:, None]
    padded = F.pad(x, (reach,) * 4, mode="replicate").reshape(1, batch * channels, height + 2 * reach, -1)
    return F.conv2d(padded, kernels, groups=batch * channels).reshape(batch, channels, height, width)


# ------------------------------------------------------------------------------------------------------- weather, light
def fog(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """A bright, uneven veil between camera and scene."""
    thickness = (0.2, 0.3, 0.4, 0.5, 0.6)[level]
    veil = 0.5 + 0.5 * plasma(len(x), x.shape[-2], x.shape[-1], draw).to(x)
    return (1 - thickness) * x + thickness * veil


def plasma(count: int, height: int, width: int, draw: torch.Generator, *, roughness: float = 0.55) -> Tensor:
    """Random clouds (count, 1, H, W) from 0 to 1: ever finer grids of noise on top of each other, ever fainter."""
    clouds, strength, cells = torch.zeros(count, 1, height, width), 1.0, 2
    while cells <= max(height, width):
        grid = torch.rand(count, 1, cells + 1, cells + 1, generator=draw)
        clouds += strength * F.interpolate(grid, (height, width), mode="bilinear", align_corners=True)
        strength, cells = strength * roughness, cells * 2
    low, high = clouds.amin((2, 3), keepdim=True), clouds.amax((2, 3), keepdim=True)
    return (clouds - low) / (high - low).clamp(min=1e-6)


def brightness(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """Too much light."""
    return x + (0.1, 0.2, 0.3, 0.4, 0.5)[level]


def contrast(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """Too little difference between dark and bright."""
    kept = (0.6, 0.45, 0.3, 0.2, 0.1)[level]
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + kept * (x - mean)


# -------------------------------------------------------------------------------------------------------------- digital
def pixelate(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """Fewer and larger pixels, each with the mean of those that it covers."""
    share = (0.75, 0.62, 0.5, 0.38, 0.25)[level]
    return _averaging(x.shape[-2], share).to(x) @ x @ _averaging(x.shape[-1], share).T.to(x)


def _averaging(side: int, share: float) -> Tensor:
    """(side, side): gives each place the mean of its cell, where a line is cut into this share of cells."""
    cell = torch.arange(side) * max(1, round(share * side)) // side
    same = (cell[:, None] == cell).float()
    return same / same.sum(1, keepdim=True)


def jpeg(x: Tensor, level: int, draw: torch.Generator) -> Tensor:
    """Compressed by Pillow. Images that are not RGB are compressed channel by channel."""
    quality = (25, 18, 12, 8, 5)[level]
    stored = (x.detach().clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    planes = stored.permute(0, 2, 3, 1) if x.shape[1] == 3 else stored.flatten(0, 1)
    decoded = torch.stack([_through_jpeg(plane, quality) for plane in planes])
    out = decoded.permute(0, 3, 1, 2) if x.shape[1] == 3 else decoded.reshape(x.shape)
    return out.to(x) / 255


def _through_jpeg(plane: Tensor, quality: int) -> Tensor:
    """uint8 (H, W) or (H, W, 3), compressed and decompressed."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(plane.numpy()).save(file, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(file)))


CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "gaussian-noise": gaussian_noise,
    "shot-noise": shot_noise,
    "impulse-noise": impulse_noise,
    "defocus-blur": defocus_blur,
    "motion-blur": motion_blur,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "pixelate": pixelate,
    "jpeg": jpeg,
}
