"""Blurred attention smoothing: convolve the logits along the keys with a Gaussian. AttentionDrop, 2025.

The blur is linear along keys, so blur(QKᵀ) = Q(GK)ᵀ: blurring K once replaces a convolution of N × N logits, and any
fused kernel serves the rest.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import ClassVar, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import (
    Paper,
    Place,
    check_choice,
    check_grid,
    check_number,
    check_odd,
    check_prefix,
    check_strength,
    value_at,
)
from attemper.methods.kinds import Learnable
from attemper.methods.learning import ENTROPY, bounded, unbounded
from attemper.methods.rates import Moment, Timed
from attemper.ops import fused
from attemper.ops.perturbation import Perturbation, Stage
from attemper.ops.stream import Stream, causal_mask

FAINT = 1e-18
"""A padded key whose real neighbours weigh less than this altogether has none. It would divide by nearly nothing."""

START = 1.0
"""Where a learnt width begins."""

FUSED_TAPS = 9
"""Wider blurs are torch's: the kernel writes every tap out, on an image the square of them."""


def gaussian(sigma: Tensor, w: int, causal: bool = False) -> Tensor:
    """(w,) taps of a Gaussian of width sigma; with `causal`, those behind the centre are zero. They need not sum to 1.

    >>> gaussian(torch.tensor(0.0), 3).tolist()
    [0.0, 1.0, 0.0]
    """
    offset = torch.arange(w, device=sigma.device, dtype=sigma.dtype) - w // 2
    taps = torch.exp(-0.5 * (offset / sigma.clamp_min(1e-6)) ** 2)
    return taps * (offset <= 0) if causal else taps


