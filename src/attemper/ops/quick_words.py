"""The stream's words by numpy: the same bits as `row_words` and `column_words` of `stream.py`, in a tenth of the time.

They take some fifty small operations, and a call on a CPU may be short.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attemper.ops.stream_constants import HEAD_STEP, MASK, MIX_1, MIX_2, QUERY_STEP, STEP

Numbers = NDArray[np.uint32]
Start = tuple[Tensor | int, Tensor | int]


def quick_rows(start: Start, shape: tuple[int, int, int], at: Sequence[int]) -> Tensor:
    """(samples, heads, queries) odd int32 words, on the CPU.

    start: the two words that rows start from, as numbers. at: the numbers of the first sample, head and query.
    """
    samples, heads, queries = shape
    sample = _mix(_counted(samples, at[0], STEP) + _word(start[0]))[:, None]
    head = _mix((sample ^ _word(start[1])) + _counted(heads, at[1], HEAD_STEP))[..., None]
    query = _mix(head + _counted(queries, at[2], QUERY_STEP))
    return _tensor(_mix(np.bitwise_xor(query, sample[..., None], out=query)))


def quick_columns(start: Start, keys: int, first: int) -> Tensor:
    """(keys,) odd int32 words, on the CPU."""
    return _tensor(_mix(_mix(_counted(keys, first, STEP) + _word(start[0])) ^ _word(start[1])))


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
