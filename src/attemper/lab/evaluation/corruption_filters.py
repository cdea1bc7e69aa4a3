"""What corruptions are made of: smoothing, sampling, zooming, clouds and motion, for batches of images in torch.

The published scripts call OpenCV, scikit-image, SciPy and ImageMagick for these. Each function here says which of their
functions it computes.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Edge = Callable[[Tensor, int], Tensor]
"""Whole numbers, any of them outside of 0 … side − 1, and the side → the places inside that stand for them."""


# ---------------------------------------------------------------------------------------------------------------- edges
def mirrored(at: Tensor, side: int) -> Tensor:
    """d c b | a b c d | c b a: OpenCV's BORDER_REFLECT_101.

    >>> mirrored(torch.arange(-3, 7), 4).tolist()
    [3, 2, 1, 0, 1, 2, 3, 2, 1, 0]
    """
    if side == 1:
        return torch.zeros_like(at)
    inside = at.remainder(2 * (side - 1))
    return torch.minimum(inside, 2 * (side - 1) - inside)


def reflected(at: Tensor, side: int) -> Tensor:
    """c b a | a b c d | d c b: SciPy's mode 'reflect'.

    >>> reflected(torch.arange(-3, 7), 4).tolist()
    [2, 1, 0, 0, 1, 2, 3, 3, 2, 1]
    """
    inside = at.remainder(2 * side)
    return torch.minimum(inside, 2 * side - 1 - inside)


def continued(at: Tensor, side: int) -> Tensor:
    """a a a | a b c d | d d d: SciPy's mode 'nearest', ImageMagick's edge."""
    return at.clamp(0, side - 1)


# ------------------------------------------------------------------------------------------------------------ smoothing
def smooth(x: Tensor, sigma: float, *, truncate: float, edge: Edge) -> Tensor:
    """SciPy's `gaussian_filter` over the last two axes, as two products with a matrix: fast for any deviation.

    truncate: deviations after which the kernel ends.
    """
    rows, columns = (_smoothing(side, sigma, truncate, edge).to(x) for side in x.shape[-2:])
    return rows @ x @ columns.T


def _smoothing(side: int, sigma: float, truncate: float, edge: Edge) -> Tensor:
    """(side, side): row i holds the weights of every place for the place i."""
    reach = int(truncate * sigma + 0.5)
    if reach == 0:
        return torch.eye(side)
    offsets = torch.arange(-reach, reach + 1)
    weights = (-0.5 * (offsets / sigma).double().square()).exp()
    places = edge(torch.arange(side)[:, None] + offsets, side)
    matrix = torch.zeros(side, side, dtype=torch.float64)
    return matrix.scatter_add_(1, places, (weights / weights.sum()).expand(side, -1)).float()


def disk(radius: float, alias_blur: float) -> Tensor:
    """The kernel of a lens out of focus: a disc whose rim OpenCV's GaussianBlur has softened, (k, k)."""
    reach, size = (8, 3) if radius <= 8 else (int(radius), 5)
    line = torch.arange(-reach, reach + 1, dtype=torch.float64)
    flat = (line[:, None].square() + line.square() <= radius**2).double()
    flat /= flat.sum()
    offsets = torch.arange(size) - size // 2
    weights = (-0.5 * (offsets / alias_blur).double().square()).exp()
    weights /= weights.sum()
    places = mirrored(torch.arange(len(line))[:, None] + offsets, len(line))
    softening = torch.zeros(len(line), len(line), dtype=torch.float64)
    softening.scatter_add_(1, places, weights.expand(len(line), -1))
    return (softening @ flat @ softening.T).float()


def correlate(x: Tensor, kernel: Tensor) -> Tensor:
    """Every channel of every image under one kernel (k, k): OpenCV's filter2D with its own border."""
    reach = len(kernel) // 2
    rows, columns = (mirrored(torch.arange(-reach, side + reach), side).to(x.device) for side in x.shape[-2:])
    padded = x[..., rows, :][..., columns].flatten(0, 1)[:, None]
    return F.conv2d(padded, kernel.to(x)[None, None]).reshape(x.shape)


