"""What is known before attention runs, as torch library operators: random words, tops of masks, the largest logits.

None of it is differentiable, and none is as large as the logits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.kernels.attention.launch_arguments import mask_arguments
from attemper.kernels.common.direct import Launch, is_aligned, layout, memory, remember
from attemper.kernels.common.dropping import KEYS, NOTHING
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.flops import counted_by, logits_flops
from attemper.kernels.common.launch import DEVICES, FLAG_ROWS, LOG2E, launch, on_device, strided, unit_stride
from attemper.kernels.common.plans import WHOLE_KEYS, cuts_plan, is_static, kind_of, maxima_plan, padded, tail
from attemper.kernels.common.products import products
from attemper.ops.stream import Stream, all_signed

SPAN = 16  # flags that one program looks at

TABLE_BLOCK = 128  # words that one program writes
_tables: dict[Any, Launch] = memory()
_cuts: dict[Any, "CutLaunches"] = memory()

TAIL = 7  # words of a table behind those of its keys

torch.library.define(
    "attemper::drop_table",
    "(Tensor seed, Tensor? limit, SymInt threshold, SymInt keys, SymInt site, SymInt path, SymInt sample, "
    "SymInt head, SymInt query, SymInt key) -> Tensor",
)
torch.library.define("attemper::row_tops", "(Tensor mask, SymInt queries, bool causal) -> Tensor")
torch.library.define(
    "attemper::row_cuts",
    "(Tensor q, Tensor k, Tensor? mask, Tensor? tops, Tensor? table, Tensor hard, float scale, bool causal, "
    "SymInt largest, bool spare, bool shared=False, int drop=1) -> Tensor",
)


def drop_table(stream: Stream, limit: int | Tensor, keys: int) -> Tensor:
    """(keys + 7,) int32: the column word of every key, and what rows of a stream need (`stream.table_kernel`).

    limit: `stream.threshold(p)`, or a 0-dim int32 tensor of it.
    """
    given = isinstance(limit, Tensor)
    start: tuple[Any, ...] = (
        stream.seed,
        limit if given else None,
        0 if given else limit,
        keys,
        stream.site,
        stream.path,
    )
    draw = _drop_table if is_plain(stream.seed) else torch.ops.attemper.drop_table
    table: Tensor = draw(*start, *stream.at[:4])
    return table


def row_tops(mask: Tensor, queries: int, causal: bool) -> Tensor:
    """(B or 1, H or 1, Nq or 1) float32: the largest entry of every row of an additive mask, among the keys it sees."""
    find = _row_tops if is_plain(mask) else torch.ops.attemper.row_tops
    tops: Tensor = find(mask, queries, causal)
    return tops


def row_cuts(
    q: Tensor, k: Tensor, mask: Tensor | None, tops: Tensor | None, table: Tensor | None, hard: Tensor, scale: float,
    causal: bool, largest: int, spare: bool, shared: bool = False, drop: int = KEYS,
) -> Tensor:  # fmt: skip
    """(B, H, rows) int64: where the `largest` largest logits of a row begin, and its word (see `largest.py`).

    table: of the method that dropped keys before, if one did; hard: the table of hard masking itself.
    spare: leave a row alone of which every key would be dropped.
    shared: the rows of a query have the same word in all heads of a sample.
    drop: what the table drops, a number of `common/dropping.py`.
    """
    find = _row_cuts if is_plain(q) else torch.ops.attemper.row_cuts
    cuts: Tensor = find(q, k, mask, tops, table, hard, scale, causal, largest, spare, shared, drop)
    return cuts


def _drop_table(seed: Tensor, limit: Tensor | None, threshold: int, keys: int, *numbers: int) -> Tensor:
    table = _drop_table_fake(seed, limit, threshold, keys)
    found = table_launch(keys, threshold, seed.get_device(), has_limit=limit is not None)
    with on_device(seed):
        given = table if limit is None else limit
        found(is_aligned(seed, given), seed, given, table, threshold, keys, *all_signed(numbers))
    return table


def table_launch(keys: int, threshold: int, device: int, has_limit: bool = False) -> Launch:
    """The kernel that makes a table. Nothing else is specialised on, but for how many bits the threshold takes."""
    key = (keys, has_limit, threshold > 0x7FFFFFFF, device)
    found = _tables.get(key)
    if found is None:
        from attemper.kernels.common.stream import table_kernel

        programs = -(-(keys + TAIL) // TABLE_BLOCK)
        found = Launch(table_kernel, programs, device, HAS_LIMIT=has_limit, BLOCK=TABLE_BLOCK)
        remember(_tables, key, found)
    return found


def _drop_table_fake(seed: Tensor, limit: Tensor | None, threshold: int, keys: int, *_: int) -> Tensor:
    return torch.empty(keys + TAIL, dtype=torch.int32, device=seed.device)


def _row_tops(mask: Tensor, queries: int, causal: bool) -> Tensor:
    from attemper.kernels.attention.bias import tops_kernel

    tops = _row_tops_fake(mask, queries, causal)
    elements, _ = mask_arguments(mask, None, mask)
    if tops.numel():
        block = 32
        with on_device(mask):
            launch(
                tops_kernel,
                (tops.shape[0] * tops.shape[1] * -(-tops.shape[2] // block),),
                elements[:5],
                tops,
                tops.shape[1],
                tops.shape[2],
                mask.shape[3],
                CAUSAL=causal,
                BM=block,
                BN=64,
            )
    return tops


def _row_tops_fake(mask: Tensor, queries: int, causal: bool) -> Tensor:
    return mask.new_empty((*mask.shape[:2], queries if causal else mask.shape[2]), dtype=torch.float32)


def _row_cuts(
    q: Tensor, k: Tensor, mask: Tensor | None, tops: Tensor | None, table: Tensor | None, hard: Tensor, scale: float,
    causal: bool, largest: int, spare: bool, shared: bool = False, drop: int = KEYS,
) -> Tensor:  # fmt: skip
    q, k = unit_stride(q), unit_stride(k)
    cuts = _row_cuts_fake(q)
    if cuts.numel() == 0:
        return cuts
    masked, kind = mask_arguments(mask, tops, q)
    settings = (kind, NOTHING if table is None else drop, causal, largest, spare, shared)
    key = (*layout(q, k, mask), q.get_device(), *settings, products(q.dtype))
    found = _cuts.get(key)
    if found is None:
        found = _plan_cuts(q, k, *settings)
        remember(_cuts, key, found)
    (heads, nq), nk = q.shape[1:3], k.shape[2]
    unsure = torch.empty(found.flags, dtype=torch.int32, device=q.device)
    dropped = hard if table is None else table
    arguments = (
        strided(q), strided(k), cuts, unsure, (dropped, hard), masked,
        (heads, heads // k.shape[1], nq, nk), scale * LOG2E, largest,
    )  # fmt: skip
    aligned = is_aligned(q, k, cuts, unsure, dropped, hard, mask, tops)
    with on_device(q):
        if found.fast is not None:
            found.fast(aligned, *arguments)
        found.sure(aligned, *arguments, found.flags, found.rows)
    return cuts


class CutLaunches(NamedTuple):
    """The kernels of `row_cuts`: `fast` flags tiles, of so many rows, in which it is not sure; `sure` looks there."""

    fast: Launch | None
    sure: Launch
    flags: int
    rows: int


def _plan_cuts(
    q: Tensor, k: Tensor, kind: str, dropping: int, causal: bool, largest: int, spare: bool, shared: bool
) -> CutLaunches:
    """kind: of mask. dropping: what was dropped before, a number of `common/dropping.py`."""
    from attemper.kernels.attention.largest import cuts_kernel
    from attemper.kernels.attention.maxima import maxima_kernel

    (batch, heads, nq, e), nk, device = q.shape, k.shape[2], q.get_device()
    fast = maxima_plan(nk, largest, padded(e), q.dtype, kind == "none" and not dropping and not causal)
    plan = cuts_plan(nk, largest, padded(e), q.dtype)
    flags = batch * heads * (1 if fast is None else -(-nq // fast.m))
    constants: dict[str, Any] = {
        "E": e, "BE": padded(e), "SPARE": spare, "SHARED": shared, "DROP": dropping, "CAUSAL": causal,
        "MASK": kind, "PRECISION": products(q.dtype),
    }  # fmt: skip
    first = None
    if fast is not None:
        static = is_static(nq, nk, kind_of(q, k, k))
        tail_m, fitted = tail(nq, fast.m, static), static and not causal
        first = Launch(
            maxima_kernel, flags, device,
            **constants, NQ=nq if static else 0, NK=nk if static and nk <= WHOLE_KEYS else 0,
            BM=fast.m, **fast.tile(fast.m, nk, fitted),
            TAIL_M=tail_m, **{f"TAIL_{name}": size for name, size in fast.tile(tail_m, nk, fitted).items()},
            SUMS=fast.sums, num_warps=fast.warps, num_stages=fast.stages,
        )  # fmt: skip
    # Few tiles need a second look. Of short rows one program goes through many; of long rows one takes long enough.
    span = SPAN if fast is not None and plan.way == "whole" else 0
    sure = Launch(
        cuts_kernel, -(-flags // span) if span else batch * heads * -(-nq // plan.m), device,
        **constants, BM=plan.m, BN=plan.n, WAY=plan.way, SLOTS=plan.slots, SECOND=fast is not None, SPAN=span,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return CutLaunches(first, sure, flags, 1 if fast is None else fast.m)


def _row_cuts_fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty((*q.shape[:2], (q.shape[2] + FLAG_ROWS - 1) // FLAG_ROWS * FLAG_ROWS), dtype=torch.int64)


for _device in DEVICES:
    torch.library.impl("attemper::drop_table", _device, _drop_table)
    torch.library.impl("attemper::row_tops", _device, _row_tops)
    torch.library.impl("attemper::row_cuts", _device, _row_cuts)
torch.library.register_fake("attemper::drop_table", _drop_table_fake)
torch.library.register_fake("attemper::row_tops", _row_tops_fake)
torch.library.register_fake("attemper::row_cuts", _row_cuts_fake)
counted_by(torch.ops.attemper.row_cuts, logits_flops)  # once; long rows with many largest are swept more often
