"""Forward by our Triton kernel, backward by FlashAttention-4's: for some calls the faster half of each.

Where keys are dropped from narrow heads, our forward kernel takes 0.8 times as long as FlashAttention-4's on an H200,
since it needs no running maximum (1024 tokens), and FlashAttention-4's backward kernel 0.8 times as long as ours. Hard
masking has a forward kernel of ours only. What one leaves behind, a small kernel writes anew as the other wants it.
"""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention.operators import forward, forward_fake
from attemper.kernels.common.flops import attention_flops, counted_by
from attemper.kernels.common.launch import DEVICES, LOG2E, launch, on_device
from attemper.kernels.fa4.tables import BLOCK, HEADER, ROOM, layout_of

HARD = "Tensor? cuts=None, Tensor? hard=None, str fill='none'"
torch.library.define(
    "attemper::mixed_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? table, float scale, {HARD}) -> (Tensor, Tensor)",
)
torch.library.define(
    "attemper::fa4_restated",
    "(Tensor stats, Tensor table, SymInt queries, SymInt keys, Tensor? cuts=None, float scale=1.0) -> (Tensor, Tensor)",
)


def mixed_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, scale: float,
    cuts: Tensor | None = None, hard: Tensor | None = None, fill: str = "none",
) -> Tensor:  # fmt: skip
    """(B, H, Nq, e), laid out in memory as (B, Nq, H, e).

    table, or cuts, hard and fill: as in `kernels.attention.operators.fused_attention`, which takes both.
    """
    out: Tensor = torch.ops.attemper.mixed_attention(q, k, v, table, scale, cuts, hard, fill)[0]
    return out


def restated(
    stats: Tensor, table: Tensor, queries: int, keys: int, cuts: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What our kernels left for backward, as FlashAttention-4 takes it: the words of `tables.py`, the log-sum-exp.

    stats: (1 or 2, B, H, rows) int32, the log-sum-exp to the base 2 and, without cuts, the row words. The log-sum-exp
        of a row that was left undropped is +inf there, and its true one is in place of the word.
    table: of the method that drops keys or hits logits; cuts: of hard masking.
    """
    words, lse = torch.ops.attemper.fa4_restated(stats, table, queries, keys, cuts, scale)
    return words, lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, scale: float, *hard: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return forward(q, k, v, None, table, scale, False, None, *hard)[:2]


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, scale: float, *_: object
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return forward_fake(q, k, v, None, table, scale, False)[:2]


def _restated(
    stats: Tensor, table: Tensor, queries: int, keys: int, cuts: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    from attemper.kernels.fa4.rows import restate_kernel

    words, lse = _restated_fake(stats, table, queries, keys, cuts)
    batch, heads = stats.shape[1:3]
    layout = layout_of(batch, heads, queries, keys, cuts is not None)
    programs = -(-layout.rows // BLOCK) + -(-(layout.lows - layout.rows) // BLOCK)
    with on_device(stats):
        launch(restate_kernel, (programs,),
            stats, stats if cuts is None else cuts, table, words, lse, stats[0].numel(), stats.shape[3], lse.numel(),
            queries, keys, layout.rows, layout.lows, scale * LOG2E,
            HARD=cuts is not None, HEADER=HEADER, ROOM=ROOM, BLOCK=BLOCK,
        )  # fmt: skip
    return words, lse


def _restated_fake(
    stats: Tensor, table: Tensor, queries: int, keys: int, cuts: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    batch, heads = stats.shape[1:3]
    size = layout_of(batch, heads, queries, keys, cuts is not None).size
    return stats.new_empty(size), stats.new_empty(batch, heads, queries)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # zeros for what is not differentiable would cost a launch
    q, k, v, table, ctx.scale, cuts, hard, ctx.fill = inputs
    ctx.save_for_backward(q, k, v, *output, table if hard is None else hard, cuts)


def _gradients(ctx: Any, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, stats, table, cuts = ctx.saved_tensors
    words, lse = restated(stats, table, q.shape[2], k.shape[2], cuts, ctx.scale)
    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = torch.ops.attemper.fa4_attention_backward(
        dout, q, k, v, out, lse, words, ctx.scale, False, deterministic, ctx.fill
    )
    return (*grads, *[None] * 5)


for _device in DEVICES:
    torch.library.impl("attemper::mixed_attention", _device, _forward)
    torch.library.impl("attemper::fa4_restated", _device, _restated)
torch.library.register_fake("attemper::mixed_attention", _forward_fake)
torch.library.register_fake("attemper::fa4_restated", _restated_fake)
torch.library.register_autograd("attemper::mixed_attention", _gradients, setup_context=_save)
counted_by(torch.ops.attemper.mixed_attention, attention_flops)
