"""What a method may do to one attention call, and the rule that no row loses all of its keys."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from attemper.ops.stream import Stream

__all__ = ["Perturbation", "drop_logits", "rescue"]

Stage = Literal["keys", "logits", "weights", "heads"]


class Perturbation:
    """A change to attention. Subclasses name their stages and override them; the others stay the identity.

    logits, weights: (B, H, Nq, Nk); logits are −inf where a key is masked out or dropped already.
    allowed: boolean, broadcastable to the logits, or None where every key is allowed. A key that a mask pushes out of
        reach is not allowed; neither is one that an earlier method dropped.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("logits",)
    """Where it acts. Fused kernels can serve what stays outside of softmax: "keys" and "heads"."""
    order: ClassVar[int] = 0
    """Methods of one call act in this order, and in the order given where it is equal."""

    @property
    def independent_drop(self) -> float | None:
        """The rate, if all that this does is to drop every (sample, head, query, key) by `Stream.keep` before softmax.

        It is what fused implementations look for; None is anything else.
        """
        return None

    def perturb_keys(self, k: Tensor, real: Tensor | None, causal: bool, stream: Stream) -> Tensor:
        """Change the keys, (B, H, Nk, e), before they meet the queries.

        real: boolean (B or 1, 1, 1, Nk), the keys that are no padding; None: all.
        """
        return k

    def perturb_content(self, content: Tensor, allowed: Tensor, causal: bool, stream: Stream) -> Tensor:
        """The same as `perturb_keys`, on scale · QKᵀ, where each query may see other keys."""
        return content

    def perturb_logits(self, logits: Tensor, allowed: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """Change what softmax will see. Returns the new logits and what is allowed from here on."""
        return logits, allowed

    def perturb_weights(self, weights: Tensor, allowed: Tensor | None, stream: Stream) -> Tensor:
        """Change what softmax gave; rows sum to one."""
        return weights

    def perturb_heads(self, out: Tensor, stream: Stream) -> Tensor:
        """Scale whole heads of the output (B, H, Nq, e), or of the weights, which comes to the same."""
        return out


def rescue(keep: Tensor, allowed: Tensor | None) -> Tensor:
    """`keep`, but True throughout in every row that would lose all of its allowed keys."""
    kept = keep if allowed is None else keep & allowed
    return keep | ~kept.any(-1, keepdim=True)


def drop_logits(logits: Tensor, keep: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Drop keys before softmax; a row that would lose all of its allowed keys is left as it is.

    keep: boolean, broadcastable to the logits, True = kept.
    Returns the logits with −inf at dropped keys, and the keys that are still allowed.
    """
    # A keep mask shared by all queries still loses rows one by one where `allowed` differs between queries.
    keep = rescue(keep, allowed)
    return logits.masked_fill(~keep, -torch.inf), keep if allowed is None else keep & allowed
