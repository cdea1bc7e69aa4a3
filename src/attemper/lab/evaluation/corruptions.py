"""Common corruptions of images at five severities, as published by Hendrycks and Dietterich, ICLR 2019.

Definitions and constants are those of the authors' scripts, for images of 32 × 32, 64 × 64 and 224 × 224 pixels; see
`corruption_constants`. The images themselves are drawn here, from a seed: nothing is downloaded.
"""

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.errors import ParameterError, suggestion
from attemper.lab.evaluation.corruption_constants import SEVERITIES, published_for
from attemper.lab.evaluation.corruption_filters import (
    clipped_zoom,
    continued,
    correlate,
    disk,
    mirrored,
    motion,
    plasma,
    reflected,
    sample,
    smooth,
)
from attemper.lab.tasks.seed_streams import generator as stream

AT_ONCE = 64
"""Images that are corrupted together: a bound on memory."""
GREY = (0.299, 0.587, 0.114)
"""OpenCV's weights of red, green and blue."""


def corrupt(pixels: Tensor, name: str, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupted copies of images.

    pixels: (B, C, H, W) in [0, 1], of which every value is taken as a byte. What comes back is in [0, 1] on the same
        device, cut down to bytes as the published sets are, and through JPEG where those are published as JPEG files.
    name: one of `CORRUPTIONS`. severity: 1 (mild) to 5.
    seed: of whatever is drawn, the same for all severities and on every device.

    >>> images = torch.rand(2, 3, 32, 32)
    >>> corrupt(images, "fog", 3).shape
    torch.Size([2, 3, 32, 32])
    """
    check_corruption(name)
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ParameterError(f"The severity is {severity!r}; it must be a whole number from 1 to 5.")
    if pixels.dim() != 4 or not pixels.numel():
        raise ParameterError(f"The images have the shape {tuple(pixels.shape)}; it must be (B, C, H, W), not empty.")
    chosen = published_for(*pixels.shape[1:]).set
    constants, draw = chosen.constants[name][severity - 1], stream(seed, "corruption", name)
    made = []
    for part in pixels.split(AT_ONCE):
        as_bytes = _bytes(part.float(), 0.5) / 255
        stored = _bytes(CORRUPTIONS[name](as_bytes, constants, draw), 1e-3)  # cut down, but for errors of rounding
        made.append(stored if chosen.quality is None else _through_jpeg(stored, chosen.quality, optimize=True))
    return (torch.cat(made) / 255).to(pixels.dtype)


def check_corruption(name: object) -> None:
    """Raise unless there is a corruption of this name."""
    if name not in CORRUPTIONS:
        near, known = suggestion(str(name), CORRUPTIONS), ", ".join(CORRUPTIONS)
        raise ParameterError(f"There is no corruption {name!r}.{near} There are: {known}.")


def _bytes(x: Tensor, more: float) -> Tensor:
    """Values in [0, 1] as whole numbers from 0 to 255: cut down after `more` is added."""
    return (255 * x.clamp(0, 1) + more).floor()


# ---------------------------------------------------------------------------------------------------------------- noise
def gaussian_noise(x: Tensor, deviation: float, draw: torch.Generator) -> Tensor:
    """The same to all pixels: thermal noise."""
    return x + deviation * torch.randn(x.shape, generator=draw).to(x)


def shot_noise(x: Tensor, photons: float, draw: torch.Generator) -> Tensor:
    """Light that arrives photon by photon: more noise where there is more light."""
    return torch.poisson(x.cpu() * photons, generator=draw).to(x) / photons


def impulse_noise(x: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Salt and pepper, in each channel by itself: dead pixels and hot ones."""
    hit = torch.rand(x.shape, generator=draw).to(x) < share
    return torch.where(hit, (torch.rand(x.shape, generator=draw) < 0.5).to(x), x)


def speckle_noise(x: Tensor, deviation: float, draw: torch.Generator) -> Tensor:
    """Noise in proportion to the light."""
    return x + x * (deviation * torch.randn(x.shape, generator=draw).to(x))


# ----------------------------------------------------------------------------------------------------------------- blur
def defocus_blur(x: Tensor, constants: tuple[float, float], draw: torch.Generator) -> Tensor:
    """A lens out of focus: every point becomes a disc."""
    return correlate(x, disk(*constants))


def gaussian_blur(x: Tensor, sigma: float, draw: torch.Generator) -> Tensor:
    """Every point becomes a Gaussian."""
    return smooth(x, sigma, truncate=4, edge=continued)


def glass_blur(x: Tensor, constants: tuple[float, int, int], draw: torch.Generator) -> Tensor:
    """Frosted glass: pixels are replaced by near ones, between two Gaussian blurs.

    The authors' script means to swap two pixels, but its second assignment reads what the first has just written. So
    the first pixel becomes the second, and the second stays; the published images were made like this.
    """
    sigma, reach, rounds = constants
    batch, _, height, width = x.shape
    blurred = _bytes(smooth(x, sigma, truncate=4, edge=continued), 1e-3).permute(0, 2, 3, 1).cpu().numpy()
    shuffled = np.ascontiguousarray(blurred)
    images = np.arange(batch)
    for _ in range(rounds):
        for row in range(height - reach, reach, -1):
            shifts = torch.randint(-reach, reach, (2, width, batch), generator=draw).numpy()
            for column in range(width - reach, reach, -1):
                downs, rights = shifts[:, column - reach]
                shuffled[images, row, column] = shuffled[images, row + downs, column + rights]
    out = torch.from_numpy(shuffled).permute(0, 3, 1, 2).to(x) / 255
    return smooth(out, sigma, truncate=4, edge=continued)


def motion_blur(x: Tensor, constants: tuple[float, float], draw: torch.Generator) -> Tensor:
    """A camera that moved, in each image at another angle."""
    return motion(x, *constants, _uniform(-45, 45, (len(x),), draw))


def zoom_blur(x: Tensor, constants: tuple[float, float], draw: torch.Generator) -> Tensor:
    """A camera that came nearer: the mean over ever larger images."""
    factors = np.arange(1, *constants)  # numpy's own: its rounding decides whether the last factor is there
    total = x.clone()
    for factor in factors:
        total += clipped_zoom(x, float(factor))
    return total / (len(factors) + 1)


# -------------------------------------------------------------------------------------------------------------- weather
def snow(x: Tensor, constants: tuple[float, ...], draw: torch.Generator) -> Tensor:
    """Flakes that fall at an angle, once more the other way round, before a whiter image."""
    mean, deviation, zoom, least, radius, sigma, kept = constants
    flakes = mean + deviation * torch.randn(len(x), 1, *x.shape[-2:], generator=draw)
    flakes = clipped_zoom(flakes, zoom)
    flakes = _bytes(torch.where(flakes < least, 0.0, flakes), 1e-3) / 255
    flakes = motion(flakes, radius, sigma, _uniform(-135, -45, (len(x),), draw)).to(x)
    whiter = torch.maximum(x, 1.5 * _grey(x) + 0.5)
    return kept * x + (1 - kept) * whiter + flakes + flakes.flip(2, 3)


def fog(x: Tensor, constants: tuple[float, float], draw: torch.Generator) -> Tensor:
    """Clouds between camera and scene."""
    thickness, decay = constants
    height, width = x.shape[-2:]
    side = 2 ** math.ceil(math.log2(max(height, width, 2)))
    clouds = plasma(len(x), side, decay, draw)[:, None, :height, :width].to(x)
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * clouds) * brightest / (brightest + thickness)


