"""Attention of packed documents as torch library operators; `documents.py` has the kernels.

As in `operators.py`, attention gives the output and what backward needs: `stats`, two int32 planes of numbers of rows,
and `flags` of rows that were left undropped.
"""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention.launches import DELTA_ROWS, SPAN
from attemper.kernels.attention.operators import no_second_gradients
from attemper.kernels.common.flops import counted_by, document_backward_flops, document_flops
from attemper.kernels.common.launch import (
    DEVICES,
    FLAG_ROWS,
    LOG2E,
    launch,
    on_device,
    strided,
    token_major,
    unit_stride,
)
from attemper.kernels.common.plans import backward_plan, forward_plan, padded
from attemper.kernels.common.products import products
from attemper.ops.documents import Documents
from attemper.ops.stream import Stream, signed

TABLE_TAIL = 7
BLOCK = 128

torch.library.define(
    "attemper::document_tables",
    "(Tensor seed, Tensor? limit, SymInt threshold, Tensor offsets, SymInt keys, SymInt site, SymInt path, "
    "SymInt sample, SymInt head) -> Tensor",
)
OTHERS = "Tensor offsets_q, Tensor offsets_k, Tensor? tables, float scale, bool causal"
torch.library.define(
    "attemper::document_attention", f"(Tensor q, Tensor k, Tensor v, {OTHERS}) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    "attemper::document_attention_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, Tensor flags, {OTHERS}) "
    "-> (Tensor, Tensor, Tensor)",
)


def document_tables(stream: Stream, limit: int | Tensor, documents: Documents, keys: int) -> Tensor:
    """(keys + 7 · D,) int32: the tables of all documents (`stream.table_words`), one behind the other.

    limit: `stream.threshold(p)`, or a 0-dim int32 tensor of it. keys: of all documents.
    """
    given = isinstance(limit, Tensor)
    start = (stream.seed, limit if given else None, 0 if given else limit, documents.keys.contiguous(), keys)
    tables: Tensor = torch.ops.attemper.document_tables(*start, stream.site, stream.path, *stream.at[:2])
    return tables


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, tables: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """(1, H, T, e_v), laid out in memory as (1, T, H, e_v). tables: from `document_tables`, None drops nothing."""
    offsets_q, offsets_k = (each.contiguous() for each in documents)
    out: Tensor = torch.ops.attemper.document_attention(q, k, v, offsets_q, offsets_k, tables, scale, causal)[0]
    return out


