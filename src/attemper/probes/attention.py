"""What one attention call says about its heads: entropy, logits, distances. Memory grows linearly with the tokens.

The entropy of a row of attention is H_i = −Σ_j P_ij log P_ij with log P_ij = s_ij − LSE_i, so that

    H_i = LSE_i − Σ_j P_ij s_ij = LSE_i − scale · q_i · (PK)_i,

where PK is attention with the keys as values, and LSE_i comes out of the same fused call. An additive bias enters s_ij,
and PK does not know it; there, rows of logits are computed a few at a time. The same holds for what is no linear
function of the weights: the largest logit, and the mean distance.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.ops.call import reachable
from attemper.sites import Geometry

CHUNK = 2**22
"""At most so many logits are held at a time, if a single row has no more."""


@dataclass(frozen=True)
class Seen:
    """One attention call as it was caught, in float32 or float64.

    Either Q and K are known, and the logits follow from them; or the logits are there, with Q and K where their product
    was seen.
    """

    q: Tensor | None
    """(B, H, Nq, e)"""
    k: Tensor | None
    """(B, H, Nk, e)"""
    mask: Tensor | None = None
    """Boolean (True = may attend) or additive, four axes that broadcast to (B, H, Nq, Nk)."""
    is_causal: bool = False
    scale: float = 1.0
    logits: Tensor | None = None
    """(B, H, Nq, Nk), with masks and bias in them."""
    v: Tensor | None = None
    """(B, H, Nk, e'); None where it was not seen."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Nq, Nk)"""
        if self.logits is not None:
            batch, heads, queries, keys = self.logits.shape
            return batch, heads, queries, keys
        assert self.q is not None
        assert self.k is not None
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    @property
    def device(self) -> torch.device:
        known = self.q if self.logits is None else self.logits
        assert known is not None
        return known.device

    @property
    def biased(self) -> bool:
        """Whether something was added to the logits, or may have been."""
        return self.logits is not None or (self.mask is not None and self.mask.dtype != torch.bool)

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """The logits, masks and bias included, some queries at a time: (first query, (B, H, n, Nk))."""
        batch, heads, queries, keys = self.shape
        step = max(1, CHUNK // (batch * heads * keys))
        for start in range(0, queries, step):
            yield start, self.some_rows(start, min(start + step, queries))

    def some_rows(self, start: int, stop: int) -> Tensor:
        """The logits of queries start … stop − 1."""
        if self.logits is not None:
            return self.logits[:, :, start:stop].to(torch.promote_types(self.logits.dtype, torch.float32))
        assert self.q is not None
        assert self.k is not None
        logits = (self.q[:, :, start:stop] * self.scale) @ self.k.transpose(-2, -1)
        if self.is_causal:
            places = torch.arange(self.k.shape[2], device=logits.device)
            later = places > torch.arange(start, stop, device=logits.device)[:, None]
            logits = logits.masked_fill(later, -math.inf)
        if self.mask is None:
            return logits
        mask = self.mask[:, :, start:stop] if self.mask.shape[2] > 1 else self.mask
        return logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.to(logits)


def see(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    v: Tensor | None = None,
) -> Seen:
    """A call from what `scaled_dot_product_attention` was given: any leading axes, grouped heads, any dtype.

    q: (…, Nq, e). k: (…, Nk, e). v: (…, Nk, e'). mask: boolean (True = may attend) or additive.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is not None:
        if q.dim() != 4 and mask.dim() > 2:
            mask = mask.expand(*q.shape[:-1], k.shape[-2])
        mask = mask[(None,) * (4 - mask.dim())] if q.dim() == 4 or mask.dim() == 2 else _four_axes(mask)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = _four_axes(q).to(dtype), _four_axes(k).to(dtype)
    v = None if v is None else _four_axes(v).to(dtype)
    groups = q.shape[1] // k.shape[1]
    if groups != 1:
        k = k.repeat_interleave(groups, 1)
        v = None if v is None else v.repeat_interleave(groups, 1)
    return Seen(q, k, mask, is_causal, scale, v=v)


def _four_axes(t: Tensor) -> Tensor:
    while t.dim() < 4:
        t = t[None] if t.dim() < 3 else t[:, None]
    return t.flatten(0, -4)


# ------------------------------------------------------------------------------------------------------------- entropy
def entropy(call: Seen) -> Tensor:
    """Entropy of every row of attention in nats, (B, H, Nq); 0 for a row that may not attend to anything.

    >>> q, k = torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 8, 4)
    >>> entropy(see(q, k)).div(math.log(8)).tolist()
    [[[1.0, 1.0]]]
    """
    fused = None if call.biased else _fused(call)
    if fused is not None:
        log_sum, mean_key = fused
        assert call.q is not None
        return (log_sum - call.scale * (call.q * mean_key).sum(-1)).clamp_min(0.0)
    found = [torch.special.entr(rows.softmax(-1)).sum(-1) for _, rows in call.rows()]
    return torch.cat(found, -1).nan_to_num(0.0)


def _fused(call: Seen) -> tuple[Tensor, Tensor] | None:
    """LSE (B, H, Nq) and PK (B, H, Nq, e) from one fused call; None where no kernel gives both."""
    q, k = call.q, call.k
    assert q is not None
    assert k is not None
    mask = call.mask
    if q.device.type == "cpu" and not (mask is not None and call.is_causal):
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)
        mean_key, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, k, 0.0, call.is_causal, attn_mask=mask, scale=call.scale
        )
        return log_sum, mean_key
    if q.device.type == "cuda" and mask is None and q.dtype == torch.float32:
        missing = -q.shape[-1] % 8  # zeros at the end of q and k change no product, and the kernel wants the alignment
        q, k = (F.pad(t, (0, missing)).contiguous() for t in (q, k))
        mean_key, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, k, None, True, 0.0, call.is_causal, scale=call.scale
        )
        return log_sum[..., : q.shape[2]], mean_key[..., : mean_key.shape[-1] - missing]
    return None


def allowed_keys(call: Seen) -> Tensor:
    """How many keys every query may attend to, broadcastable to (B, H, Nq).

    An additive mask forbids what it puts out of reach. Where only logits are known and a single key is in reach, that
    may as well be the doing of attention itself; all keys count as allowed then.
    """
    _, _, queries, keys = call.shape
    if call.logits is not None:
        counts = torch.cat([reachable(rows).sum(-1) for _, rows in call.rows()], -1)
        return torch.where(counts < 2, keys, counts)
    if call.is_causal and call.mask is not None:
        return torch.cat([(rows > -math.inf).sum(-1) for _, rows in call.rows()], -1)
    if call.is_causal:
        return torch.arange(1, queries + 1, device=call.device).clamp_max(keys)[None, None]
    if call.mask is None:
        return torch.full((1, 1, 1), keys, device=call.device)
    allowed = call.mask if call.mask.dtype == torch.bool else reachable(call.mask)
    return allowed.expand(*allowed.shape[:-1], keys).sum(-1)


def weights_of_rows(call: Seen, start: int, stop: int) -> Tensor:
    """Attention weights of queries start … stop − 1, (B, H, stop − start, Nk)."""
    return call.some_rows(start, stop).softmax(-1).nan_to_num(0.0)


# ----------------------------------------------------------------------------------------------------- all of one call
@dataclass(frozen=True)
class HeadStatistics:
    """Means over samples and queries, one number per head. None: not asked for, or not defined here."""

    entropy: Tensor | None = None
    """Nats."""
    normalised: Tensor | None = None
    """Entropy over the log of the allowed keys: 0 is one key, 1 is all alike."""
    to_uniform: Tensor | None = None
    """KL divergence of the row from the uniform distribution over the allowed keys, log n − H, in nats."""
    distance: Tensor | None = None
    """Mean distance between a patch and the patches that it attends to, in patches."""
    logit_max: Tensor | None = None
    """Largest absolute value among the logits of allowed keys."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    """Mean length of queries and keys as they are multiplied: some models scale Q before that."""


@torch.no_grad()
def head_statistics(call: Seen, probes: frozenset[str], geometry: Geometry | None) -> HeadStatistics:
    """What the probes among "entropy", "distance" and "logits" say about one call."""
    found: dict[str, Tensor] = {}
    with torch.autocast(call.device.type, enabled=False):
        if "entropy" in probes:
            found |= _entropies(call)
        if "distance" in probes and geometry is not None and _fits(call, geometry):
            found["distance"] = _distance(call, geometry)
        if "logits" in probes:
            found["logit_max"] = _largest_logit(call)
            if call.q is not None and call.k is not None:
                found |= {"q_norm": _length(call.q), "k_norm": _length(call.k)}
    return HeadStatistics(**found)


def _entropies(call: Seen) -> dict[str, Tensor]:
    h = entropy(call)
    n = allowed_keys(call).expand(h.shape).to(h)
    several = n > 1
    log_n = n.clamp_min(2).log()
    return {
        "entropy": _mean(h, n > 0),
        "normalised": _mean(h / log_n, several),
        "to_uniform": _mean((log_n - h).clamp_min(0.0), several),
    }


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """(H) means over samples and queries that count."""
    total = torch.where(counted, values, 0.0).sum((0, 2), dtype=torch.float64)
    return total / counted.sum((0, 2)).clamp_min(1)


def _length(x: Tensor) -> Tensor:
    lengths: Tensor = x.norm(dim=-1)
    return lengths.mean((0, 2), dtype=torch.float64)


def _largest_logit(call: Seen) -> Tensor:
    largest = []
    for _, rows in call.rows():
        allowed = reachable(rows) if call.biased else rows > -math.inf
        largest.append(torch.where(allowed, rows.abs(), 0.0).amax((0, 2, 3)))
    return torch.stack(largest).amax(0).double()


def _fits(call: Seen, geometry: Geometry) -> bool:
    tokens = geometry.prefix + math.prod(geometry.grid)
    return call.shape[2:] == (tokens, tokens)


def _distance(call: Seen, geometry: Geometry) -> Tensor:
    """Patches alone: prefix tokens have no place, neither as queries nor as keys."""
    (height, width), prefix = geometry.grid, geometry.prefix
    total: Tensor | float = 0.0
    for start, rows in call.rows():
        places = _places(height, width, rows)
        queries = places[max(start - prefix, 0) : max(start + rows.shape[2] - prefix, 0)]
        if len(queries) == 0:
            continue
        weights = rows[:, :, -len(queries) :, prefix:].softmax(-1).nan_to_num(0.0)
        apart = torch.cdist(queries[None], places[None])[0]
        total = total + (weights * apart).sum((0, 2, 3), dtype=torch.float64)
    assert isinstance(total, Tensor)
    return total / (call.shape[0] * height * width)


def _places(height: int, width: int, like: Tensor) -> Tensor:
    """(patches, 2) rows and columns on the grid."""
    rows, columns = torch.arange(height), torch.arange(width)
    return torch.cartesian_prod(rows, columns).view(-1, 2).to(like)
