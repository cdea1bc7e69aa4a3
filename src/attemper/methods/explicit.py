"""Explicit dropout: deterministic penalties on what dropout would take away. 2026, with Arora et al. (2021) beside it.

M keeps an entry with probability 1 − p, so X̃ = X − M ⊙ X is the part that dropout takes away, and every penalty is
½‖what X̃ becomes behind the weights‖² in expectation, as one of three readings has it: the paper's, which is a fraction
of the true one; the true one; and that of dropout with 1/(1−p), which alone is real dropout's extra squared loss.
The form for convolutions is our derivation. Nothing here builds an N × N matrix, nor a d × d one per sample.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attemper.methods.base import Method, Paper, Place, check_choice, check_rate
from attemper.methods.kinds import AttentionRecord, ConvolutionRecord, LayerRecord, Part, Penalty, wide
from attemper.methods.reductions import Reduction, check_reduction, divisor, reduced, sums_over_samples
from attemper.methods.squares import (
    SLICE,
    biased_square,
    convolution_output_square,
    convolution_own_square,
    kept,
    linear_output_square,
    product_square,
)
from attemper.methods.strengths import Strength, check_strengths, strength_at
from attemper.ops import fused

Expectation = Literal["paper", "exact", "inverted"]


def coefficients(p: float, expectation: str) -> tuple[float, float]:
    """E[X̃ᵀX̃] = c · G + d · diag(G) with G = XᵀX: (c, d)."""
    if expectation == "paper":
        return p * p, 0.0
    return (p * p, p * (1 - p)) if expectation == "exact" else (0.0, p / (1 - p))


def own_square(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_j ‖W[:, j]‖² Σ x_j²: the part of ‖XWᵀ‖² that each input channel makes by itself. x (…, d), weight (out, d)."""
    return (wide(x).flatten(0, -2).square().sum(0) * wide(weight).square().sum(0)).sum()


def linear_square(
    x: Tensor,
    weight: Tensor,
    p: float,
    expectation: str,
    seen: tuple[Tensor, Tensor | None] | None = None,
    square: Tensor | None = None,
) -> Tensor:
    """E‖X̃Wᵀ‖² summed over everything: x (B, N, d), weight (out, d).

    seen: XWᵀ + b (B, N, out) and b, where the layer gave them already; square: ‖XWᵀ‖², where even that is known.
    """
    joint, own = coefficients(p, expectation)
    total = wide(x.new_zeros(()))
    if joint:
        if square is None:
            out, bias = (x @ weight.T, None) if seen is None else seen
            square = linear_output_square(out, bias, x, weight)
        total = total + joint * square
    return total + own * own_square(x, weight) if own else total


def convolution_square(record: ConvolutionRecord, p: float, expectation: str) -> Tensor:
    """E‖w ∗ X̃‖² summed over everything: of each output, what dropout takes of the patch that it is made from."""
    joint, own = coefficients(p, expectation)
    total = wide(record.x.new_zeros(()))
    if joint:
        total = total + joint * convolution_output_square(record)
    return total + own * convolution_own_square(record) if own else total


