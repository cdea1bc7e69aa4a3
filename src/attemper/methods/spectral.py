"""Powers of singular values by matrix products alone, with a known bound on the error.

X = UΣVᵀ becomes UΣ̃Vᵀ with σ̃ = σ_max (σ/σ_max)^ε, without an SVD. With t = (σ/σ_max)² in [0, 1], that is X times the
function t^((ε-1)/2) of its Gram matrix, which is written as a sum of falling sigmoids in log t,

    p₀ = 1 - t,    p_{k+1} = (1 + β_k) p_k² - β_k,    t^((ε-1)/2) ≈ c + Σ_k w_k p_k.

With β = 0 the p_k are the powers (1 - t)^(2^k), nearly exp(-2^k t), and the sum is a quadrature of the integral over
such exponentials that a power of t is. A step moves the sigmoid to the left by a factor 2 (1 + β_k), for one product.
The weights come from a fit on a fine grid, which also tells the largest error. Only the Gram matrix of X's smaller side
is needed.

Squaring the singular values loses the small ones: in float64 those below 3e-7 σ_max, in float32 below 9e-4 σ_max.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

RAMP = (0.1, 0.3)
"""β of the first and of the last step: where s is small, errors are small too and strides may be longer."""
MOST_STEPS = 46
WIDE_STEPS = 9  # what float16 rounds off after that many steps is worth about 1e-7 of t
ALIGNED = 8  # rows of float16 start at multiples of 16 bytes: without, GPUs fall back to slow kernels


@dataclass(frozen=True)
class Precision:
    """What a fit aims at, and what the arithmetic it is made for allows.

    target: the largest error of s^ε, for s from least to 1.
    noise: added to t. What rounding makes of a zero must not be negative, where the steps would blow it up.
    roundoff: relative error of the arithmetic, which the weights multiply.
    squarings: 2^squarings power iterations for σ_max, too small by a factor of n^(-1/2^(squarings + 1)) at the worst.
    reach: the largest s that the fit covers, which follows from that.
    """

    target: float
    noise: float
    roundoff: float
    squarings: int
    reach: float

    @property
    def least(self) -> float:
        """The smallest s that is told apart from noise."""
        return 2 * float(np.sqrt(self.noise))


FINE = Precision(target=3e-5, noise=2e-14, roundoff=1e-16, squarings=9, reach=1.007)
COARSE = Precision(target=1e-4, noise=2e-7, roundoff=6e-8, squarings=6, reach=1.05)


@dataclass(frozen=True)
class PowerFit:
    """c, the weights w (one more than there are β) of one ε, and the largest error over s from precision.least to 1."""

    constant: float
    weights: tuple[float, ...]
    betas: tuple[float, ...]
    error: float
    precision: Precision


@functools.cache
def fit_power(eps: float, precision: Precision = FINE) -> PowerFit:
    """Fit s^eps with as few steps as reach the target, or nearly the best there is, and tell the error reached.

    >>> fit_power(0.7).error < 3e-5
    True
    """
    fits = []
    for steps in range(2, MOST_STEPS + 1):
        fits.append(_fit(eps, steps, precision))
        if fits[-1].error <= precision.target:
            return fits[-1]
    near = 1.5 * min(fit.error for fit in fits)
    return next(fit for fit in fits if fit.error <= near)


def _fit(eps: float, steps: int, precision: Precision) -> PowerFit:
    s = np.geomspace(precision.least, precision.reach, 500)
    betas = tuple(float(beta) for beta in np.linspace(*RAMP, steps))
    basis, target = np.stack(_terms(s**2 + precision.noise, betas), 1) * s[:, None], s**eps
    emphasis = np.ones_like(s)
    best: tuple[float, NDArray[Any]] | None = None
    for _ in range(30):  # reweighted least squares, towards the smallest largest error
        weights = np.linalg.lstsq(basis * emphasis[:, None], target * emphasis, rcond=1e-13)[0]
        error = np.abs(basis @ weights - target)
        total = float(error.max() + precision.roundoff * np.abs(weights).sum())
        if best is None or total < best[0]:
            best = total, weights
        emphasis *= (error / error.max() + 1e-3) ** 0.2
        emphasis /= emphasis.max()
    assert best is not None
    constant, *rest = (float(weight) for weight in best[1])
    return PowerFit(constant, tuple(rest), betas, best[0], precision)


def _terms(t: NDArray[np.float64], betas: tuple[float, ...]) -> list[NDArray[np.float64]]:
    p = 1 - t
    terms = [np.ones_like(t), p]
    for beta in betas:
        p = (1 + beta) * p**2 - beta
        terms.append(p)
    return terms


def power_singular_values(x: Tensor, fit: PowerFit, rescale: bool = True) -> Tensor:
    """X (…, n, d) with its singular values raised to the fit's power, relative to the largest; zero ones stay zero.

    rescale: multiply by σ_max again, so that the largest singular value stays; False leaves it at 1.
    """
    wide = x.to(torch.float64)
    flat = x.shape[-2] > x.shape[-1]
    gram = wide.mT @ wide if flat else wide @ wide.mT
    top = largest_eigenvalue(gram, fit.precision.squarings, torch.float64)
    safe = torch.where(top > 0, top, 1.0)
    factor = _matrix_factor(gram / safe, fit)
    out = wide @ factor if flat else factor @ wide
    out = out if rescale else out / safe.sqrt()
    return torch.where(top > 0, out, wide).to(x.dtype)


def power_singular_values_in_half(x: Tensor, fit: PowerFit, rescale: bool = True) -> Tensor:
    """The same to about the accuracy of bfloat16: X, the last steps and the last product in float16.

    Gram matrix and first steps are in float32, or in float64 where the user lets float32 products round to TF32. The
    fit must be made for COARSE. Singular values below 9e-4 σ_max are raised by less than they should be.
    """
    (n, d), flat = x.shape[-2:], x.shape[-2] > x.shape[-1]
    narrow, unit = scaled_half(x)
    gram = _gram(narrow.mT if flat else narrow)
    rough = torch.bfloat16 if x.is_cuda else torch.float32  # of which products on a CPU are slow, or missing
    top = largest_eigenvalue(gram, fit.precision.squarings, rough)
    safe = torch.where(top > 0, top, 1.0)
    factor = _matrix_factor(gram / safe, fit, torch.float16)
    high = factor.to(torch.float16)
    # In an even image all entries of the factor round alike, which adds up: so what float16 leaves of them counts too.
    parts = (high, (factor - high).to(torch.float16))
    out, rest = ((narrow @ part if flat else part @ narrow).to(torch.float32) for part in parts)
    out = out + rest
    return (out[..., :n, :d] * (unit if rescale else safe.rsqrt().to(unit.dtype))).to(x.dtype)


def scaled_half(x: Tensor) -> tuple[Tensor, Tensor]:
    """X (…, n, d) in float16 and a power of two (…, 1, 1): X over it has its largest entry in [1, 2).

    Both sides are filled up with zeros to multiples of eight.
    """
    wide = x.to(torch.float32)
    size = largest_entry(wide.detach().abs())
    unit = torch.exp2(torch.log2(torch.where(size > 0, size, 1.0)).floor())
    rows, columns = (-side % ALIGNED for side in x.shape[-2:])
    return F.pad((wide / unit).to(torch.float16), (0, columns, 0, rows)), unit


def largest_entry(x: Tensor) -> Tensor:
    """(…, 1, 1): the largest of X (…, n, d), row by row, which keeps all of a GPU busy."""
    return x.amax(-1, keepdim=True).amax(-2, keepdim=True)


def _gram(x: Tensor) -> Tensor:
    """XXᵀ (…, n, n) of X in float16: products of 11 bits, summed in float32 or wider."""
    wide = torch.float64 if _may_round_float32() else torch.float32
    if x.is_cuda and x.ndim == 3 and not (x.requires_grad and torch.is_grad_enabled()):
        return torch.bmm(x, x.mT, out_dtype=torch.float32).to(wide)  # which has no derivative
    x = x.to(wide)
    return x @ x.mT


def _may_round_float32() -> bool:
    """Whether products of float32 on a GPU may be TF32's, of 11 bits."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # torch refuses to say where both its older and its newer switch were used
        return True