def brightness(x: Tensor, more: float, draw: torch.Generator) -> Tensor:
    """More light: the value of hue, saturation and value grows, and so all channels by one factor."""
    value = x.amax(1, keepdim=True)
    brighter = (value + more).clamp(max=1)
    return torch.where(value > 0, x * brighter / value.clamp(min=1e-9), brighter)


def contrast(x: Tensor, kept: float, draw: torch.Generator) -> Tensor:
    """Less difference between dark and bright: each channel nearer to its mean."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + kept * (x - mean)


def saturate(x: Tensor, constants: tuple[float, float], draw: torch.Generator) -> Tensor:
    """Paler or stronger colours: the saturation of hue, saturation and value is changed. Grey has the hue of red."""
    factor, more = constants
    if x.shape[1] != 3:
        raise ParameterError(f"saturate is for images of 3 channels, red, green and blue; these have {x.shape[1]}.")
    value, least = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    saturation = torch.where(value > 0, (value - least) / value.clamp(min=1e-9), 0.0)
    wanted = (factor * saturation + more).clamp(0, 1)
    away = (value - x) / (value * saturation).clamp(min=1e-9)  # how far from the value, as a share of the saturation
    red = torch.tensor([0.0, 1.0, 1.0]).to(x)[:, None, None]
    return value * (1 - wanted * torch.where(saturation > 0, away, red))


# -------------------------------------------------------------------------------------------------------------- digital
def elastic_transform(x: Tensor, constants: tuple[float, float, float], draw: torch.Generator) -> Tensor:
    """A random affine map, then every pixel is shifted a little, its neighbours almost alike."""
    strength, sigma, shift = constants
    batch, _, height, width = x.shape
    line_y, line_x = torch.arange(height, dtype=torch.float64), torch.arange(width, dtype=torch.float64)
    x_of, y_of = _affine(batch, height, width, shift, draw)
    rows, columns = (
        (line_x * a[:, None, None] + line_y[:, None] * b[:, None, None] + c[:, None, None]) for a, b, c in (y_of, x_of)
    )
    warped = sample(x, rows.to(x.device), columns.to(x.device), mirrored)
    right, down = (
        strength * smooth(_uniform(-1, 1, (batch, height, width), draw), sigma, truncate=3, edge=reflected)
        for _ in range(2)
    )
    rows, columns = line_y[:, None] + down, line_x + right
    return sample(warped, rows.to(x.device), columns.to(x.device), reflected)


def _affine(batch: int, height: int, width: int, shift: float, draw: torch.Generator) -> tuple[Any, Any]:
    """For the source's x and for its y: factors of the target's x and y, and a constant, each (B).

    Three points round the middle are moved by up to `shift` pixels; the map takes the new places back to the old.
    """
    third = min(height, width) // 3
    middle = torch.tensor([width // 2, height // 2], dtype=torch.float64)
    before = middle + third * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    after = before + _uniform(-shift, shift, (batch, 3, 2), draw).double()
    system = torch.cat([after, torch.ones(batch, 3, 1, dtype=torch.float64)], 2)
    solved = torch.linalg.solve(system, before.expand(batch, -1, -1))
    return solved[:, :, 0].unbind(1), solved[:, :, 1].unbind(1)


def pixelate(x: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Fewer and larger pixels: Pillow's box filter, down and up again."""
    from PIL import Image

    height, width = x.shape[-2:]
    small = max(1, int(width * share)), max(1, int(height * share))

    def through(image: Image.Image) -> Image.Image:
        box = Image.Resampling.BOX
        return image.resize(small, box).resize((width, height), box)

    return _by_pillow(_bytes(x, 0.5), through) / 255


