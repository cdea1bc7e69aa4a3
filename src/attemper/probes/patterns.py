"""Patterns of attention that no entropy tells: one key that gets most of all weights, and heads that do the same."""

import torch
from torch import Tensor

from attemper.ops.call import reachable
from attemper.probes.attention import Seen
from attemper.probes.conditioning import effective_rank

SAMPLES = 4
"""So many samples of a batch are looked at."""


def first_samples(call: Seen) -> Seen:
    """The call with no more than `SAMPLES` samples."""

    def cut(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[0] == 1 else t[:SAMPLES]

    return Seen(cut(call.q), cut(call.k), cut(call.mask), call.is_causal, call.scale, cut(call.logits), cut(call.v))


def sinks(call: Seen) -> dict[str, Tensor]:
    """The key of every head that gets the most weight: its share, its value, and the rank of what the head gives.

    A sink whose value is much shorter than others adds next to nothing: the head is switched off wherever it looks
    there. One whose output has a rank near 1 gives the same vector to all tokens.

    >>> q, k = torch.ones(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    >>> k[..., 0, :] = 20.0
    >>> found = sinks(Seen(q, k, v=torch.ones(1, 1, 4, 2)))
    >>> [round(found[name].item(), 3) for name in ("sink_share", "sink_key", "sink_value", "output_rank")]
    [1.0, 0.0, 1.0, 1.0]
    """
    received: Tensor | float = 0.0
    outputs = []
    for _, rows in call.rows():
        weights = rows.softmax(-1).nan_to_num(0.0)
        received = received + weights.sum(2, dtype=torch.float64)
        if call.v is not None:
            outputs.append(weights @ call.v.to(weights))
    assert isinstance(received, Tensor)
    share, key = (received / call.shape[2]).max(-1)
    found = {"sink_share": share.mean(0), "sink_key": key.mode(0).values.double()}
    if call.v is not None:
        lengths = call.v.norm(dim=-1, dtype=torch.float64)
        there = lengths.gather(-1, key[..., None])[..., 0]
        found["sink_value"] = (there / lengths.mean(-1).clamp_min(torch.finfo(torch.float64).tiny)).mean(0)
        found["output_rank"] = effective_rank(torch.cat(outputs, 2)).nan_to_num(0.0).median(0).values
    return found


def twins(call: Seen) -> dict[str, Tensor]:
    """The head of the same attention that every head is most like, and how much.

    With d the squared Hellinger distance of two rows, 1 − Σ √(P Q), and U uniform over the allowed keys, the overlap of
    two heads is 1 − 2 d(P, Q) / (d(P, U) + d(Q, U)): 1 is the same attention, 0 no more alike than two that have only
    U in common. So heads that are nearly uniform are not alike for that alone.

    >>> q = torch.randn(1, 1, 3, 2).repeat(1, 2, 1, 1)
    >>> found = twins(Seen(q, q))
    >>> found["twin"].tolist(), [round(value, 6) for value in found["overlap"].tolist()]
    ([1.0, 0.0], [1.0, 1.0])
    """
    if call.shape[1] < 2:
        return {}
    alike: Tensor | float = 0.0
    even: Tensor | float = 0.0
    rows_seen: Tensor | float = 0.0
    for _, rows in call.rows():
        allowed = reachable(rows) & (rows > -torch.inf)
        roots = rows.softmax(-1).nan_to_num(0.0).sqrt()
        uniform = (allowed / allowed.sum(-1, keepdim=True).clamp_min(1)).to(roots).sqrt()
        alike = alike + torch.einsum("bhqk,bgqk->hg", roots, roots).double()
        even = even + (roots * uniform).sum((0, 2, 3), dtype=torch.float64)
        rows_seen = rows_seen + allowed.any(-1).sum((0, 2)).double()
    assert isinstance(alike, Tensor)
    assert isinstance(rows_seen, Tensor)
    apart, from_uniform = rows_seen[:, None] - alike, rows_seen - even
    scale = (from_uniform[:, None] + from_uniform).clamp_min(1e-12) / 2
    overlap = (1 - apart / scale).clamp(0.0, 1.0).fill_diagonal_(-1.0)
    most, twin = overlap.max(-1)
    return {"overlap": most, "twin": twin.double()}