# ------------------------------------------------------------------------------------------------------------- sampling
def sample(x: Tensor, rows: Tensor, columns: Tensor, edge: Edge) -> Tensor:
    """Images (B, C, H, W) at places (B, h, w) between their pixels, bilinear: SciPy's map_coordinates of order 1."""
    height, width = x.shape[-2:]
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top)[:, None].to(x), (columns - left)[:, None].to(x)
    top, left = top.long(), left.long()
    flat = x.flatten(2)

    def at(row: Tensor, column: Tensor) -> Tensor:
        index = (edge(row, height) * width + edge(column, width)).flatten(1)[:, None].to(x.device)
        return flat.gather(2, index.expand(-1, x.shape[1], -1)).reshape(*x.shape[:2], *row.shape[1:])

    above = (1 - right) * at(top, left) + right * at(top, left + 1)
    below = (1 - right) * at(top + 1, left) + right * at(top + 1, left + 1)
    return (1 - down) * above + down * below


def clipped_zoom(x: Tensor, factor: float) -> Tensor:
    """The middle of images (B, C, H, W), enlarged to their own size: SciPy's `zoom` of order 1, then cut.

    Corners fall on corners there, as with align_corners here.
    """
    height, width = x.shape[-2:]
    tall, wide = (math.ceil(side / factor) for side in (height, width))
    top, left = (height - tall) // 2, (width - wide) // 2
    middle = x[..., top : top + tall, left : left + wide]
    size = round(tall * factor), round(wide * factor)
    grown = F.interpolate(middle, size, mode="bilinear", align_corners=True)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return grown[..., top : top + height, left : left + width]


# --------------------------------------------------------------------------------------------------------------- motion
def motion(x: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Images (B, C, H, W) drawn out, each along its angle (B): ImageMagick's MotionBlurImage.

    One half of a Gaussian of 2 · radius + 1 weights lies along a line of whole pixels. What comes back is rounded to
    bytes, as ImageMagick gives it out.
    """
    width = 2 * math.ceil(radius) + 1
    steps = torch.arange(width, dtype=torch.float64)
    bell = (-0.5 * (steps / sigma).square()).exp()
    weights = (bell / bell.sum()).tolist()
    angle = degrees.double().deg2rad()[:, None]
    rights = (steps * angle.cos() - 0.5).ceil().long().tolist()
    downs = (steps * angle.sin() - 0.5).ceil().long().tolist()
    height, wide = x.shape[-2:]
    padded = F.pad(x, (width,) * 4, mode="replicate")
    out = torch.zeros_like(x)
    for image, (across, along) in enumerate(zip(rights, downs, strict=True)):
        for weight, right, down in zip(weights, across, along, strict=True):
            top, left = width + down, width + right
            out[image].add_(padded[image, :, top : top + height, left : left + wide], alpha=weight)
    return (255 * out).round() / 255


# --------------------------------------------------------------------------------------------------------------- clouds
def plasma(count: int, side: int, decay: float, draw: torch.Generator) -> Tensor:
    """Random clouds (count, side, side) from 0 to 1, by the diamond-square algorithm on a torus.

    side: a power of two. decay: by which the roughness is divided as the grid gets finer; below 2, fine grain wins.
    """
    clouds = torch.zeros(count, side, side)
    step, roughness = side, 100.0

    def roughened(total: Tensor) -> Tensor:
        noise = 2 * torch.rand(total.shape, generator=draw) - 1
        return total / 4 + roughness * (roughness * noise)  # squared: so it was published

    while step >= 2:
        half = step // 2
        corners = clouds[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        clouds[:, half::step, half::step] = roughened(pairs + pairs.roll(-1, 2))
        middles = clouds[:, half::step, half::step]
        beside = middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)
        clouds[:, ::step, half::step] = roughened(beside)
        below = middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)
        clouds[:, half::step, ::step] = roughened(below)
        step, roughness = half, roughness / decay
    clouds -= clouds.amin((1, 2), keepdim=True)
    return clouds / clouds.amax((1, 2), keepdim=True).clamp(min=1e-12)
