"""Token graying: bring the singular values of the input tokens closer together. Always Skip Attention, ICCV 2025."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Method, Paper, check_choice, check_flag
from attemper.methods.kinds import ImageMap, Position, TokenMap, Tokens
from attemper.methods.spectral import fit_power, power_singular_values
from attemper.ops.stream import Stream

__all__ = ["TokenGraying", "dct_matrix", "gray_dct", "gray_svd"]

DEFAULT_EPS = {"dct": 0.95, "svd": 0.7}


@functools.lru_cache(maxsize=32)
def dct_matrix(n: int) -> Tensor:
    """(n, n) orthonormal DCT-II in float64: rows are frequencies."""
    frequency, position = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / n * (position + 0.5) * frequency) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def gray_dct(x: Tensor, eps: float, rescale: bool = True) -> Tensor:
    """X (…, N, d) with the coefficients of its 2-D DCT raised to eps, relative to the largest, signs kept."""
    rows, columns = (dct_matrix(n).to(x) for n in x.shape[-2:])
    coefficients = rows @ x @ columns.T
    size = coefficients.abs()
    top = size.amax((-2, -1), keepdim=True)
    safe = torch.where(size > 0, size, 1.0)
    powered = torch.where(size > 0, (safe / torch.where(top > 0, top, 1.0)) ** eps, 0.0)
    powered = coefficients.sign() * (powered * top if rescale else powered)
    return rows.T @ powered @ columns


def gray_svd(x: Tensor, eps: float, rescale: bool = True) -> Tensor:
    """X (…, N, d) with its singular values raised to eps, relative to the largest: κ(X̃) = κ(X)^eps, without an SVD."""
    return power_singular_values(x, fit_power(eps), rescale)


@dataclasses.dataclass(frozen=True)
class TokenGraying(Method, ImageMap, TokenMap):
    """Improve the conditioning of the tokens that go into the network. Acts in eval mode too.

    kind: "dct" powers the coefficients of a 2-D DCT over tokens × channels; "svd" the singular values.
    eps: the exponent, in (0, 1]; None is 0.95 for dct and 0.7 for svd. 1 changes nothing.
    where: "patches", the flattened pixel patches before the patch embedding; "tokens", after embedding and position.
    rescale: keep the largest value as it is; False divides by it, as third-party notes have the paper's formula.
    """

    name: ClassVar[str] = "graying"
    summary: ClassVar[str] = "bring the singular values of the input tokens closer together"
    paper: ClassVar[Paper] = Paper("Always Skip Attention (token graying)", "ICCV 2025")

    kind: Literal["dct", "svd"] = "dct"
    eps: float | None = None
    where: Literal["patches", "tokens"] = "patches"
    rescale: bool = True

    _fit: ClassVar[Any]

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("dct", "svd"))
        check_choice("where", self.where, ("patches", "tokens"))
        check_flag("rescale", self.rescale)
        if self.eps is not None:
            if isinstance(self.eps, bool) or not isinstance(self.eps, int | float) or not 0 < self.eps <= 1:
                raise ParameterError(f"eps must be a number in (0, 1], got {self.eps!r}")
            object.__setattr__(self, "eps", float(self.eps))
        # Fitted here and not in the forward pass, which may be compiled.
        object.__setattr__(self, "_fit", fit_power(self.exponent) if self.kind == "svd" else None)

    @property
    def exponent(self) -> float:
        """ε, its default filled in."""
        return DEFAULT_EPS[self.kind] if self.eps is None else self.eps

    @property
    def always(self) -> bool:
        return True

    @property
    def positions(self) -> tuple[Position, ...]:
        return ("entry",) if self.where == "tokens" else ()

    def gray(self, x: Tensor) -> Tensor:
        """Tokens (B, N, d) with better conditioning."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):
            if self.kind == "dct":
                out = gray_dct(wide, self.exponent, self.rescale)
            else:
                out = power_singular_values(wide, self._fit, self.rescale)
        return out.to(x.dtype)

    def map_image(self, image: Tensor, patch: tuple[int, int]) -> Tensor:
        height, width = image.shape[-2:]
        rows, columns = height // patch[0], width // patch[1]
        inside = image[..., : rows * patch[0], : columns * patch[1]]
        patches = F.pixel_unshuffle(inside, patch[0]) if patch[0] == patch[1] else None
        if patches is None:
            patches = inside.unflatten(-1, (columns, patch[1])).unflatten(-3, (rows, patch[0]))
            patches = patches.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
        gray = self.gray(patches.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (rows, columns))
        if patch[0] == patch[1]:
            out = F.pixel_shuffle(gray, patch[0])
        else:
            parts = gray.unflatten(1, (image.shape[1], *patch)).permute(0, 1, 4, 2, 5, 3)
            out = parts.flatten(4, 5).flatten(2, 3)
        return out if out.shape == image.shape else F.pad(out, (0, width - out.shape[-1], 0, height - out.shape[-2]))

    def map_tokens(self, x: Tensor, tokens: Tokens, stream: Stream | None) -> Tensor:
        return self.gray(x)
