"""Which patches are hidden: drawn from a stream of the batch in training, from the image itself in evaluation.

So all recipes of a seed hide the same patches of the same images in training, and in evaluation an image has the same
hidden ones whoever measures it, in whichever batch and on whichever of several processes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.split import FIXED

AT_ONCE = 32
"""Images whose contents are multiplied side by side: the products have eight bytes each."""
STEP, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Odd numbers of 64 bits by which SplitMix64 counts and mixes (Steele, Lea and Flood 2014)."""


def drawn_ranks(samples: int, patches: int, seed: int) -> Tensor:
    """A random order of the patches of every image, int64 (B, N): the rank of each. On the CPU, for every device."""
    return torch.rand(samples, patches, generator=generator(seed, "masks")).argsort(1)


def ranks_of(stored: Tensor, patches: int) -> Tensor:
    """The same as a function of the images' pixels alone. stored: uint8 (B, C, H, W)."""
    pixels = stored.flatten(1)
    factors = _factors(pixels.shape[1]).to(stored.device)
    digests = [(part.long() * factors).sum(1) for part in pixels.split(AT_ONCE)]
    start = torch.cat(digests) if digests else pixels.new_zeros(0, dtype=torch.int64)
    numbers = start[:, None] + STEP * torch.arange(1, patches + 1, device=stored.device)
    ranks: Tensor = _mixed(numbers).argsort(dim=1, stable=True)
    return ranks


@functools.lru_cache(maxsize=4)
def _factors(pixels: int) -> Tensor:
    """Odd numbers, one for every pixel: products wrap round alike on every device."""
    return 2 * torch.randint(2**62, (pixels,), generator=generator(FIXED, "contents")) + 1


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's last steps, on words that torch takes for signed numbers."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    mixed: Tensor = x ^ _shifted(x, 31)
    return mixed


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