def logit_square(
    dropped: Tensor,
    w_dropped: Tensor,
    left: Tensor,
    right: Tensor,
    heads: int,
    p: float,
    expectation: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """E‖X̃ W_dᵀ W_o Xᵀ‖² summed over samples and heads: dropout on one side of the logits, without 1/√e.

    dropped: (B, N, d), the side that dropout would act on; w_dropped: (H · e, d), its weight; left: (B, N, H · e), the
    two multiplied; right: (B, Nk, H · e), the other side's product. heads=1 takes the d × d product at once.
    dtype: that of the model's own products; in bfloat16 Gram matrices are products of bfloat16, too.
    """
    joint, own = coefficients(p, expectation)
    left, right = (wide(t).unflatten(-1, (heads, -1)).transpose(1, 2) for t in (left, right))  # (B, H, N, e)
    total = wide(dropped.new_zeros(()))
    if joint:
        gram = torch.bfloat16 if dtype == torch.bfloat16 else left.dtype  # float16 would overflow
        total = total + joint * product_square(left.to(gram), right.to(gram))
    if own:
        power = wide(dropped).square().sum(1)  # (B, d): diag(G)
        rows = wide(w_dropped).unflatten(0, (heads, -1))  # (H, e, d)
        for head in range(heads):
            total = total + own * _own_logits(power, rows[head], right[:, head])
    return total


def _for_each_head(keys: Tensor, axis: int, like: int, heads: int) -> Tensor:
    """What keys have along an axis of H · e as if every query head had its own; grouped queries share them."""
    groups = like // keys.shape[axis]
    if groups == 1:
        return keys
    repeated: Tensor = keys.unflatten(axis, (heads // groups, -1)).repeat_interleave(groups, axis)
    return repeated.flatten(axis, axis + 1)


def _own_logits(power: Tensor, rows: Tensor, right: Tensor) -> Tensor:
    """Σ_b Σ_j power_bj ‖R_b w_j‖² for one head: power (B, d), rows (e, d), right (B, N, e)."""
    total = power.new_zeros(())
    for i in range(0, rows.shape[0], SLICE):
        some = rows[i : i + SLICE]
        weighted = (some * power[:, None]) @ rows.T  # (B, slice, e): W diag(power) Wᵀ
        gram = right[..., i : i + SLICE].transpose(-2, -1) @ right
        total = total + (weighted * gram).sum()
    return total


def av_square(record: AttentionRecord, p: float, expectation: str) -> Tensor:
    """E‖A X̃ W_vᵀ‖² summed over everything."""
    joint, own = coefficients(p, expectation)
    total = wide(record.out.new_zeros(()))
    if joint:
        out, bias = record.out.transpose(1, 2), record.out_bias  # (B, N, H, e)
        total = total + joint * (wide(out).square().sum() if bias is None else biased_square(out, bias))
    if own:
        heads, width = record.out.shape[1], record.out.shape[-1]
        columns = wide(record.w_v).unflatten(0, (-1, width)).square().sum(1)  # (H, d): ‖W_v[:, j]‖²
        columns = columns.repeat_interleave(heads // columns.shape[0], 0)
        u = (wide(record.value).square() @ columns.T).transpose(1, 2)[..., None]  # (B, H, N, 1)
        total = total + own * _squared_attention(record, u)
    return total


def _squared_attention(record: AttentionRecord, u: Tensor) -> Tensor:
    """Σ_i Σ_a A_ia² u_a; some queries at a time where attention was fused, so that it is never whole."""
    if record.q is None or record.k is None:
        assert record.weights is not None
        return (wide(record.weights).square() @ u).sum()
    q, k = wide(record.q), wide(record.k)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    total = u.new_zeros(())
    for start in range(0, q.shape[2], QUERIES):
        total = total + checkpoint(_some_queries, record, q, k, u, start, use_reentrant=False)
    return total


QUERIES = 256


def _some_queries(record: AttentionRecord, q: Tensor, k: Tensor, u: Tensor, start: int) -> Tensor:
    q = q[:, :, start : start + QUERIES]
    scale = q.shape[-1] ** -0.5 if record.scale is None else record.scale
    logits = (q * scale) @ k.transpose(-2, -1)
    mask = record.attn_mask
    if mask is not None:
        mask = mask[..., start : start + QUERIES, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if record.is_causal:
        rows = torch.arange(start, start + q.shape[2], device=q.device)[:, None]
        logits = logits.masked_fill(torch.arange(logits.shape[-1], device=q.device) > rows, -torch.inf)
    return (logits.softmax(-1).square() @ u).sum()


@dataclasses.dataclass(frozen=True)
class ExplicitDropout(Method, Penalty):
    """Penalties on Q, K, V, attention times V, both layers of the MLP, and convolutions.

    The forward pass is left as it is.

    q, k, v, av, ff1, ff2: the strength λ of each component: a number, or a list of one per block. 0 costs nothing.
    ff: sets ff1 and ff2.
    conv: the same for every convolution that is none of those layers; in a model without blocks, a list has one
        strength per convolution.
    p: the dropout rate. Under "paper", p and λ act only as λp².
    expectation: "paper" takes E[X̃ᵀX̃] as p²G; "exact" is the true one, p²G + p(1−p)·diag(G); "inverted" that of
        dropout with 1/(1−p), p/(1−p)·diag(G).
    heads: "per_head", the logits that the model has; "joint", one d × d product, as the paper writes it.
    reduction: "mean" divides by tokens and samples; "sum" does not; "literal" divides by samples, as the main text of
        the paper prints it; "authors" divides by tokens and leaves out the ½ (joint heads).
    """

    name: ClassVar[str] = "explicit"
    summary: ClassVar[str] = "deterministic penalties on what dropout would take away, with a strength per component"
    paper: ClassVar[Paper] = Paper("Explicit Dropout", "2026")
    named_only: ClassVar[bool] = True

    q: Strength = 0.0
    k: Strength = 0.0
    v: Strength = 0.0
    av: Strength = 0.0
    ff: Strength = 0.0
    ff1: Strength = 0.0
    ff2: Strength = 0.0
    conv: Strength = 0.0
    p: float = 0.2
    expectation: Expectation = "paper"
    heads: Literal["per_head", "joint"] = "per_head"
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", check_rate("p", self.p))
        check_choice("expectation", self.expectation, ("paper", "exact", "inverted"))
        check_choice("heads", self.heads, ("per_head", "joint"))
        check_reduction(self.reduction)
        check_strengths(self, COMPONENTS)

    def strength(self, component: str, place: Place) -> float:
        """λ of one component in one block."""
        return strength_at(self, component, place)

    def at(self, place: Place) -> ExplicitDropout:
        for component in COMPONENTS:
            strength_at(self, component, place)
        return self

    @property
    def joint(self) -> bool:
        """Whether Q and K are taken over all heads at once."""
        return self.heads == "joint" or self.reduction == "authors"

    @property
    def sums(self) -> bool:
        return sums_over_samples(self.reduction)

    @property
    def normalisation(self) -> str:
        return self.reduction

    @property
    def needs_unit_rows(self) -> str | None:
        return "av=…" if self.av else None

    @property
    def needs_own_weights(self) -> str | None:
        return f"av=…, expectation={self.expectation}" if self.av and self.expectation != "paper" else None

    def wants_attention(self, place: Place) -> bool:
        return any(self.strength(component, place) for component in ("q", "k", "v", "av"))

    def wants_mlp(self, place: Place) -> bool:
        return any(self.strength(component, place) for component in ("ff1", "ff2"))

    def wants_convolution(self, place: Place) -> bool:
        return self.strength("conv", place) > 0

    def takes(self, part: Part, place: Place) -> bool:
        components = {"q": ("q", "k"), "k": ("q", "k"), "v": ("v", "av")}.get(part, (part,))
        return any(self.strength(component, place) for component in components)

    def wants_squares(self, place: Place) -> tuple[str, ...]:
        joint, own = coefficients(self.p, self.expectation)
        logits = not (own or self.joint) and (self.strength("q", place) or self.strength("k", place))
        wanted = {"v": joint and self.strength("v", place), "qk": joint and logits}
        return tuple(square for square, asked in wanted.items() if asked)

    def attention_terms(self, record: AttentionRecord, place: Place) -> dict[str, Tensor]:
        r, p, expectation = record, self.p, self.expectation
        all_heads, width = r.out.shape[1], r.w_q.shape[0]
        heads = 1 if self.joint else all_heads

        by_kernel = self._logits_by_kernel(r, place)

        def keys() -> Tensor:
            return _for_each_head(r.projected("k"), 2, width, all_heads)

        def of_queries() -> Tensor:
            if by_kernel is not None:
                return by_kernel
            return logit_square(r.query, r.w_q, r.projected("q"), keys(), heads, p, expectation, r.out.dtype)

        def of_keys() -> Tensor:
            if by_kernel is not None:
                return by_kernel
            w_k = _for_each_head(r.w_k, 0, width, all_heads)
            return logit_square(r.key, w_k, keys(), r.projected("q"), heads, p, expectation, r.out.dtype)

        squares = {
            "q": of_queries,
            "k": of_keys,
            "v": lambda: linear_square(r.value, r.w_v, p, expectation, r.outputs.get("v"), r.squares.get("v")),
            "av": lambda: av_square(r, p, expectation),
        }
        tokens = {"q": r.query.shape[1], "k": r.key.shape[1], "v": r.value.shape[1], "av": r.query.shape[1]}
        return {
            component: strength * reduced(square(), r.query.shape[0], tokens[component], self.reduction)
            for component, square in squares.items()
            if (strength := self.strength(component, place))
        }

    def _logits_by_kernel(self, record: AttentionRecord, place: Place) -> Tensor | None:
        """What the paper's reading takes for q and for k alike, by one kernel; None: no kernel serves, or none asks."""
        joint, own = coefficients(self.p, self.expectation)
        if own or self.joint or not ("q" in record.outputs and "k" in record.outputs):
            return None
        if not (self.strength("q", place) or self.strength("k", place)):
            return None
        if "qk" in record.squares:
            return joint * record.squares["qk"]
        (q, q_bias), (k, k_bias), heads = record.outputs["q"], record.outputs["k"], record.out.shape[1]
        if not fused.penalties.serves(q, k, heads):
            return None
        return joint * fused.penalties.logit_squares(kept(q), kept(k), q_bias, k_bias, heads).sum()

    def mlp_terms(self, which: Literal["ff1", "ff2"], record: LayerRecord, place: Place) -> dict[str, Tensor]:
        strength = self.strength(which, place)
        if not strength:
            return {}
        square = linear_square(record.x, record.weight, self.p, self.expectation, record.seen)
        return {which: strength * reduced(square, record.x.shape[0], record.x.shape[1], self.reduction)}

    def layer_factor(self, which: Literal["ff1", "ff2"], samples: int, tokens: int, place: Place) -> float | None:
        joint, own = coefficients(self.p, self.expectation)
        return None if own else self.strength(which, place) * joint / divisor(samples, tokens, self.reduction)

    def square_factors(self, samples: int, tokens: int, place: Place) -> dict[str, tuple[str, float]] | None:
        joint, own = coefficients(self.p, self.expectation)
        strengths = {component: self.strength(component, place) for component in ("q", "k", "v", "av")}
        if own or strengths.pop("av") or (self.joint and (strengths["q"] or strengths["k"])):
            return None
        by = joint / divisor(samples, tokens, self.reduction)
        return {name: ("v" if name == "v" else "qk", by * strength) for name, strength in strengths.items() if strength}

    def convolution_terms(self, record: ConvolutionRecord, place: Place) -> dict[str, Tensor]:
        strength = self.strength("conv", place)
        if not strength:
            return {}
        square = convolution_square(record, self.p, self.expectation)
        return {"conv": strength * reduced(square, record.x.shape[0], record.positions, self.reduction)}


COMPONENTS = ("q", "k", "v", "av", "ff", "ff1", "ff2", "conv")
