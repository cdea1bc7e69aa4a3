"""Parts of rows, each with its log-sum-exps, put together: what ring attention does with the keys of every device."""

from collections.abc import Iterable

import torch
from torch import Tensor

from attemper.errors import ParameterError


def merge_parts(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to all keys, from calls of `attention(…, return_lse=True)` that each had a part of them.

    parts: (out, lse) of each, (B, H, Nq, e_v) and (B, H, Nq).
    Returns out and lse of all keys, of the same shapes, so that parts can also be merged one after the other. A row
    that kept no key in any part has zeros, and −inf as its log-sum-exp. Sums are made in the dtype of lse, and out has
    that of the parts; where it is half precision, merge all at once, or begin with a part in float32.

    >>> from attemper import Offsets, attention
    >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    >>> parts = []
    >>> for key in (0, 4):
    ...     at, some = Offsets(key=key, keys=8), slice(key, key + 4)
    ...     parts.append(attention(q, k[:, :, some], v[:, :, some], seed=0, at=at, return_lse=True))
    >>> torch.testing.assert_close(merge_parts(parts)[0], attention(q, k, v))
    """
    parts = list(parts)
    _check(parts)
    lse = log_sum_exp(torch.stack([lse for _, lse in parts], -1), -1)
    offset = lse.masked_fill(lse == -torch.inf, 0.0)
    merged = sum((part_lse - offset).exp()[..., None] * out for out, part_lse in parts)
    assert isinstance(merged, Tensor)
    dtype = parts[0][0].dtype
    for out, _ in parts:
        dtype = torch.promote_types(dtype, out.dtype)
    return merged.to(dtype), lse


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """`torch.logsumexp`, with a gradient of zero, not NaN, where all entries are −inf."""
    empty = (x == -torch.inf).all(dim, keepdim=True)
    return x.masked_fill(empty, 0.0).logsumexp(dim).masked_fill(empty.squeeze(dim), -torch.inf)


def _check(parts: list[tuple[Tensor, Tensor]]) -> None:
    if not parts:
        raise ParameterError("parts must have at least one pair of out and lse, got none")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and all(isinstance(t, Tensor) for t in part)):
            raise ParameterError(
                f"each of parts must be (out, lse), what attention(…, return_lse=True) gives; got {type(part).__name__}"
            )
    shape = parts[0][0].shape
    for out, lse in parts:
        if out.shape != shape or lse.shape != shape[:-1]:
            raise ParameterError(
                "the parts must agree in their shapes, (B, H, Nq, e_v) of out and (B, H, Nq) of lse; got "
                f"{tuple(out.shape)} and {tuple(lse.shape)}, and the first out is {tuple(shape)}"
            )
