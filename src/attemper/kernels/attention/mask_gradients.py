"""The gradient of an additive mask: gradients of logits, added up over the samples and heads that share it."""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention.launch_arguments import mask_arguments, table_arguments
from attemper.kernels.common.dropping import KEYS, NOTHING
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.flops import attention_flops, counted_by
from attemper.kernels.common.launch import DEVICES, LOG2E, launch, on_device, strided, unit_stride
from attemper.kernels.common.plans import padded
from attemper.kernels.common.products import products

PROGRAMS = 1024
"""How many programs keep a GPU busy. Each writes a tile, so that this bounds the memory of partial sums, too."""

torch.library.define(
    "attemper::mask_gradient",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, Tensor flags, Tensor mask, Tensor? table, "
    "float scale, bool causal, Tensor? tops, Tensor? cuts, Tensor? hard, str fill, int drop) -> Tensor",
)


def mask_gradient(dout: Tensor, *arguments: Any) -> Tensor:
    """The gradient of an additive mask, in its shape and dtype, from what backward gets."""
    take = _mask_gradient if is_plain(dout) else torch.ops.attemper.mask_gradient
    gradient: Tensor = take(dout, *arguments)
    return gradient


def shares(stats: Tensor) -> Tensor:
    """What is left of the weights of rows; if nobody asks for it, whatever is there."""
    return stats[1] if stats.shape[0] == 3 else stats


def _mask_gradient(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, flags: Tensor, mask: Tensor,
    table: Tensor | None, scale: float, causal: bool, tops: Tensor | None, cuts: Tensor | None, hard: Tensor | None,
    fill: str, drop: int = KEYS,
) -> Tensor:  # fmt: skip
    from attemper.kernels.attention.bias import gradient_kernel

    q, k, v, dout = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(dout)
    (batch, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    samples, mask_heads = mask.shape[:2]
    over = batch // samples, heads // mask_heads
    side = 64 if q.dtype != torch.float32 and padded(max(e, ev)) <= 64 else 32
    tiles = -(-nq // side) * -(-nk // side)
    parts = max(1, min(over[0] * over[1], PROGRAMS // (samples * mask_heads * tiles)))
    dtype = mask.dtype if parts == 1 else torch.float32
    sums = mask.new_empty((parts, *mask.shape), dtype=dtype)
    with on_device(q):
        launch(gradient_kernel, (samples * mask_heads * parts * tiles,),
            strided(q), strided(k), strided(v), strided(out), strided(dout), (stats, stats[-1], flags, shares(stats)),
            table_arguments(table, hard, cuts, stats), mask_arguments(mask, tops, q)[0], sums,
            (heads, heads // k.shape[1], nq, nk), (samples, mask_heads, *over, parts), scale * LOG2E,
            E=e, BE=padded(e), EV=ev, BEV=padded(ev), BM=side, BN=side, DROP=NOTHING if table is None else drop,
            HARD=fill, CAUSAL=causal, PRECISION=products(q.dtype), num_warps=4, num_stages=2,
        )  # fmt: skip
    return sums[0] if parts == 1 else sums.sum(0).to(mask.dtype)


def _fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, flags: Tensor, mask: Tensor, *_: object
) -> Tensor:
    return mask.new_empty(mask.shape)


def _flops(dout: Any, q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    """The logits and the gradient of the weights once more."""
    return attention_flops(q, k, v)


for _device in DEVICES:
    torch.library.impl("attemper::mask_gradient", _device, _mask_gradient)
torch.library.register_fake("attemper::mask_gradient", _fake)
counted_by(torch.ops.attemper.mask_gradient, _flops)
