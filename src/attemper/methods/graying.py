"""Token graying: bring the singular values of the input tokens closer together. Always Skip Attention, ICCV 2025."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Method, Paper, check_choice, check_flag
from attemper.methods.exact_power import power_exactly
from attemper.methods.kinds import PatchMap, Position, TokenMap, Tokens
from attemper.methods.spectral import (
    ALIGNED,
    COARSE,
    FINE,
    fit_power,
    largest_entry,
    power_singular_values,
    power_singular_values_in_half,
    scaled_half,
)
from attemper.ops.precision import without_autocast
from attemper.ops.stream import Stream

DEFAULT_EPS = {"dct": 0.95, "svd": 0.7}
HALVES = (torch.float16, torch.bfloat16)
LEAST = 2.0**-24  # the smallest number of float16
LEAST_COARSE = 0.6  # smaller powers raise singular values that float32's Gram matrix has lost by too much


def dct_matrix(n: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
    """(n, n) orthonormal DCT-II: rows are frequencies.

    >>> rows = dct_matrix(8)
    >>> bool(torch.allclose(rows @ rows.T, torch.eye(8, dtype=torch.float64)))
    True
    """
    device = torch.device("cpu" if device is None else device)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.from_numpy(_dct_table(n)).to(dtype, copy=True)
    # On the device and in the graph: one small kernel, where a table would be copied in every step.
    index = torch.arange(n, device=device)
    matrix = torch.sin(_turns(index, n).to(dtype) * (math.pi / (2 * n))) * math.sqrt(2 / n)
    return torch.where(index[:, None] == 0, math.sqrt(1 / n), matrix)


@functools.lru_cache(maxsize=32)
def _dct_table(n: int) -> NDArray[np.float64]:
    matrix: NDArray[np.float64] = np.sin(_turns(np.arange(n), n) * (math.pi / (2 * n))) * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    return matrix


def _turns(index: Any, n: int) -> Any:
    """The integers a, |a| ≤ n, of cos(π(2i + 1)k/2n) = sin(πa/2n): so reduced, float32 is enough for the sine."""
    return abs((2 * index + 1) * index[:, None] % (4 * n) - 2 * n) - n


def dct_of_real(real: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, N): of every sample the DCT-II of its real tokens alone, as if its padding were not there; zero elsewhere.

    real: boolean (B, N).
    """
    count = real.sum(-1)[:, None, None].clamp_min(1)  # n, of which frequencies k are 0 … n − 1
    place, frequency = real.cumsum(-1)[:, None, :] - 1, torch.arange(real.shape[-1], device=real.device)[:, None]
    angle = ((2 * place + 1) * frequency % (4 * count)).to(dtype) * (math.pi / 2) / count
    size = torch.where(frequency == 0, 1, 2).to(dtype) / count
    return torch.where(real[:, None, :] & (frequency < count), size.sqrt() * angle.cos(), 0.0)


def gray_dct(x: Tensor, eps: float, rescale: bool = True, real: Tensor | None = None) -> Tensor:
    """X (…, N, d) with the coefficients of its 2-D DCT raised to eps, relative to the largest, signs kept.

    real: boolean (B, N) for X (B, N, d); rows that are not real are zero and count for nothing.
    """
    rows = dct_matrix(x.shape[-2], x.dtype, x.device) if real is None else dct_of_real(real, x.dtype)
    columns = dct_matrix(x.shape[-1], x.dtype, x.device)
    coefficients = rows @ (x @ columns.mT)
    size = coefficients.abs()
    top = size.amax((-2, -1), keepdim=True)
    safe = torch.where(size > 0, size, 1.0)
    powered = torch.where(size > 0, (safe / torch.where(top > 0, top, 1.0)) ** eps, 0.0)
    powered = coefficients.sign() * (powered * top if rescale else powered)
    return rows.mT @ powered @ columns


def gray_dct_in_half(x: Tensor, eps: float, rescale: bool = True) -> Tensor:
    """The same with products in float16, whose 11 bits are more than bfloat16 keeps, and powers in float32."""
    n, d = x.shape[-2:]
    narrow, unit = scaled_half(x)
    rows, columns = (_aligned(dct_matrix(side, torch.float32, x.device)) for side in (n, d))
    coefficients = (rows @ (narrow @ columns.mT)).to(torch.float32)
    size = coefficients.abs().clamp(min=LEAST)
    top = largest_entry(size)
    # c |c|^(ε-1) here and the largest as a factor at the end, so that one pass over the coefficients finds both.
    powered = coefficients * torch.exp2((eps - 1) * size.log2())
    out = (rows.mT @ powered.to(torch.float16)) @ columns
    return (out[..., :n, :d] * (unit * top ** (1 - eps) if rescale else top**-eps)).to(x.dtype)


