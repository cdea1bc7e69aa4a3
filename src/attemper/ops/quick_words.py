"""The stream's words by numpy: the same bits as `row_words` and `column_words`, with a tenth of the time between them.

They take some fifty small operations, and a call of attention on a CPU may be short.
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attemper.ops.stream import HEAD_STEP, MASK, MIX_1, MIX_2, QUERY_STEP, STEP, Stream

Numbers = NDArray[np.uint32]


def quick_rows(stream: Stream, samples: int, heads: int, queries: int) -> Tensor:
    """(samples, heads, queries) odd int32 words, on the CPU."""
    start, at = stream.rows, stream.at
    sample = _mix(_counted(samples, at.sample, STEP) + _word(start.a))[:, None]
    head = _mix((sample ^ _word(start.b)) + _counted(heads, at.head, HEAD_STEP))[..., None]
    query = _mix(head + _counted(queries, at.query, QUERY_STEP))
    return _tensor(_mix(np.bitwise_xor(query, sample[..., None], out=query)))


def quick_columns(stream: Stream, keys: int) -> Tensor:
    """(keys,) odd int32 words, on the CPU."""
    start = stream.columns
    return _tensor(_mix(_mix(_counted(keys, stream.at.key, STEP) + _word(start.a)) ^ _word(start.b)))


def _word(x: Tensor | int) -> np.uint32:
    return np.uint32(int(x) & MASK)


def _counted(many: int, first: int, step: int) -> Numbers:
    """The numbers from first on, times a step, modulo 2**32."""
    return (np.arange(first, first + many, dtype=np.uint64) * np.uint64(step)).astype(np.uint32)


def _mix(x: Numbers) -> Numbers:
    """`stream.mix`, in place."""
    other = x >> np.uint32(16)
    x ^= other
    x *= np.uint32(MIX_1)
    np.right_shift(x, np.uint32(15), out=other)
    x ^= other
    x *= np.uint32(MIX_2)
    np.right_shift(x, np.uint32(16), out=other)
    x ^= other
    return x


def _tensor(x: Numbers) -> Tensor:
    x |= np.uint32(1)
    return torch.from_numpy(cast(NDArray[np.int32], x.view(np.int32)))
