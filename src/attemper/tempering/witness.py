"""What attention tells of the tokens of its block: which are padding, and whether some are hidden from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from attemper.errors import ConflictError, HiddenTokensError
from attemper.ops.tracing import all_true, has_numbers
from attemper.tempering.padding import allowed_keys, hides_some_from_others, real_tokens

if TYPE_CHECKING:
    from attemper.tempering.attention import AttentionAction


def note_padding(action: AttentionAction, mask: Tensor | None, is_causal: bool, batch: int, keys: int) -> None:
    """Which tokens are real, for methods that ask: those that any query may attend to.

    Methods that mix tokens are refused where attention is causal, or hides some tokens from others.
    """
    if not action.watchers:
        return
    if is_causal and action.mixers:
        refuse_mixing(action, "is causal, and what mixes all tokens would show every token its future")
    padding = action.control.ledger.padding
    if mask is None:
        padding.pop(action.place.block, None) if action.place.block in padding else None
        return
    if torch.compiler.is_compiling() and action.mixers and _is_unread(action, mask):
        refuse_mixing(
            action,
            "may hide tokens from each other, which cannot be read off its mask while it is compiled (run the model "
            "once before it is compiled, and it is)",
        )
    allowed = allowed_keys(mask)
    real = real_tokens(allowed, batch)
    size = (allowed.shape[2], allowed.shape[3])
    if has_numbers(mask) and not (mask.is_cuda and size in action.looked):  # a GPU would have to be waited for
        if size[0] > 1:  # a mask that is the same for all queries tells less
            action.looked.add(size)
        if action.mixers and hides_some_from_others(allowed):
            refuse_mixing(action, "hides some tokens from others, and what mixes all tokens would show them")
        check_entry(action, mask, real, known=True)
    check_entry(action, mask, real, known=False)
    padding[action.place.block] = real


def _is_unread(action: AttentionAction, mask: Tensor) -> bool:
    return not (action.looked or action.read) and mask.dim() > 1 and mask.shape[-2] > 1


def check_entry(action: AttentionAction, mask: Tensor, real: Tensor, known: bool) -> None:
    """Raise where a method acted before this attention without knowing of the padding that its mask tells of."""
    entry = action.control.ledger.entry_padding
    if action.follows_entry is None or (entry is not None) != known:
        return
    if not has_numbers(mask):  # values cannot be read; one mask for all queries is padding
        unknown = entry is None and mask.dim() == 4 and mask.shape[0] > 1 and mask.shape[2] == 1
    else:
        hidden = not all_true(real) or (entry is not None and not all_true(entry))
        unknown = hidden and (entry is None or entry.shape != real.shape or not all_true(entry == real))
    if unknown:
        raise ConflictError(
            f"{action.place.where} is called with a mask that hides padding, and {action.follows_entry} acts before "
            "it, where that padding is not known from the arguments of the block: padding would reach the other "
            "tokens. Use batches without padding, or hand the block a mask in an argument whose name contains 'mask'."
        )


def refuse_mixing(action: AttentionAction, reason: str) -> NoReturn:
    """Raise for methods that mix tokens which attention keeps apart."""
    raise HiddenTokensError(
        f"{action.place.where} {reason}: {' and '.join(action.mixers)} cannot act in this block. Leave it out with "
        "targets=."
    )
