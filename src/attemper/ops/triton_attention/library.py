"""The kernels as torch library operators, with shapes for the compiler and gradients for autograd.

`drop_table` turns a seed and a rate into the words that a call's masks are made of. `fused_attention` gives the output
and what backward needs: `stats`, two int32 planes (the bits of the base-2 log-sum-exp, the row words), and `flags` of
rows that were left undropped. Both hold integers, so no gradient is ever asked of them.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from attemper.ops.triton_attention.plan import backward_plan, forward_plan, is_static, padded, tail

__all__ = ["drop_table", "fused_attention"]

FLAG_ROWS = 16
SPAN = 128  # flags that one program looks at
DELTA_ROWS = 32
LOG2E = math.log2(math.e)
DEVICES = ("CPU", "CUDA")  # the CPU only in Triton's interpreter

torch.library.define("attemper::drop_table", "(Tensor seed, Tensor? limit, SymInt threshold, SymInt keys) -> Tensor")
torch.library.define(
    "attemper::fused_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? table, float scale, bool causal) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "attemper::fused_attention_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, Tensor flags, Tensor? mask, Tensor? table, "
    "float scale, bool causal) -> (Tensor, Tensor, Tensor)",
)


def drop_table(seed: Tensor, limit: int | Tensor, keys: int) -> Tensor:
    """(keys + 3,) int32: the column word of every key, the stream's row word, the limit, 0.

    limit: `stream.threshold(p)`, or a 0-dim int32 tensor of it.
    """
    given = isinstance(limit, Tensor)
    table: Tensor = torch.ops.attemper.drop_table(seed, limit if given else None, 0 if given else limit, keys)
    return table


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """(B, H, Nq, e_v), laid out in memory as (B, Nq, H, e_v).

    mask: boolean of four axes, each of the logits' size or 1; table: from `drop_table`, None drops nothing.
    """
    out: Tensor = torch.ops.attemper.fused_attention(q, k, v, mask, table, scale, causal)[0]
    return out


def _token_major(like: Tensor, width: int) -> Tensor:
    """An empty (B, H, N, width) tensor in which the heads of one token lie together, as projections want them."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _stats(q: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    groups = (tokens + FLAG_ROWS - 1) // FLAG_ROWS
    stats = q.new_empty((1 if table is None else 2, batch, heads, groups * FLAG_ROWS), dtype=torch.int32)
    return stats, q.new_empty((batch, heads, groups), dtype=torch.int32)