def _aligned(matrix: Tensor) -> Tensor:
    fill = -matrix.shape[-1] % ALIGNED
    return F.pad(matrix.to(torch.float16), (0, fill, 0, fill))


def gray_svd(x: Tensor, eps: float, rescale: bool = True) -> Tensor:
    """X (…, N, d) with its singular values raised to eps, relative to the largest: κ(X̃) = κ(X)^eps, without an SVD."""
    return power_singular_values(x, fit_power(eps), rescale)


@dataclasses.dataclass(frozen=True)
class TokenGraying(Method, PatchMap, TokenMap):
    """Improve the conditioning of the tokens that go into the network. Acts in eval mode too.

    kind: "dct" powers the coefficients of a 2-D DCT over tokens × channels; "svd" the singular values.
    eps: the exponent, in (0, 1]; None is 0.95 for dct and 0.7 for svd. 1 changes nothing.
    where: "patches", the flattened pixel patches before the patch embedding; "tokens", after embedding and position.
    rescale: keep the largest value as it is; False divides by it, as third-party notes have the paper's formula.
    exact: for kind="svd", decompose in float64 instead of approximating: slow, for who checks that κ becomes κ^eps.
    """

    name: ClassVar[str] = "graying"
    summary: ClassVar[str] = "bring singular values, or DCT coefficients, of the input tokens closer together"
    paper: ClassVar[Paper] = Paper("Always Skip Attention (token graying)", "ICCV 2025")

    kind: Literal["dct", "svd"] = "dct"
    eps: float | None = None
    where: Literal["patches", "tokens"] = "patches"
    rescale: bool = True
    exact: bool = False

    _fits: ClassVar[Any]

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("dct", "svd"))
        check_choice("where", self.where, ("patches", "tokens"))
        check_flag("rescale", self.rescale)
        check_flag("exact", self.exact)
        if self.exact and self.kind != "svd":
            raise ParameterError(f"exact belongs to kind=svd, and kind is {self.kind}, which approximates nothing")
        if self.eps is not None:
            if isinstance(self.eps, bool) or not isinstance(self.eps, int | float) or not 0 < self.eps <= 1:
                raise ParameterError(f"eps must be a number in (0, 1], got {self.eps!r}")
            object.__setattr__(self, "eps", float(self.eps))
        # Fitted here and not in the forward pass, which may be compiled.
        wanted = (FINE, COARSE) if self.exponent >= LEAST_COARSE else (FINE,)
        fitted = self.kind == "svd" and not self.exact
        fits = tuple(fit_power(self.exponent, precision) for precision in wanted) if fitted else ()
        object.__setattr__(self, "_fits", fits)

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

    @property
    def mixes_tokens(self) -> bool:  # type: ignore[override]
        return self.where == "tokens"

    def gray(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """Tokens (B, N, d) with better conditioning. real: boolean (B, N); padding neither counts nor changes.

        Patches on a GPU, where autocast asks for a half-precision type or they have one, are computed to about that
        accuracy; their singular values so only with an exponent of 0.6 or more, and not where `exact` is asked for.
        """
        if 0 in x.shape[-2:]:
            return x
        half = self.where == "patches" and _wants_half(x)
        with without_autocast(x):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            if real is not None:
                wide = torch.where(real[..., None], wide, 0.0)
            if self.kind == "dct" and not half:
                out = gray_dct(wide, self.exponent, self.rescale, real)
            elif self.kind == "dct":
                out = gray_dct_in_half(wide, self.exponent, self.rescale)
            elif self.exact:
                out = power_exactly(wide.to(x.dtype), self.exponent, self.rescale)
            elif half and len(self._fits) > 1:
                out = power_singular_values_in_half(wide, self._fits[1], self.rescale)
            else:
                out = power_singular_values(wide, self._fits[0], self.rescale)
        return out.to(x.dtype) if real is None else torch.where(real[..., None], out.to(x.dtype), x)

    def map_patches(self, patches: Tensor) -> Tensor:
        return self.gray(patches)

    def map_tokens(self, x: Tensor, tokens: Tokens, stream: Stream | None) -> Tensor:
        return self.gray(x, tokens.real)


def _wants_half(x: Tensor) -> bool:
    if x.requires_grad and torch.is_grad_enabled():
        return False  # float16 has no room for gradients, which are often below 1e-7
    if x.device.type != "cuda":
        return False
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") in HALVES
    return x.dtype in HALVES or (autocast and x.dtype is not torch.float64)
