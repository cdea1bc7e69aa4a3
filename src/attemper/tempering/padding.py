"""Which tokens are padding, and whether some are hidden from others: read off the masks of attention."""

import inspect
from typing import Any

import torch
from torch import Tensor

from attemper.ops.tracing import all_true

OF_OTHERS = ("memory", "encoder", "cross", "head", "layer")
"""Words in the names of masks that are not about the tokens of the block itself."""


HIDDEN, GAP = -1000.0, 500.0
"""Hand-written masks say "hidden" by −1e4, −1e9, −inf or the least number of a type; Swin's −100 means neighbours. What
is hidden lies far below all that is not: logits that are merely low, and biases that grow with distance, leave no gap.
"""


def allowed_keys(mask: Tensor) -> Tensor:
    """Boolean (B or 1, H or 1, Nq or 1, Nk), True = may attend, from a boolean or an additive mask."""
    allowed = mask if mask.dtype == torch.bool else _not_hidden(mask.detach())
    return allowed[(None,) * (4 - allowed.dim())]


def _not_hidden(mask: Tensor) -> Tensor:
    if mask.numel() == 0:
        return mask > HIDDEN
    above = mask > HIDDEN
    lowest, highest = mask.masked_fill(~above, torch.inf).amin(), mask.masked_fill(above, -torch.inf).amax()
    return above | (lowest - highest < GAP)


def real_tokens(allowed: Tensor, batch: int) -> Tensor:
    """Boolean (B, Nk): the tokens that any query may attend to. allowed: of `allowed_keys`."""
    return allowed.any(2).any(1).expand(batch, allowed.shape[-1])


def hides_some_from_others(allowed: Tensor) -> bool:
    """Whether a token that is no padding is hidden from some query that is none either. allowed: of `allowed_keys`."""
    if allowed.shape[2] == 1:
        return False
    return not all_true(allowed | ~(allowed.any(2, keepdim=True) & allowed.any(3, keepdim=True)))


def mask_positions(forward: Any) -> dict[int, str]:
    """Of a block's `forward`, the positional arguments that are masks over its own tokens: index → name."""
    names = list(inspect.signature(forward).parameters)[1:]
    return {index: name for index, name in enumerate(names) if is_mask_of_own_tokens(name)}


def is_mask_of_own_tokens(name: str) -> bool:
    """Whether an argument of this name is a mask, and not one over the tokens of another network."""
    return "mask" in name and not any(word in name for word in OF_OTHERS)


def padding_in_arguments(positions: dict[int, str], x: Tensor, args: Any, kwargs: Any, layout: str) -> Tensor | None:
    """Boolean (B, N), True for real tokens, from the masks that a block is called with; None: none was found.

    positions: of `mask_positions`. x: the tokens.

    Masks say what to read by name and shape: torch's `…padding_mask` is (B, N) and True, or −inf, at padding; all
    others are True, 1 or 0 where attention is allowed. What is read here is checked against the mask of the block's
    attention as soon as that is called.
    """
    if x.dim() != 3 or layout == "channels_first":  # a feature map, or a single sequence
        return None
    batch, tokens = (x.shape[1], x.shape[0]) if layout == "sequence_first" else (x.shape[0], x.shape[1])
    masks = [(positions[index], value) for index, value in enumerate(args) if index in positions]
    masks += [(name, value) for name, value in kwargs.items() if is_mask_of_own_tokens(name)]
    found = None
    for name, mask in masks:
        real = _real(name, mask, batch, tokens) if isinstance(mask, Tensor) else None
        if real is not None:
            found = real if found is None else found & real
    return found


def _real(name: str, mask: Tensor, batch: int, tokens: int) -> Tensor | None:
    if mask.dim() == 0 or mask.shape[-1] != tokens:
        return None
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        mask = mask != 0
    if mask.dim() == 2:
        if "padding" in name and mask.dtype == torch.bool:
            mask = ~mask
        elif "padding" not in name and mask.shape[0] != batch:
            return None  # (queries, keys): no padding
        elif "padding" not in name and batch == tokens and not name.startswith("attention_mask"):
            return None
        mask = mask[:, None, None]
    return real_tokens(allowed_keys(mask), batch) if mask.dim() in (3, 4) else None
