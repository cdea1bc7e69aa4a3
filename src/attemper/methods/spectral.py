"""Powers of singular values by matrix products alone, with a known bound on the error.

X = UΣVᵀ becomes UΣ̃Vᵀ with σ̃ = σ_max (σ/σ_max)^ε, without an SVD. On s = σ/σ_max in [0, 1] the function s^ε is written
as a sum over the steps of an iteration that pushes s towards 1,

    y₀ = s,    y_{k+1} = y_k (a + b y_k² + c y_k⁴),    s^ε ≈ Σ_k y_k (w_k0 + w_k1 y_k² + w_k2 y_k⁴),

each y_k being a sigmoid in log s, one step further to the left. The weights come from a fit on a fine grid, which also
tells the largest error. Every y_k is s times a function of s², so only the Gram matrix of X's smaller side is needed.
It is kept in float64: squaring the singular values in float32 would lose the small ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PowerFit", "fit_power", "power_singular_values"]

STEP = (2.2, -1.85, 0.65)
TARGET = 6e-5
MOST_STEPS = 24  # each step reaches 2.2 times further down: to singular values of 1e-8 of the largest
NOISE = 2e-14  # added to s²: what rounding makes of a zero must not be negative, where the steps would blow it up
SQUARINGS = 9  # 2⁹ power iterations: the largest singular value to 1e-4


@dataclass(frozen=True)
class PowerFit:
    """The weights of one ε, and the largest error of the fit over s in [0, 1]."""

    weights: tuple[tuple[float, float, float], ...]
    error: float


@functools.cache
def fit_power(eps: float) -> PowerFit:
    """Fit s^eps with as few steps as reach the target, and tell the error reached.

    >>> fit_power(0.7).error < 6e-5
    True
    """
    best = None
    for steps in range(4, MOST_STEPS + 1, 2):
        fit = _fit(eps, steps)
        if best is None or fit.error < best.error:
            best = fit
        if best.error <= TARGET:
            break
    assert best is not None
    return best


def _fit(eps: float, steps: int) -> PowerFit:
    s = np.geomspace(1e-8, 1.002, 800)
    basis, target = np.stack(_terms(s, steps), 1), s**eps
    emphasis = np.ones_like(s)
    best: tuple[float, NDArray[Any]] | None = None
    for _ in range(40):  # reweighted least squares, towards the smallest largest error
        weights = np.linalg.lstsq(basis * emphasis[:, None], target * emphasis, rcond=1e-13)[0]
        error = np.abs(basis @ weights - target)
        if best is None or error.max() < best[0]:
            best = float(error.max()), weights
        emphasis *= (error / error.max() + 1e-3) ** 0.2
        emphasis /= emphasis.max()
    assert best is not None
    rows = best[1].reshape(-1, 3)
    return PowerFit(tuple((float(a), float(b), float(c)) for a, b, c in rows), best[0])


def _terms(s: NDArray[np.float64], steps: int) -> list[NDArray[np.float64]]:
    terms, y = [], s
    for step in range(steps + 1):
        terms += [y, y**3, y**5]
        if step < steps:
            y = y * (STEP[0] + STEP[1] * y**2 + STEP[2] * y**4)
    return terms


def power_singular_values(x: Tensor, fit: PowerFit, rescale: bool = True) -> Tensor:
    """X (…, n, d) with its singular values raised to the fit's power, relative to the largest; zero ones stay zero.

    rescale: multiply by σ_max again, so that the largest singular value stays; False leaves it at 1.
    """
    wide = x.to(torch.float64)
    flat = x.shape[-2] > x.shape[-1]
    gram = wide.transpose(-2, -1) @ wide if flat else wide @ wide.transpose(-2, -1)
    top = largest_eigenvalue(gram)
    safe = torch.where(top > 0, top, 1.0)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = _matrix_factor(gram / safe + NOISE * eye, fit)
    out = wide @ factor if flat else factor @ wide
    out = out if rescale else out / safe.sqrt()
    return torch.where(top > 0, out, wide).to(x.dtype)


def _matrix_factor(t: Tensor, fit: PowerFit) -> Tensor:
    """Σ_k M_k (w_k0 + w_k1 A_k + w_k2 A_k²) with y_k = s·M_k and A_k = y_k², all functions of t = s²."""
    eye = torch.eye(t.shape[-1], dtype=t.dtype, device=t.device)
    m, a = eye, t
    total = torch.zeros_like(t)
    for step, (w0, w1, w2) in enumerate(fit.weights):
        square = a @ a
        total = total + m @ (w0 * eye + w1 * a + w2 * square)
        if step + 1 < len(fit.weights):
            growth = STEP[0] * eye + STEP[1] * a + STEP[2] * square
            m = m @ growth
            a = growth @ a @ growth
    return total


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """(…, 1, 1): the largest eigenvalue of a positive semi-definite matrix, by repeated squaring and one quotient."""
    power = gram
    for _ in range(SQUARINGS):
        size = power.detach().abs().amax((-2, -1), keepdim=True)
        power = power.detach() / torch.where(size > 0, size, 1.0)
        power = power @ power
    # The column of largest diagonal entry lies in the leading eigenspace as well as any does.
    index = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    vector = power.take_along_dim(index, -1)
    norm = vector.square().sum(-2, keepdim=True)
    return (vector.transpose(-2, -1) @ gram @ vector) / torch.where(norm > 0, norm, 1.0)
