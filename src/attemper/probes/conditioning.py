"""How well conditioned tokens are: κ, effective rank, similarity; and the bound on κ behind linear attention.

Always Skip Attention (ICCV 2025) argues with the condition number of the token matrix X (N, d): attention without its
skip makes it grow with every block, roughly as κ³.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import ParameterError


def singular_values(x: Tensor) -> Tensor:
    """Singular values of X (…, N, d), largest first, (…, min(N, d)) in float64.

    A long matrix is first reduced to its triangular factor, which has the same singular values and is much smaller. The
    Gram matrix XᵀX would be faster still, but squares κ, and with it loses half of the digits.
    """
    x = x.detach().double()
    x = x if x.shape[-2] >= x.shape[-1] else x.transpose(-2, -1)
    if x.shape[-2] >= 2 * x.shape[-1]:
        x = torch.linalg.qr(x, mode="r").R
    values: Tensor = torch.linalg.svdvals(x)
    return values


def condition_number(x: Tensor) -> Tensor:
    """κ = σ_max / σ_min of X (…, N, d), in float64; infinite where the smallest singular value is 0.

    >>> condition_number(torch.diag(torch.tensor([4.0, 2.0, 1.0]))).item()
    4.0
    """
    return _condition(singular_values(x))


def _condition(sigma: Tensor) -> Tensor:
    return sigma[..., 0] / sigma[..., -1]


def effective_rank(x: Tensor) -> Tensor:
    """exp of the entropy of the singular values, normalised to sum to 1. Roy and Vetterli, 2007.

    >>> round(effective_rank(torch.eye(5)).item(), 6)
    5.0
    """
    return _rank(singular_values(x))


def _rank(sigma: Tensor) -> Tensor:
    rank: Tensor = torch.special.entr(sigma / sigma.sum(-1, keepdim=True)).sum(-1).exp()
    return rank


def token_similarity(x: Tensor) -> Tensor:
    """Mean cosine between two different tokens of X (…, N, d): 1 where all point the same way. Linear in N.

    >>> round(token_similarity(torch.ones(3, 2)).item(), 6)
    1.0
    """
    x = x.detach().double()
    n = x.shape[-2]
    if n < 2:
        return torch.full(x.shape[:-2], torch.nan, dtype=torch.float64, device=x.device)
    unit = x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    cosines: Tensor = (unit.sum(-2) ** 2).sum(-1) - (unit**2).sum((-2, -1))
    return cosines / (n * (n - 1))


class Conditioning(NamedTuple):
    """Of the token matrices of some samples: medians of κ and rank, the mean of similarity."""

    condition: float
    effective_rank: float
    similarity: float


def conditioning(x: Tensor) -> Conditioning:
    """x: (B, N, d)."""
    sigma = singular_values(x)
    return Conditioning(
        float(_condition(sigma).median()), float(_rank(sigma).median()), float(token_similarity(x).mean())
    )


# ---------------------------------------------------------------------------------------------------------- the bound
def linear_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """(X W_q)(X W_k)ᵀ(X W_v): attention without softmax. x: (…, N, d); weights (d, d)."""
    return (x @ w_q) @ ((x @ w_k).transpose(-2, -1) @ (x @ w_v))


class Bound(NamedTuple):
    """Both sides of κ(linear attention) ≤ κ(W_q) κ(W_k) κ(W_v) · κ(X)³."""

    condition: Tensor
    bound: Tensor

    @property
    def holds(self) -> bool:
        """Whether it does, up to what rounding does to the computed left side."""
        rounding = torch.finfo(torch.float64).eps * self.condition
        return bool((self.condition <= self.bound * (1 + 1e-6 + rounding)).all())


def linear_attention_bound(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Bound:
    """Check the bound on given tokens and weights. It needs N ≥ d and square invertible weights.

    With fewer tokens than dimensions, W can turn a direction that X has into one that it has not: the product then
    loses rank, while every factor on the right side stays finite.
    """
    n, d = x.shape[-2:]
    if n < d:
        raise ParameterError(f"the bound needs at least as many tokens as dimensions; got {n} tokens of {d}")
    for name, w in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v)):
        if w.shape[-2:] != (d, d):
            raise ParameterError(f"the bound needs square weights ({d}, {d}); {name} is {tuple(w.shape)}")
        if not bool(torch.isfinite(condition_number(w)).all()):
            raise ParameterError(f"the bound needs invertible weights; {name} is singular")
    x, w_q, w_k, w_v = (t.double() for t in (x, w_q, w_k, w_v))
    out = condition_number(linear_attention(x, w_q, w_k, w_v))
    factors = condition_number(w_q) * condition_number(w_k) * condition_number(w_v)
    return Bound(out, factors * condition_number(x) ** 3)