def _matrix_factor(t: Tensor, fit: PowerFit, narrow: torch.dtype | None = None) -> Tensor:
    """c + Σ_k w_k p_k (…, n, n), a function of t; steps from WIDE_STEPS on in the narrow type, if there is one."""
    shape = t.shape
    t = t.reshape(-1, *shape[-2:])
    eye = torch.eye(shape[-1], dtype=t.dtype, device=t.device)
    p = (1 - fit.precision.noise) * eye - t
    total = fit.constant * eye + fit.weights[0] * p
    for step, (beta, weight) in enumerate(zip(fit.betas, fit.weights[1:], strict=True)):
        if narrow is not None and step == WIDE_STEPS:
            p, eye = p.to(narrow), eye.to(narrow)
        p = torch.baddbmm(eye, p, p, beta=-beta, alpha=1 + beta)
        total = total + weight * p.to(total.dtype)
    return total.reshape(shape)


def largest_eigenvalue(gram: Tensor, squarings: int, dtype: torch.dtype) -> Tensor:
    """(…, 1, 1): the largest eigenvalue of a positive semi-definite matrix, by repeated squaring and one quotient.

    dtype: of the squarings, which only have to find a vector: an error of that counts squared in the quotient.
    """
    power = gram.detach()
    for squaring in range(squarings):
        if squaring % 3 == 0:  # three squarings of a matrix of largest entry 1 reach n⁸ at most, no overflow
            power = _over_largest(power).to(dtype)
        power = power @ power
    # The column of largest diagonal entry lies in the leading eigenspace as well as any does.
    index = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    vector = _over_largest(power).take_along_dim(index, -1).to(gram.dtype)
    norm = vector.square().sum(-2, keepdim=True)
    return (vector.mT @ (gram @ vector)) / torch.where(norm > 0, norm, 1.0)


def _over_largest(matrix: Tensor) -> Tensor:
    """A positive semi-definite matrix over its largest entry, which is on the diagonal; zeros stay."""
    size = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    return matrix / torch.where(size > 0, size, 1.0)
