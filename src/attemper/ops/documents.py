"""Packed calls: documents of different lengths that lie one after the other, and attend each to itself alone."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.ops.stream import Offsets


class Documents(NamedTuple):
    """Where documents lie among the tokens of a packed call.

    queries, keys: (D + 1,) int32 or int64, on the device of the tokens: where each document begins, and the end.
    """

    queries: Tensor
    keys: Tensor

    @property
    def number(self) -> int:
        """D."""
        return self.queries.shape[0] - 1


def make_documents(
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    shape: tuple[int, int, int],
    at: Offsets,
    device: torch.device,
) -> Documents | None:
    """The documents of a call, checked; None where there are none.

    shape: batch size, number of query tokens, number of key tokens. at: where the call stands in a larger one.

    Values are looked at where that is free: on a CPU, and not while a compiler traces the call.
    """
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ParameterError("cu_seqlens_k needs cu_seqlens, the offsets of the queries")
        return None
    batch, tokens, keys = shape
    if at.query or at.key or at.keys:
        raise ParameterError(f"with cu_seqlens every document is whole, so at can have no query, key or keys; got {at}")
    if batch != 1:
        raise ParameterError(f"with cu_seqlens all documents lie in one row of tokens, so B must be 1, got {batch}")
    _check_offsets("cu_seqlens", cu_seqlens, tokens, device)
    if cu_seqlens_k is None:
        if tokens != keys:
            raise ParameterError(f"{tokens} queries and {keys} keys differ, so cu_seqlens_k must say where keys belong")
        return Documents(cu_seqlens, cu_seqlens)
    _check_offsets("cu_seqlens_k", cu_seqlens_k, keys, device)
    if cu_seqlens_k.shape != cu_seqlens.shape:
        raise ParameterError(
            f"cu_seqlens and cu_seqlens_k must have one entry per document and one more, both the same number; got "
            f"{cu_seqlens.shape[0]} and {cu_seqlens_k.shape[0]}"
        )
    return Documents(cu_seqlens, cu_seqlens_k)


def _check_offsets(name: str, offsets: Tensor, tokens: int, device: torch.device) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        given = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ParameterError(f"{name} must be an int32 or int64 tensor, got {given}")
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ParameterError(f"{name} must have one axis and at least two entries, got shape {tuple(offsets.shape)}")
    if offsets.device != device:
        raise ParameterError(f"{name} must be on the device of q, {device}, got {offsets.device}")
    if torch.compiler.is_compiling() or type(offsets) is not Tensor or device.type != "cpu":
        return
    values = offsets.tolist()
    if values[0] != 0 or values[-1] != tokens:
        raise ParameterError(
            f"{name} must begin with 0 and end with the number of tokens, {tokens}; got {values[0]} … {values[-1]}"
        )
    for number, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            raise ParameterError(f"{name} must not decrease; document {number} goes from {begin} to {end}")


def places(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The document of each token, and its position there: two (tokens,) int32 tensors.

    >>> document, position = places(torch.tensor([0, 2, 5]), 5)
    >>> document.tolist(), position.tolist()
    ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
    """
    at = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    document = torch.searchsorted(offsets[1:].contiguous(), at, right=True).clamp(max=offsets.shape[0] - 2)
    return document.to(torch.int32), (at - offsets[document]).to(torch.int32)
