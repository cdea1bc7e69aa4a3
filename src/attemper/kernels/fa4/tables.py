"""The random words of one call, in memory, from a seed on the device: what `kernels` read.

One buffer of int32 words: the limit below which keys are dropped, a word that only aligns the next ones, the column
word of every key, and the row words (B, H, Nq). A row that would lose all of the keys it sees has the word 0. Every
product with it is 0, which no rate up to one half drops, so the row keeps all of its keys. For hard masking the logits
(B, H, Nq) come after them above which a row's largest lie, before scaling, as float32 bits.

Kernels read a whole tile past the end, so there is room after the keys and after the rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attemper.kernels.common.launch import DEVICES, launch, on_device
from attemper.ops.stream import Stream, signed

HEADER = 2
ROOM = 512  # words, as many as the largest tile has queries
BLOCK = 256
LARGEST_RATE = 0.5
"""Beyond it a row word of 0 would be dropped."""

torch.library.define(
    "attemper::fa4_words",
    "(Tensor seed, Tensor? limit, SymInt threshold, SymInt batch, SymInt heads, SymInt queries, SymInt keys, "
    "bool causal, SymInt site, SymInt path, SymInt sample, SymInt head, SymInt query, SymInt key) "
    "-> Tensor",
)


class Layout(NamedTuple):
    """Where the row words begin, what hard masking needs of rows, and where the buffer ends."""

    rows: int
    lows: int
    size: int


def layout_of(batch: int, heads: int, queries: int, keys: int, hard: bool = False) -> Layout:
    """The layout of a call's words.

    >>> layout_of(2, 3, 5, 7)
    Layout(rows=521, lows=1063, size=1063)
    >>> layout_of(2, 3, 5, 7, hard=True)
    Layout(rows=521, lows=1063, size=1605)
    """
    rows = HEADER + keys + ROOM
    more = batch * heads * queries + ROOM
    return Layout(rows, rows + more, rows + more + hard * more)


def call_words(stream: Stream, limit: int | Tensor, shape: tuple[int, int, int, int], causal: bool) -> Tensor:
    """The words of a call whose logits have `shape`, (B, H, Nq, Nk): int32, laid out by `layout_of`.

    limit: `stream.threshold(p)`, or a 0-dim int32 tensor of it.
    causal: whether query i sees keys 0 … i only, and so may lose all of them.
    """
    given = isinstance(limit, Tensor)
    words: Tensor = torch.ops.attemper.fa4_words(
        stream.seed, limit if given else None, 0 if given else limit, *shape, causal,
        stream.site, stream.path, *stream.at[:4],
    )  # fmt: skip
    return words


def _words(
    seed: Tensor, limit: Tensor | None, threshold: int, batch: int, heads: int, queries: int, keys: int, causal: bool,
    *numbers: int,
) -> Tensor:  # fmt: skip
    from attemper.kernels.fa4.rows import words_kernel

    words = _words_fake(seed, limit, threshold, batch, heads, queries, keys)
    layout = layout_of(batch, heads, queries, keys)
    programs = -(-layout.rows // BLOCK) + -(-(layout.size - layout.rows) // BLOCK)
    with on_device(seed):
        launch(words_kernel, (programs,),
            seed, words if limit is None else limit, words, threshold, batch, heads, queries, keys, layout.rows,
            *map(signed, numbers), HAS_LIMIT=limit is not None, CAUSAL=causal, HEADER=HEADER, ROOM=ROOM, BLOCK=BLOCK,
        )  # fmt: skip
    return words


def _words_fake(
    seed: Tensor, limit: Tensor | None, threshold: int, batch: int, heads: int, queries: int, keys: int, *_: int
) -> Tensor:
    return torch.empty(layout_of(batch, heads, queries, keys).size, dtype=torch.int32, device=seed.device)


for _device in DEVICES:
    torch.library.impl("attemper::fa4_words", _device, _words)
torch.library.register_fake("attemper::fa4_words", _words_fake)