def _on_device(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def _unit_stride(t: Tensor) -> Tensor:
    """`t`, copied only if the elements of a token do not lie side by side or its offsets need more than 32 bits."""
    far = t.shape[2] * t.stride(2) >= 2**31
    return t.contiguous() if (t.stride(3) != 1 and t.shape[3] > 1) or far else t


def _mask_arguments(mask: Tensor | None, q: Tensor) -> tuple[Tensor, tuple[int, ...], str]:
    if mask is None:
        return q, (0, 0, 0, 0), "none"
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return mask.view(torch.uint8), strides, "full" if strides[2] else "keys"


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _drop_table(seed: Tensor, limit: Tensor | None, threshold: int, keys: int) -> Tensor:
    from attemper.ops.triton_attention.words import table_kernel

    table = torch.empty(keys + 3, dtype=torch.int32, device=seed.device)
    with _on_device(seed):
        table_kernel[((keys + 3 + 127) // 128,)](
            seed, table if limit is None else limit, table, threshold, keys, HAS_LIMIT=limit is not None, BLOCK=128
        )
    return table


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from attemper.ops.triton_attention.forward import forward_kernel
    from attemper.ops.triton_attention.repair import repair_kernel

    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    out = _token_major(q, v.shape[3])
    stats, flags = _stats(q, table)
    (batch, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    if out.numel() == 0:
        return out, stats, flags
    static = is_static(nq, nk)
    plan = forward_plan(nq, nk, padded(max(e, ev)), q.dtype)
    masked, mask_strides, kind = _mask_arguments(mask, q)
    fixed = plan.fixed and q.dtype != torch.float16
    arguments = (
        q, k, v, out, stats, stats[-1], flags, stats if table is None else table, masked,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *mask_strides,
        heads, heads // k.shape[1], nq, nk, scale * LOG2E,
    )  # fmt: skip
    constants = {
        "E": e, "BE": padded(e), "EV": ev, "BEV": padded(ev),
        "DROP": table is not None, "CAUSAL": causal, "MASK": kind, "PRECISION": _precision(),
    }  # fmt: skip
    with _on_device(q):
        forward_kernel[(batch * heads * -(-nq // plan.m),)](
            *arguments, **constants, NQ=nq if static else 0, NK=nk if static else 0, BM=plan.m, BN=plan.n,
            TAIL_M=tail(nq, plan.m, static), TAIL_N=tail(nk, plan.n, static and not causal), FIXED=fixed,
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
        if fixed or table is not None:
            repair_kernel[(-(-flags.numel() // SPAN),)](
                *arguments, flags.numel(), **constants, BN=32, SPAN=SPAN, num_warps=4, num_stages=1
            )
    return out, stats, flags


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, flags: Tensor, mask: Tensor | None,
    table: Tensor | None, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from attemper.ops.triton_attention.backward import backward_kernel, delta_kernel
    from attemper.ops.triton_attention.repair import spared_kernel

    q, k, v, dout = _unit_stride(q), _unit_stride(k), _unit_stride(v), _unit_stride(dout)
    dq, dk, dv = _token_major(q, q.shape[3]), _token_major(k, k.shape[3]), _token_major(v, v.shape[3])
    (batch, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    if out.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    static = is_static(nq, nk)
    plan = backward_plan(nq, nk, padded(max(e, ev)), q.dtype)
    masked, mask_strides, kind = _mask_arguments(mask, q)
    pairs = torch.empty(stats.shape[1:], dtype=torch.int64, device=q.device)
    group = heads // k.shape[1]
    tiles = -(-nk // plan.key_n) + group * -(-nq // plan.query_m)
    read = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    keyed = (*dk.stride()[:3], *dv.stride()[:3], *mask_strides, heads, group, nq, nk, scale, scale * LOG2E)
    constants = {
        "E": e, "BE": padded(e), "EV": ev, "BEV": padded(ev), "CAUSAL": causal, "MASK": kind, "PRECISION": _precision(),
    }  # fmt: skip
    with _on_device(q):
        delta_kernel[(batch * heads * -(-nq // DELTA_ROWS),)](
            out, dout, stats, pairs, *out.stride()[:3], *dout.stride()[:3], heads, nq,
            EV=ev, BEV=padded(ev), BM=DELTA_ROWS,
        )  # fmt: skip
        backward_kernel[(batch * k.shape[1] * tiles,)](
            q, k, v, dout, dq, dk, dv, stats[-1], pairs, stats if table is None else table, masked,
            *read, *dq.stride()[:3], *keyed, **constants,
            NQ=nq if static else 0, NK=nk if static else 0, GROUP=group, DROP=table is not None,
            KEY_N=plan.key_n, KEY_M=plan.key_m,
            KEY_TAIL_N=tail(nk, plan.key_n, static), KEY_TAIL_M=tail(nq, plan.key_m, static),
            QUERY_M=plan.query_m, QUERY_N=plan.query_n,
            QUERY_TAIL_M=tail(nq, plan.query_m, static), QUERY_TAIL_N=tail(nk, plan.query_n, static and not causal),
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
        if table is not None:
            each = group * flags.shape[2]
            share = each * max(1, SPAN // each)
            spared_kernel[(-(-flags.numel() // share),)](
                q, k, v, dout, dk, dv, stats[-1], flags, pairs, masked, *read, *keyed, share, flags.numel(),
                **constants, BN=32, SPAN=SPAN, num_warps=4, num_stages=1,
            )  # fmt: skip
    return dq, dk, dv


def _drop_table_fake(seed: Tensor, limit: Tensor | None, threshold: int, keys: int) -> Tensor:
    return torch.empty(keys + 3, dtype=torch.int32, device=seed.device)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (_token_major(q, v.shape[3]), *_stats(q, table))


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _token_major(q, q.shape[3]), _token_major(k, k.shape[3]), _token_major(v, v.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, table, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, mask, table)


def _gradients(ctx: Any, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, stats, flags, mask, table = ctx.saved_tensors
    grads = torch.ops.attemper.fused_attention_backward(
        dout, q, k, v, out, stats, flags, mask, table, ctx.scale, ctx.causal
    )
    return (*grads, None, None, None, None)


def _no_second_gradients(ctx: Any, *_: object) -> None:
    raise NotImplementedError("impl='triton' has no second derivatives; impl='reference' has")


for _device in DEVICES:
    torch.library.impl("attemper::drop_table", _device, _drop_table)
    torch.library.impl("attemper::fused_attention", _device, _forward)
    torch.library.impl("attemper::fused_attention_backward", _device, _backward)
torch.library.register_fake("attemper::drop_table", _drop_table_fake)
torch.library.register_fake("attemper::fused_attention", _forward_fake)
torch.library.register_fake("attemper::fused_attention_backward", _backward_fake)
torch.library.register_autograd("attemper::fused_attention", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::fused_attention_backward", _no_second_gradients)