def blur(x: Tensor, taps: Tensor, real: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
    """Weighted mean over neighbours along the second-last axis, over those that are real, renormalised at borders.

    x: (…, N, e); real: boolean (…, N, 1), broadcastable to x.
    grid: (rows, columns) where the N entries lie row by row on an image; the blur then runs along both of its axes.
    """
    weight = torch.ones_like(x[..., :1]) if real is None else real.to(x.dtype).expand(*x.shape[:-1], 1)
    total = smooth(weight, taps, grid)
    there = total > FAINT
    share = torch.where(there, 1 / torch.where(there, total, 1.0), 0.0)  # no gradient of 1/0 behind what is left out
    return smooth(x * weight, taps, grid) * share


def smooth(x: Tensor, taps: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """Σ_t taps_t · x_{j+t} along the second-last axis (or both axes of the grid), zeros beyond the border."""
    if grid is None:
        return _shift_and_add(x, taps, -2)
    image = x.unflatten(-2, grid)
    return _shift_and_add(_shift_and_add(image, taps, -3), taps, -2).flatten(-3, -2)


def _shift_and_add(x: Tensor, taps: Tensor, axis: int) -> Tensor:
    half, size = taps.numel() // 2, x.shape[axis]
    padded = F.pad(x, [0, 0] * (-axis - 1) + [half, half])
    out = taps[0] * padded.narrow(axis, 0, size)
    for t in range(1, taps.numel()):
        out = out + taps[t] * padded.narrow(axis, t, size)
    return out


@dataclasses.dataclass(frozen=True)
class Blur(Timed, Perturbation, Learnable):
    """Blur the content logits scale·QKᵀ along the keys, with a width drawn anew for every call.

    sigma: the largest width; σ is drawn from U(0, sigma). A number, or a list of one per block. "learn" learns it with
        the weights, from 1 on and below w/2, a gradient reaching it through the drawn width.
    w: how many keys the Gaussian covers, odd.
    grid: "raster" blurs along the sequence, our reading of the paper; "2d" along both axes of the image grid, which the
        raster gets wrong at the ends of image rows and at the class token. Prefix tokens are then left as they are.
    size, prefix: for grid="2d", (rows, columns) of the patches among the keys, and how many keys stand before them. In
        a tempered model they come from the model.
    entropy: with sigma=learn, the strength of the term −entropy · log sigma that keeps it from zero, in the loss.
    until, start, ramp: when it acts in the course of training, by multiplying sigma (see `Timed`).

    An additive mask or position bias is added after the blur, unblurred. Padding (a boolean mask) is left out of the
    mean; under causal attention a key is blurred with earlier keys only.
    """

    name: ClassVar[str] = "blur"
    summary: ClassVar[str] = "convolve the logits along the keys with a Gaussian of random width"
    paper: ClassVar[Paper] = Paper("AttentionDrop (blurred attention smoothing)", "2025")
    stochastic: ClassVar[bool] = True
    stages: ClassVar[tuple[Stage, ...]] = ("keys",)

    sigma: float | tuple[float, ...] | Literal["learn"] = 1.0
    w: int = 5
    grid: Literal["raster", "2d"] = "raster"
    size: tuple[int, int] | None = None
    prefix: int | None = None
    until: Moment | None = dataclasses.field(default=None, kw_only=True)
    start: Moment | None = dataclasses.field(default=None, kw_only=True)
    ramp: Moment | None = dataclasses.field(default=None, kw_only=True)
    entropy: float = dataclasses.field(default=ENTROPY, kw_only=True)

    def __post_init__(self) -> None:
        check_odd("w", self.w)
        self.check_times()
        object.__setattr__(self, "entropy", check_number("entropy", self.entropy))
        if not self.learns:
            object.__setattr__(self, "sigma", check_strength("sigma", self.sigma))
            if self.entropy != ENTROPY:
                raise ParameterError("entropy belongs to sigma=learn, and sigma is a number")
        elif self.ramp is not None:
            raise ParameterError("ramp multiplies a width, and a learnt one (sigma=learn) takes its own way")
        elif self.w < 3:
            raise ParameterError("sigma=learn needs w=3 at least: a blur of one key does nothing")
        check_choice("grid", self.grid, ("raster", "2d"))
        if self.grid == "raster" and (self.size is not None or self.prefix is not None):
            raise ParameterError("size and prefix belong to grid=2d, and grid is raster")
        if self.size is not None:
            object.__setattr__(self, "size", check_grid("size", self.size))
        if self.prefix is not None:
            check_prefix(self.prefix)

    @property
    def idle(self) -> bool:
        if self.learns:
            return False
        widest = max(self.sigma, default=1.0) if isinstance(self.sigma, tuple) else self.sigma
        return widest == 0 or self.w == 1

    def times(self, factor: float) -> Self:
        if self.learns:
            return self if factor == 1 else dataclasses.replace(self, sigma=0.0, entropy=ENTROPY)
        if isinstance(self.sigma, tuple):
            return dataclasses.replace(self, sigma=tuple(sigma * factor for sigma in self.sigma))
        return dataclasses.replace(self, sigma=cast(float, self.sigma) * factor)

    @property
    def level(self) -> float | None:
        return self.sigma if isinstance(self.sigma, float) else None

    # -------------------------------------------------------------------------------------------------- a learnt width
    @property
    def learns(self) -> bool:
        return isinstance(self.sigma, str) and self.sigma == "learn"

    @property
    def adds_to_loss(self) -> bool:
        return self.learns and self.entropy > 0

    def first_value(self, place: Place, heads: int | None) -> Tensor:
        return torch.tensor([unbounded(START, self.w / 2)], dtype=torch.float32)

    def value_shown(self, value: Tensor) -> Tensor:
        return bounded(value, self.w / 2)

    def with_value(self, value: Tensor) -> Blur:
        here = copy.copy(self)
        object.__setattr__(here, "sigma", bounded(value, self.w / 2).reshape(()))  # a tensor, which no recipe could say
        return here

    def value_term(self, value: Tensor) -> Tensor:
        """−entropy · log sigma: up to a constant, that of the entropy of the uniform draw from 0 to sigma."""
        return -self.entropy * bounded(value, self.w / 2).log().sum()

    @property
    def per_block(self) -> tuple[str, ...]:
        return ("sigma",) if isinstance(self.sigma, tuple) else ()

    @property
    def tells_heads(self) -> bool:
        return False

    def at(self, place: Place) -> Blur:
        here = dataclasses.replace(self, sigma=value_at(self, "sigma", place))
        here = here.at_times(until=None, start=None, ramp=None)
        if self.grid == "raster" or self.size is not None:
            return here
        if place.grid is None and place.grid_follows:
            return here
        if place.grid is None:
            raise ParameterError(
                f"grid=2d needs the keys to lie on an image grid, and none is known for {place.where}; "
                "give it as size=[rows, columns] and prefix=n, or use grid=raster"
            )
        return dataclasses.replace(here, size=place.grid, prefix=place.prefix if self.prefix is None else self.prefix)

    @property
    def seeks_grid(self) -> bool:
        return self.grid == "2d" and self.size is None

    @property
    def given_prefix(self) -> int | None:
        return self.prefix

    def on_grid(self, grid: tuple[int, int], prefix: int) -> Blur:
        return dataclasses.replace(self, size=grid, prefix=prefix)

    def _check_order(self, causal: bool) -> None:
        if causal and self.grid == "2d":
            raise ParameterError("grid=2d has no causal order; causal attention needs grid=raster")

    def _image(self, keys: int) -> tuple[int, int, int]:
        """(prefix, rows, columns) of the keys of a call."""
        prefix = self.prefix or 0
        if self.size is None or keys != prefix + self.size[0] * self.size[1]:
            raise ParameterError(
                f"grid=2d needs keys = prefix + rows × columns; this call has {keys} keys, size={self.size}, "
                f"prefix={prefix}"
            )
        return prefix, *self.size

    @property
    def _width(self) -> float:
        if isinstance(self.sigma, tuple):
            raise ParameterError(f"{self} has a sigma per block; at(place) gives that of one of them")
        if isinstance(self.sigma, str):
            raise ParameterError("blur(learn) learns sigma in a tempered model (attemper.apply); here is no parameter")
        return self.sigma

    def drawn(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        """The width σ of a call: 0-dim, float64."""
        return stream.uniform() * self._width

    def _taps(self, x: Tensor, causal: bool, stream: Stream) -> Tensor:
        self._check_order(causal)
        return gaussian(stream.uniform() * self._width, self.w, causal).to(x.dtype)

    def _blur(self, x: Tensor, real: Tensor | None, taps: Tensor) -> Tensor:
        if self.grid == "raster":
            return blur(x, taps, real)
        prefix, *size = self._image(x.shape[-2])
        real = None if real is None else real[..., prefix:, :]
        return torch.cat([x[..., :prefix, :], blur(x[..., prefix:, :], taps, real, (size[0], size[1]))], -2)

    def perturb_keys(self, k: Tensor, real: Tensor | None, causal: bool, stream: Stream) -> Tensor:
        if self.w <= FUSED_TAPS and fused.keys.serves(k) and not isinstance(self.sigma, Tensor):
            self._check_order(causal)
            grid = () if self.grid == "raster" else self._image(k.shape[-2])
            row = None if real is None else real.squeeze(-2)
            return fused.keys.blur_keys(k, stream, self._width, self.w, causal, row, grid)
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        column = None if real is None else real.transpose(-2, -1)
        return self._blur(wide, column, self._taps(wide, causal, stream)).to(k.dtype)

    def perturb_content(self, content: Tensor, allowed: Tensor, causal: bool, stream: Stream) -> Tensor:
        allowed = allowed.expand(content.shape)
        if causal:
            allowed = allowed & causal_mask(content.shape[-2], content.shape[-1], stream.at, content.device)
        taps = self._taps(content, causal, stream)
        return self._blur(content[..., None], allowed[..., None], taps)[..., 0]
