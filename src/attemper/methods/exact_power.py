"""Powers of singular values by a decomposition, in float64, with a derivative that repeated and zero ones leave finite.

X = UΣVᵀ becomes UΣ̃Vᵀ with σ̃ = σ_max (σ/σ_max)^ε. The derivative that torch has of its SVD divides by differences of
squared singular values. Here it is that of the whole map (Daleckii and Krein, for the odd function g(σ) = σ^ε of the
symmetric matrix [[0, X], [Xᵀ, 0]]), of which U and V are only the means: with M = Uᵀ dX V,

    Uᵀ dG V = S ∘ (M + Mᵀ)/2 + T ∘ (M - Mᵀ)/2,    S_ij = (g_i - g_j)/(σ_i - σ_j),    T_ij = (g_i + g_j)/(σ_i + σ_j),

S_ii = g'(σ_i), and dX outside of the spaces of U and V is scaled by g/σ. Both tables are finite where singular values
repeat. Between two zero ones σ^ε has no derivative; there 0 stands, so that zeros stay zero. It is exact for every
direction that leaves the rank as it is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SLACK = 4
"""Singular values are known to within a few units in the last place of the largest, times the longer side."""


def power_exactly(x: Tensor, eps: float, rescale: bool = True) -> Tensor:
    """X (…, n, d) with its singular values raised to eps, relative to the largest; zero ones stay zero.

    Those are zero that may be nothing but the rounding of X's entries to its type. A matrix that is not finite gives
    NaN.

    rescale: multiply by σ_max again, so that the largest singular value stays; False leaves it at 1.
    """
    finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    wide = torch.where(finite, x, 0.0).to(torch.float64)  # of anything else there is no decomposition
    out: Tensor = _ExactPower.apply(wide, eps, rescale, torch.finfo(x.dtype).eps / 2)[0]
    return torch.where(finite, out.to(x.dtype), torch.nan)


class _ExactPower(torch.autograd.Function):
    """X (…, n, d) in float64 → X̃, and U, Σ, Vᵀ, which nothing differentiates.

    rounding: the relative error of each entry.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float, rescale: bool, rounding: float) -> tuple[Tensor, ...]:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        known = is_known(s, max(x.shape[-2:]), rounding)
        top = s[..., :1]
        share = torch.where(known, s / torch.where(top > 0, top, 1.0), 1.0)
        powered = torch.where(known, share**eps * (top if rescale else 1.0), 0.0)
        out = torch.where(top[..., None] > 0, (u * powered[..., None, :]) @ vh, x)
        return out, u, s, vh

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.eps, ctx.rescale, ctx.rounding = inputs
        out, *decomposed = output
        ctx.mark_non_differentiable(*decomposed)
        ctx.save_for_backward(out, *decomposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        out, u, s, vh = ctx.saved_tensors
        known = is_known(s, max(out.shape[-2:]), ctx.rounding)
        top = s[..., :1, None]
        safe = torch.where(top > 0, top, 1.0)
        over_top = _derivative(grad, u, s / safe[..., 0], vh, known, ctx.eps)
        leading = s >= s[..., :1] * (1 - SLACK * max(out.shape[-2:]) * torch.finfo(s.dtype).eps)
        weight = leading / leading.sum(-1, keepdim=True)  # where several are the largest, each has its share
        along = (grad * out).sum((-2, -1), keepdim=True) / safe
        of_top = along * ((u * weight[..., None, :]) @ vh)
        total = over_top + (1 - ctx.eps) * of_top if ctx.rescale else over_top / safe - ctx.eps * of_top
        return torch.where(top > 0, total, grad), None, None, None


def is_known(s: Tensor, side: int, rounding: float) -> Tensor:
    """Which singular values (…, r), falling, are more than zeros may become.

    Decomposing moves them by a few units in the last place of the largest. An error of every entry moves them by its
    own norm at most, which is its share of that of the matrix.
    """
    decomposing = s[..., :1] * (SLACK * side * torch.finfo(s.dtype).eps)
    return s > torch.maximum(decomposing, rounding * s.norm(dim=-1, keepdim=True))


def _derivative(grad: Tensor, u: Tensor, s: Tensor, vh: Tensor, known: Tensor, eps: float) -> Tensor:
    """The derivative of UΣ^εVᵀ, which is its own adjoint, in the direction `grad`; s (…, r) is at most 1."""
    s = torch.where(known, s, 0.0)
    scale = torch.where(known, torch.where(known, s, 1.0) ** (eps - 1), 0.0)  # g/σ
    inner = u.mT @ grad @ vh.mT
    even, odd = _tables(s, scale, known, eps)
    core = (even + odd) / 2 * inner + (even - odd) / 2 * inner.mT
    left, right = grad - u @ (u.mT @ grad), grad - (grad @ vh.mT) @ vh
    # Of a matrix that is not square one of the two is zero, up to rounding; of a square one both.
    outside = (left @ vh.mT) * scale[..., None, :] @ vh + (u * scale[..., None, :]) @ (u.mT @ right)
    return u @ core @ vh + outside


def _tables(s: Tensor, scale: Tensor, known: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """S and T of this module's docstring, (…, r, r): between zeros 0, between one zero and another g/σ of the other."""
    larger = torch.maximum(s[..., :, None], s[..., None, :])
    smaller = torch.minimum(s[..., :, None], s[..., None, :])
    both = known[..., :, None] & known[..., None, :]
    a, b = torch.where(both, larger, 1.0), torch.where(both, smaller, 1.0)
    # (a^ε - b^ε)/(a - b) without a difference of numbers that are nearly equal, r = log a/b: near 0 it is ε.
    r = torch.log(a / b)
    apart = r > 0
    quotient = torch.where(apart, torch.expm1(eps * r) / torch.where(apart, torch.expm1(r), 1.0), eps)
    even, odd = quotient * b ** (eps - 1), (a**eps + b**eps) / (a + b)
    single = scale[..., :, None] + scale[..., None, :]  # of which one is zero where not both are known
    return torch.where(both, even, single), torch.where(both, odd, single)
