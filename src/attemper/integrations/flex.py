"""Methods for FlexAttention: a score_mod that drops exactly the keys that `attemper.attention` drops.

A score_mod sees one logit, and whether a key is dropped depends on four numbers alone, so that forward and backward,
eager and compiled code agree by themselves. What rows need to know is found beforehand and captured: one word for each
row and one for each key, as in `ops/stream.py`. A row that would lose all of its keys has the word 0, and keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_mask

from attemper.errors import ParameterError, UnsupportedError
from attemper.ops.call import check_part, checked_methods
from attemper.ops.documents import Documents, make_documents, places
from attemper.ops.perturbation import Perturbation, draw
from attemper.ops.seeds import seed_tensor
from attemper.ops.stream import (
    NOWHERE,
    Offsets,
    Source,
    Stream,
    checked,
    live_threshold,
    site_word,
    words_of_columns,
    words_of_rows,
)

__all__ = ["document_mask", "score_mod"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, sample, head, query, key) → score."""
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sample, head, query, key) → whether the query may attend to the key."""

CERTAIN = 64
"""Rows of so many keys that all are dropped with a probability below 2 to the minus 64 are not looked at."""
CHUNK = 32
"""Keys that all rows look at together."""


def score_mod(
    methods: Sequence[Perturbation] | Perturbation,
    seed: int | Tensor,
    shape: Sequence[int],
    *,
    is_causal: bool = False,
    mask_mod: MaskMod | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    site: str = "",
    call: int = 0,
    at: Offsets = NOWHERE,
    device: torch.device | str | None = None,
) -> ScoreMod:
    """What `torch.nn.attention.flex_attention.flex_attention` takes as score_mod to drop keys by these methods.

    methods: those that drop keys before softmax and look at no logits: DropKey in all of its forms, and
        DropAttention(rescale="normalize"). Others are refused by name.
    seed: an int, or a 0-dim int64 tensor (what is captured is then made on its device). A new seed compiles nothing.
    shape: (B, H, Nq, Nk) of the call, as `create_block_mask` takes it.
    is_causal, cu_seqlens, cu_seqlens_k: as in `attemper.attention`. With documents B is 1.
    mask_mod: any other mask of the call. All masks must be given to flex_attention, too, as its block_mask; here they
        say which keys a row has, since a row that would lose all of them keeps them. Without a mask_mod that takes a
        few operations per row. With one every pair of query and key is looked at.
    site, call: as in `attemper.keep_mask`; at: as in `attemper.attention`.

    >>> from torch.nn.attention.flex_attention import flex_attention
    >>> from attemper.methods import DropKey
    >>> q = k = v = torch.randn(2, 3, 16, 8)
    >>> flex_attention(q, k, v, score_mod=score_mod(DropKey(0.1), 7, (2, 3, 16, 16))).shape
    torch.Size([2, 3, 16, 8])
    """
    sizes = _sizes(shape)
    seed = seed_tensor(seed, device)
    documents = make_documents(cu_seqlens, cu_seqlens_k, (sizes.batch, *sizes[2:]), at, seed.device)
    rows = _numbers(sizes, at, documents, seed.device)
    methods = checked_methods(methods)
    check_part(at, sizes.heads, sizes.keys, methods)
    drawn = draw(methods, Source(seed, site_word(site), call, checked(at)), seed)
    drops: list[_Drop] = []
    for method, stream in drawn:
        drops.append(_drop_of(method, stream, sizes, rows, documents))
        if at.splits_rows(sizes.keys):
            continue  # such rows may lose all keys of this part
        rates = [drop.rate for drop in drops if isinstance(drop, _Independent)]
        if mask_mod is None and len(rates) == len(drops):
            _spare_short_rows(drops, rates, sizes, rows, is_causal, at if documents is None else None)
        else:
            _spare_rows(drops, sizes, _whole_mask(sizes, rows, is_causal, documents, mask_mod))

    def drop_keys(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for drop in drops:
            score = torch.where(drop.keeps(b, h, q, k), score, -math.inf)
        return score

    return drop_keys


def document_mask(
    cu_seqlens: Tensor,
    tokens: int,
    *,
    cu_seqlens_k: Tensor | None = None,
    tokens_k: int | None = None,
    is_causal: bool = False,
) -> MaskMod:
    """A mask_mod by which documents attend to themselves alone, for `create_block_mask`.

    cu_seqlens, cu_seqlens_k: as in `attemper.attention`; tokens, tokens_k: Nq, and Nk where it is another number.
    is_causal: each query sees the keys of its document up to its own position.

    >>> visible = document_mask(torch.tensor([0, 2, 3]), 3, is_causal=True)
    >>> [[bool(visible(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(3)] for q in range(3)]
    [[True, False, False], [True, True, False], [False, False, True]]
    """
    keys = tokens if tokens_k is None else tokens_k
    documents = make_documents(cu_seqlens, cu_seqlens_k, (1, tokens, keys), NOWHERE, cu_seqlens.device)
    assert documents is not None
    document_q, position_q = places(documents.queries, tokens)
    document_k, position_k = places(documents.keys, keys)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = document_q[q] == document_k[k]
        return same & (position_q[q] >= position_k[k]) if is_causal else same

    return visible


# ------------------------------------------------------------------------------------------------------ rows and keys
class _Sizes(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int


def _sizes(shape: Sequence[int]) -> _Sizes:
    if len(shape) != 4 or min(shape) < 1:
        raise ParameterError(f"shape must be four sizes (B, H, Nq, Nk) of at least 1, got {tuple(shape)}")
    return _Sizes(*shape)


class _Numbers(NamedTuple):
    """The numbers of rows and keys in the stream, and which keys a row has: int32 tensors.

    sample, head, query: broadcastable to (B, H, Nq); key: (Nk,).
    first, seen: (Nq,), the first key of the query's document, among all, and how many that has.
    """

    sample: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    first: Tensor
    seen: Tensor


def _numbers(sizes: _Sizes, at: Offsets, documents: Documents | None, device: torch.device) -> _Numbers:
    def counted(many: int) -> Tensor:
        return torch.arange(many, dtype=torch.int32, device=device)

    head = counted(sizes.heads)[:, None] + at.head
    if documents is None:
        sample, position, key = counted(sizes.batch)[:, None, None], counted(sizes.queries), counted(sizes.keys)
        first, count = torch.zeros_like(position), torch.full_like(position, sizes.keys)
    else:
        sample, position = places(documents.queries, sizes.queries)
        key = places(documents.keys, sizes.keys)[1]
        first = documents.keys[sample].to(torch.int32)
        count = documents.keys[sample + 1].to(torch.int32) - first
    return _Numbers(sample + at.sample, head, position + at.query, key + at.key, first, count)


# ------------------------------------------------------------------------------------------------------------- drops
class _Drop(Protocol):
    """Which keys one method drops."""

    @property
    def device(self) -> torch.device: ...

    def keeps(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Whether one key is kept, from four numbers."""

    def of_rows(self, many: int, keys: Tensor) -> Tensor:
        """Boolean, broadcastable to (B, H, many, n): the keys that are kept of some, in the first `many` rows.

        keys: (n,), or (many, n) for other keys in each row.
        """

    def spare(self, lost: Tensor, many: int) -> None:
        """Leave rows as they are. lost: boolean (B, H, many), the rows to leave, among the first `many`."""


def _drop_of(method: Perturbation, stream: Stream, sizes: _Sizes, rows: _Numbers, documents: Documents | None) -> _Drop:
    rate = method.independent_drop
    if rate is not None:
        words = words_of_rows(stream.rows, rows.sample, rows.head, rows.query)
        words = words.expand(sizes[:3]).contiguous()
        columns = words_of_columns(stream.columns, rows.key)
        return _Independent(rate, live_threshold(rate, words.device), words, columns)
    kept = method.kept_keys(sizes, stream) if documents is None else _kept_of(documents, method, stream, sizes.heads)
    if kept is None:
        raise UnsupportedError(f"a score_mod cannot do what {method} does: it {_reason(method, sizes.keys)}")
    return _Tabulated(kept, torch.zeros(sizes[:3], dtype=torch.bool, device=kept.device))


def _reason(method: Perturbation, keys: int) -> str:
    if method.largest_drop(keys) is not None:
        return "needs the largest logits of a row, and a score_mod sees one at a time. attemper.attention serves it"
    if "heads" in method.stages:
        return "scales heads after attention. attemper.attention serves it, or scale the output of flex_attention"
    if "keys" in method.stages:
        return "changes the keys themselves. attemper.attention serves it, or change the keys before flex_attention"
    if "weights" in method.stages:
        return (
            "changes weights after softmax. attemper.attention serves it; dropattention with rescale=normalize and "
            "without detach is the same as dropping before softmax"
        )
    return "does more than to drop keys at a given rate. attemper.attention serves it"


def _kept_of(documents: Documents, method: Perturbation, stream: Stream, heads: int) -> Tensor | None:
    """(1, H or 1, 1, Nk): the keys that a method keeps of each document, where all of its queries share them."""
    parts = []
    for number, (queries, keys) in enumerate(zip(*(each.diff().tolist() for each in documents), strict=True)):
        if not keys:
            continue
        here = stream.placed(stream.at._replace(sample=stream.at.sample + number))
        part = method.kept_keys((1, heads, queries, keys), here)
        if part is None:
            return None
        if part.shape[2] != 1:
            raise UnsupportedError(
                f"with cu_seqlens, a score_mod has no room for what {method} draws for every query; "
                "share=queries or share=heads draws once for all of them, and attemper.attention serves both"
            )
        parts.append(part)
    return torch.cat(parts, -1)


@dataclass
class _Independent:
    """Every (sample, head, query, key) by itself.

    rows: (B, H, Nq), a word for each, 0 where the row keeps everything; columns: (Nk,).
    """

    rate: float
    limit: int | Tensor
    rows: Tensor
    columns: Tensor

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def keeps(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        word = self.rows[b, h, q]
        return (word * self.columns[k] >= self.limit) | (word == 0)

    def of_rows(self, many: int, keys: Tensor) -> Tensor:
        words = self.rows[:, :, :many, None]
        return (words * self.columns[keys] >= self.limit) | (words == 0)

    def spare(self, lost: Tensor, many: int) -> None:
        self.rows = torch.cat([self.rows[:, :, :many].masked_fill(lost, 0), self.rows[:, :, many:]], 2)


@dataclass
class _Tabulated:
    """Keys that are dropped together, from a table.

    table: boolean (B or 1, H or 1, Nq or 1, Nk); spared: (B, H, Nq), rows that keep everything.
    """

    table: Tensor
    spared: Tensor

    @property
    def device(self) -> torch.device:
        return self.table.device

    def keeps(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = [number for number, size in zip((b, h, q), self.table.shape[:3], strict=True) if size > 1]
        table = self.table.squeeze((0, 1, 2))
        return table[(*at, k)] | self.spared[b, h, q]

    def of_rows(self, many: int, keys: Tensor) -> Tensor:
        return self.table[:, :, :many, keys] | self.spared[:, :, :many, None]

    def spare(self, lost: Tensor, many: int) -> None:
        self.spared = lost | self.spared


# ---------------------------------------------------------------------------------------- rows that would lose all keys
Looks = Iterable[tuple[Tensor, Tensor]]
"""Keys to look at, (n,) or (rows, n), and which of them the rows have, broadcastable to (B, H, rows, n)."""


def _lost(drops: Sequence[_Drop], many: int, looks: Looks) -> Tensor:
    """Boolean (B, H, many): rows, among the first `many`, of which all keys that were looked at are dropped."""
    found: Tensor | None = None
    for keys, has in looks:
        kept = has
        for drop in drops:
            kept = kept & drop.of_rows(many, keys)
        found = kept.any(-1) if found is None else found | kept.any(-1)
    assert found is not None
    return ~found


def _spare_short_rows(
    drops: Sequence[_Drop], rates: Sequence[float], sizes: _Sizes, rows: _Numbers, is_causal: bool, at: Offsets | None
) -> None:
    """Leave those rows as they are that have few keys, and would lose all of them by the last of these drops.

    rates: of the drops. at: None where there are documents. Otherwise rows have few keys only if all have, or, where
        query i sees no later keys, among the first rows.
    """
    lose = 1 - math.prod([1 - rate for rate in rates])
    few = min(sizes.keys, math.ceil(CERTAIN / -math.log2(lose))) if lose > 0 else 0
    many = sizes.queries
    if at is not None and sizes.keys > few:
        many = min(many, max(0, few - at.query + at.key)) if is_causal else 0
    if many and few:
        first, count = rows.first[:many, None], rows.seen[:many, None]
        if is_causal:
            count = count.minimum(rows.query[:many, None] - rows.key[0] + 1)
        chunks = torch.arange(few, dtype=torch.int32, device=first.device).split(few if _is_traced() else CHUNK)
        looks = [((first + chunk).clamp(max=sizes.keys - 1), chunk < count) for chunk in chunks]
        drops[-1].spare(_lost(drops, many, looks) & (count <= few).squeeze(-1), many)


def _spare_rows(drops: Sequence[_Drop], sizes: _Sizes, mask: MaskMod | None) -> None:
    """Leave those rows as they are that would lose all of their keys by the last of these drops."""
    batch, heads, queries, keys = sizes
    device = drops[-1].device

    def looks() -> Looks:
        for chunk in torch.arange(keys, device=device).split(keys if _is_traced() else CHUNK):
            if mask is None:
                yield chunk, torch.ones((), dtype=torch.bool, device=device)
            else:
                yield chunk, _masked(mask, (batch, heads, queries), chunk)

    drops[-1].spare(_lost(drops, queries, looks()).expand(batch, heads, queries), queries)


def _masked(mask: MaskMod, rows: tuple[int, int, int], keys: Tensor) -> Tensor:
    """Boolean (B, H, Nq, n): which of n keys each row may attend to."""
    first = keys[0]

    def shifted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask(b, h, q, k + first)

    return create_mask(shifted, *rows, keys.shape[0], device=keys.device)


def _whole_mask(
    sizes: _Sizes, rows: _Numbers, is_causal: bool, documents: Documents | None, mask_mod: MaskMod | None
) -> MaskMod | None:
    """All that hides keys from queries in a call, as one mask_mod; None: nothing does."""
    masks = [] if mask_mod is None else [mask_mod]
    if documents is not None:
        begins, begins_k = documents
        whole = document_mask(begins, sizes.queries, cu_seqlens_k=begins_k, tokens_k=sizes.keys, is_causal=is_causal)
        masks.append(whole)
    elif is_causal:
        masks.append(lambda b, h, q, k: rows.query[q] >= rows.key[k])
    return and_masks(*masks) if masks else None


def _is_traced() -> bool:
    """Whether a compiler makes one loop of everything, and stores nothing in between."""
    return torch.compiler.is_compiling()
