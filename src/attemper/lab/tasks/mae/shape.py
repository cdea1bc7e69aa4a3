"""What a masked autoencoder takes and gives: an image with the order in which patches are hidden; those patches."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class MaskedShape:
    """Square images in, the pixels of their patches out.

    patch: side of a patch. visible: how many patches of an image are seen.
    """

    channels: int
    side: int
    patch: int
    visible: int

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2

    @property
    def classes(self) -> int:
        """Numbers that are predicted of a patch."""
        return self.channels * self.patch**2

    def __str__(self) -> str:
        return (
            f"{self.channels} × {self.side} × {self.side} in patches of {self.patch} × {self.patch}, "
            f"{self.visible} of {self.patches} visible"
        )

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(samples, self.channels, self.side, self.side)
        ranks = torch.rand(samples, self.patches).argsort(1)
        return self.join(images, ranks), self.aims(images, ranks, per_patch=False)

    def join(self, images: Tensor, ranks: Tensor) -> Tensor:
        """Images (B, C, S, S) and the rank of every patch (B, N), the first `visible` of which are seen, in one row."""
        return torch.cat([images.flatten(1), ranks.to(images.dtype)], 1)

    def parted(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What `join` has put together."""
        images, ranks = inputs.split([self.channels * self.side**2, self.patches], 1)
        return images.unflatten(1, (self.channels, self.side, self.side)), ranks

    def cut(self, images: Tensor) -> Tensor:
        """(B, C, S, S) → (B, N, patch · patch · C), in the order of Transformers' ViT-MAE."""
        rows = self.side // self.patch
        x = images.unflatten(3, (rows, self.patch)).unflatten(2, (rows, self.patch))
        patches: Tensor = x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return patches

    def glued(self, patches: Tensor) -> Tensor:
        """The images that `cut` has made patches of."""
        rows = self.side // self.patch
        x = patches.unflatten(1, (rows, rows)).unflatten(3, (self.patch, self.patch, self.channels))
        images: Tensor = x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
        return images

    def spread(self, hidden: Tensor) -> Tensor:
        """A number per patch (B, N) → per pixel (B, 1, S, S)."""
        rows = self.side // self.patch
        grid: Tensor = hidden.unflatten(1, (1, rows, rows))
        return grid.repeat_interleave(self.patch, 2).repeat_interleave(self.patch, 3)

    def aims(self, images: Tensor, ranks: Tensor, *, per_patch: bool) -> Tensor:
        """What is to be predicted (B, N, patch · patch · C + 1); the last number says whether a patch is hidden.

        per_patch: each patch with mean 0 and variance 1 (MAE, section 4.1).
        """
        wanted = self.cut(images)
        if per_patch:
            wanted = (wanted - wanted.mean(-1, keepdim=True)) / (wanted.var(-1, keepdim=True) + TINY).sqrt()
        return torch.cat([wanted, (ranks >= self.visible).to(wanted.dtype)[..., None]], -1)


TINY = 1e-6
"""Added to the variance of a patch, as in Transformers."""