def _tables(
    seed: Tensor, limit: Tensor | None, threshold: int, offsets: Tensor, keys: int, *numbers: int
) -> Tensor:  # fmt: skip
    from attemper.kernels.attention.documents import document_tables_kernel

    tables = _tables_fake(seed, limit, threshold, offsets, keys)
    with on_device(seed):
        launch(document_tables_kernel, (-(-tables.numel() // BLOCK),),
            seed, tables if limit is None else limit, offsets, tables, threshold, offsets.shape[0] - 1, tables.numel(),
            *map(signed, numbers), HAS_LIMIT=limit is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return tables


def _tables_fake(
    seed: Tensor, limit: Tensor | None, threshold: int, offsets: Tensor, keys: int, *_: int
) -> Tensor:  # fmt: skip
    return torch.empty(keys + TABLE_TAIL * (offsets.shape[0] - 1), dtype=torch.int32, device=seed.device)


def _stats(q: Tensor, documents: int, tables: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for numbers of rows, and flags: 0, as some belong to no rows."""
    groups = q.shape[1] * _tiles(q.shape[2], documents, FLAG_ROWS)
    stats = q.new_empty((1 if tables is None else 2, groups * FLAG_ROWS), dtype=torch.int32)
    return stats, q.new_zeros(groups, dtype=torch.int32)


def _tiles(tokens: int, documents: int, tile: int) -> int:
    """How many tiles have room for documents of any lengths."""
    return tokens // tile + documents


def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, tables: Tensor | None, scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from attemper.kernels.attention.documents import document_forward_kernel, document_repair_kernel

    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    out, stats, flags = _forward_fake(q, k, v, offsets_q, offsets_k, tables, scale, causal)
    (_, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    documents = offsets_q.shape[0] - 1
    plan = forward_plan(-(-nq // documents), -(-nk // documents), padded(max(e, ev)), q.dtype)
    fixed = plan.fixed and q.dtype != torch.float16
    plain = fixed and tables is None and not causal
    tensors = (
        strided(q), strided(k), strided(v), strided(out), (stats, stats[-1], flags),
        stats if tables is None else tables, (offsets_q, offsets_k), documents,
    )  # fmt: skip
    sizes = (heads, heads // k.shape[1], scale * LOG2E)
    constants = {
        "E": e, "BE": padded(e), "EV": ev, "BEV": padded(ev),
        "DROP": tables is not None, "CAUSAL": causal, "PRECISION": products(q.dtype),
    }  # fmt: skip
    tiles = _tiles(nq, documents, plan.m)
    with on_device(q):
        launch(document_forward_kernel, (heads * tiles,),
            *tensors, tiles, *sizes, **constants, BM=plan.m, BN=plan.n, FIXED=fixed, AT_ONCE=plain,
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
        if tables is not None or (fixed and not plain):
            launch(
                document_repair_kernel,
                (-(-flags.numel() // SPAN),),
                *tensors,
                flags.numel(),
                *sizes,
                **constants,
                BN=32,
                SPAN=SPAN,
                num_warps=4,
                num_stages=1,
            )
    return out, stats, flags


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, tables: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return (token_major(q, q.shape[1], q.shape[2], v.shape[3]), *_stats(q, offsets_q.shape[0] - 1, tables))


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, flags: Tensor, offsets_q: Tensor,
    offsets_k: Tensor, tables: Tensor | None, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from attemper.kernels.attention.documents import (
        document_backward_kernel,
        document_delta_kernel,
        document_spared_kernel,
    )

    q, k, v, dout = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(dout)
    dq, dk, dv = _backward_fake(dout, q, k, v)
    (_, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    documents, key_heads = offsets_q.shape[0] - 1, k.shape[1]
    plan = backward_plan(-(-nq // documents), -(-nk // documents), padded(max(e, ev)), q.dtype)
    pairs = torch.empty(stats.shape[1:], dtype=torch.int64, device=q.device)
    saved, offsets = (stats[-1], pairs), (offsets_q, offsets_k)
    where = stats if tables is None else tables
    sizes = (heads, heads // key_heads, (scale, scale * LOG2E))
    multiply = products(q.dtype)
    constants = {"E": e, "BE": padded(e), "EV": ev, "BEV": padded(ev), "CAUSAL": causal, "PRECISION": multiply}
    q_rows, k_rows, v_rows, dout_rows, out_rows = (strided(t) for t in (q, k, v, dout, out))
    dq_rows, dk_rows, dv_rows = strided(dq), strided(dk), strided(dv)
    delta_tiles = _tiles(nq, documents, DELTA_ROWS)
    key_tiles, query_tiles = _tiles(nk, documents, plan.key_n), _tiles(nq, documents, plan.query_m)
    with on_device(q):
        launch(document_delta_kernel, (heads * delta_tiles,),
            out_rows, dout_rows, stats, pairs, offsets, documents, delta_tiles, heads,
            EV=ev, BEV=padded(ev), BM=DELTA_ROWS,
        )  # fmt: skip
        launch(document_backward_kernel, (key_heads * (key_tiles + sizes[1] * query_tiles),),
            q_rows, k_rows, v_rows, dout_rows, dq_rows, dk_rows, dv_rows, saved, where, offsets, documents, key_tiles,
            query_tiles, *sizes, **constants, DROP=tables is not None,
            KEY_N=plan.key_n, KEY_M=plan.key_m, QUERY_M=plan.query_m, QUERY_N=plan.query_n,
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
        if tables is not None:
            launch(document_spared_kernel, (key_heads * documents,),
                q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows, saved, flags, where, offsets, documents, *sizes,
                **constants, BN=32, SPAN=SPAN, num_warps=4, num_stages=1,
            )  # fmt: skip
    return dq, dk, dv


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return token_major(q, *q.shape[1:]), token_major(k, *k.shape[1:]), token_major(v, *v.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, offsets_q, offsets_k, tables, ctx.scale, ctx.causal = inputs
    ctx.set_materialize_grads(False)  # zeros for integers, which nobody reads, would cost a launch each
    ctx.save_for_backward(q, k, v, *output, offsets_q, offsets_k, tables)


def _gradients(ctx: Any, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    grads = torch.ops.attemper.document_attention_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.causal)
    return (*grads, *([None] * 5))


for _device in DEVICES:
    torch.library.impl("attemper::document_tables", _device, _tables)
    torch.library.impl("attemper::document_attention", _device, _forward)
    torch.library.impl("attemper::document_attention_backward", _device, _backward)
torch.library.register_fake("attemper::document_tables", _tables_fake)
torch.library.register_fake("attemper::document_attention", _forward_fake)
torch.library.register_fake("attemper::document_attention_backward", _backward_fake)
torch.library.register_autograd("attemper::document_attention", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::document_attention_backward", no_second_gradients)
counted_by(torch.ops.attemper.document_attention, document_flops)
counted_by(torch.ops.attemper.document_attention_backward, document_backward_flops)
