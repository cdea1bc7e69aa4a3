"""How the kernels of attention multiply float32 tiles.

Tensor cores take float32 as TF32, with 10 bits behind the point, or not at all, and plain float32 products are some ten
times as slow. So each operand is split into a = h + l, where h is a in TF32 and l the rest of it, and three products
are made: h·h' + h·l' + l·h'. Even where splitting cuts digits off, |l| ≤ 2⁻¹⁰ |a|, and l itself is known to
2⁻¹⁰ |l|; so what a product lacks is at most 3 · 2⁻²⁰ |a·a'|: l·l', which is left out, and the two errors of l. Sums are
in float32.
"""

import torch

SPLIT_ERROR = 3 * 2.0**-20
"""The largest error of a product of two float32 numbers by three in TF32, relative to it."""


def products(dtype: torch.dtype) -> str:
    """How tiles of a dtype are multiplied, by torch's global setting: one TF32 product where that allows it."""
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "tf32x3" if dtype == torch.float32 else "ieee"  # which says nothing about half precision