def jpeg_compression(x: Tensor, quality: int, draw: torch.Generator) -> Tensor:
    """Compressed by Pillow. Images that are not RGB are compressed channel by channel."""
    return _through_jpeg(_bytes(x, 0.5), quality) / 255


def _through_jpeg(stored: Tensor, quality: int, *, optimize: bool = False) -> Tensor:
    from PIL import Image

    def through(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality, optimize=optimize)
        return Image.open(file)

    return _by_pillow(stored, through)


def _by_pillow(stored: Tensor, through: Callable[[Any], Any]) -> Tensor:
    """Images (B, C, H, W) of whole numbers from 0 to 255, each through a function of Pillow's images."""
    from PIL import Image

    as_bytes = stored.to(torch.uint8).cpu()
    planes = as_bytes.permute(0, 2, 3, 1) if stored.shape[1] == 3 else as_bytes.flatten(0, 1)
    made = torch.stack([torch.from_numpy(np.array(through(Image.fromarray(each.numpy())))) for each in planes])
    return (made.permute(0, 3, 1, 2) if stored.shape[1] == 3 else made.reshape(stored.shape)).to(stored)


def _grey(x: Tensor) -> Tensor:
    weights = torch.tensor(GREY) if x.shape[1] == 3 else torch.full((x.shape[1],), 1 / x.shape[1])
    return (x * weights.to(x)[:, None, None]).sum(1, keepdim=True)


def _uniform(low: float, high: float, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=draw)


Corruption = Callable[[Tensor, Any, torch.Generator], Tensor]
"""Images (B, C, H, W) of bytes / 255, the constants of a severity, and a generator on the CPU → images."""

CORRUPTIONS: dict[str, Corruption] = {
    "gaussian-noise": gaussian_noise,
    "shot-noise": shot_noise,
    "impulse-noise": impulse_noise,
    "defocus-blur": defocus_blur,
    "glass-blur": glass_blur,
    "motion-blur": motion_blur,
    "zoom-blur": zoom_blur,
    "snow": snow,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic-transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg-compression": jpeg_compression,
    "speckle-noise": speckle_noise,
    "gaussian-blur": gaussian_blur,
    "saturate": saturate,
}
"""By name: first those of `MAIN`, then those of `EXTRA`."""
