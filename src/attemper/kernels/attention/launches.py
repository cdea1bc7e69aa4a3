"""Which kernels a call of attention launches, and with which tiles: decided once for every layout of its tensors.

A layout is what tensors are but for their addresses: shapes, strides, dtypes. Loops see few of them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.kernels.common.direct import Launch, memory, remember
from attemper.kernels.common.dropping import NOTHING, by_seeds, drops_weights
from attemper.kernels.common.launch import FLAG_ROWS, unit_stride
from attemper.kernels.common.plans import backward_plan, forward_plan, is_static, kind_of, padded, tail, whole_plan
from attemper.kernels.common.products import products

SPAN = 128  # flags that one program looks at
DELTA_ROWS = 32

_forwards: dict[Any, "ForwardLaunches | None"] = memory()
_backwards: dict[Any, "BackwardLaunches | None"] = memory()
Strides = tuple[int, ...]
"""Of a tensor (B, H, N, e): along samples, heads and tokens."""


class ForwardLaunches(NamedTuple):
    """The kernels of a forward pass, and all that they take beside tensors.

    repair: of rows that may need it; None: none does. flags: how many there are.
    q, k, v, out: strides. sizes: heads, query heads for one of keys, queries, keys.
    out_shape, out_strides, stats_shape, flags_shape: of the tensors that are made.
    """

    main: Launch
    repair: Launch | None
    flags: int
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    sizes: tuple[int, int, int, int]
    out_shape: tuple[int, ...]
    out_strides: Strides
    stats_shape: tuple[int, ...]
    flags_shape: tuple[int, ...]


class BackwardLaunches(NamedTuple):
    """The kernels of a backward pass: `whole` alone, or the others; and all that they take beside tensors.

    share: flags that one program of `spared` looks at.
    q, k, v, dout, out, dq, dk, dv: strides. sizes: heads, query heads for one of keys, queries, keys.
    """

    whole: Launch | None
    delta: Launch
    main: Launch
    spared: Launch
    share: int
    q: Strides
    k: Strides
    v: Strides
    dout: Strides
    out: Strides
    dq: Strides
    dk: Strides
    dv: Strides
    sizes: tuple[int, int, int, int]


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: str, dropping: int, causal: bool, fill: str
) -> ForwardLaunches | None:
    """The kernels of a forward pass; None: they take copies of some of its tensors (`launch.unit_stride`).

    kind: of mask. dropping: what is dropped, a number of `dropping.py`.
    """
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype,
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
        q.get_device(), dropping, causal, fill, products(q.dtype),
    )  # fmt: skip
    if key not in _forwards:
        planned = _plan_forward(q, k, v, kind, dropping, causal, fill) if taken_as_they_are(q, k, v) else None
        remember(_forwards, key, planned)
    return _forwards[key]


def taken_as_they_are(*tensors: Tensor) -> bool:
    """Whether kernels take tensors without a copy."""
    return all(unit_stride(t) is t for t in tensors)


def sizes_of(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """Heads, query heads for one of keys, queries, keys."""
    heads = q.shape[1]
    return heads, heads // k.shape[1], q.shape[2], k.shape[2]


def stats_shapes(q: Tensor, dropping: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of stats and of flags (see `operators.py`)."""
    batch, heads, tokens, _ = q.shape
    groups = -(-tokens // FLAG_ROWS)
    planes = 1 if dropping == NOTHING else 2 + drops_weights(dropping)
    return (planes, batch, heads, groups * FLAG_ROWS), (batch, heads, groups)


def _plan_forward(
    q: Tensor, k: Tensor, v: Tensor, kind: str, dropping: int, causal: bool, fill: str
) -> ForwardLaunches:
    from attemper.kernels.attention.forward import forward_kernel
    from attemper.kernels.attention.repair import repair_kernel

    (batch, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    static, device = is_static(nq, nk, kind_of(q, k, v)), q.get_device()
    plan = forward_plan(nq, nk, padded(max(e, ev)), q.dtype, by_seeds(dropping))
    fixed = plan.fixed and q.dtype != torch.float16
    plain = fixed and not dropping and fill == "none" and kind == "none" and not causal
    constants: dict[str, Any] = {
        "E": e, "BE": padded(e), "EV": ev, "BEV": padded(ev),
        "DROP": dropping, "HARD": fill, "CAUSAL": causal, "MASK": kind, "PRECISION": products(q.dtype),
    }  # fmt: skip
    main = Launch(
        forward_kernel, batch * heads * -(-nq // plan.m), device,
        **constants, NQ=nq if static else 0, NK=nk if static else 0, BM=plan.m, BN=plan.n,
        TAIL_M=tail(nq, plan.m, static), TAIL_N=tail(nk, plan.n, static and not causal, kind == "last"),
        FIXED=fixed, AT_ONCE=plain, num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
    )  # fmt: skip
    repair, flags = None, batch * heads * -(-nq // FLAG_ROWS)
    if dropping or (fixed and not plain):
        programs = -(-flags // SPAN)
        repair = Launch(repair_kernel, programs, device, **constants, BN=32, SPAN=SPAN, num_warps=4, num_stages=1)
    out_strides = (nq * heads * ev, ev, heads * ev, 1)
    return ForwardLaunches(
        main, repair, flags, strides_of(q), strides_of(k), strides_of(v), out_strides[:3], sizes_of(q, k),
        (batch, heads, nq, ev), out_strides, *stats_shapes(q, dropping),
    )  # fmt: skip


def strides_of(t: Tensor) -> Strides:
    """Along samples, heads and tokens."""
    return t.stride()[:3]


def backward_launches(
    q: Tensor, k: Tensor, v: Tensor, others: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], mask: Tensor | None,
    kind: str, dropping: int, causal: bool, fill: str, may_be_whole: bool, penalties: dict[str, Any],
) -> BackwardLaunches | None:  # fmt: skip
    """The kernels of a backward pass; None: they take copies of some of its tensors.

    others: the gradient of the output, the output, and the gradients to be written. penalties: constants.
    """
    dout, out, dq, dk, dv = others
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype,
        dout.stride(), dout.dtype, out.stride(), out.dtype, dq.stride(), dq.dtype, dk.stride(), dv.stride(),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
        q.get_device(), dropping, causal, fill, products(q.dtype), may_be_whole, *penalties.values(),
    )  # fmt: skip
    if key not in _backwards:
        settings = (kind, dropping, causal, fill, may_be_whole, penalties)
        planned = _plan_backward(q, k, v, others, *settings) if taken_as_they_are(q, k, v, dout) else None
        remember(_backwards, key, planned)
    return _backwards[key]


def _plan_backward(
    q: Tensor, k: Tensor, v: Tensor, others: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], kind: str, dropping: int,
    causal: bool, fill: str, may_be_whole: bool, penalties: dict[str, Any],
) -> BackwardLaunches:  # fmt: skip
    from attemper.kernels.attention.backward import backward_kernel, delta_kernel
    from attemper.kernels.attention.repair import spared_kernel
    from attemper.kernels.attention.whole import whole_kernel

    (batch, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    static, device, group = is_static(nq, nk, kind_of(q, k, v)), q.get_device(), heads // k.shape[1]
    widest = padded(max(e, ev))
    constants: dict[str, Any] = {
        "E": e, "BE": padded(e), "EV": ev, "BEV": padded(ev),
        "HARD": fill, "CAUSAL": causal, "MASK": kind, "PRECISION": products(q.dtype),
    }  # fmt: skip
    seeds, small, whole = by_seeds(dropping), None, None
    if static and group == 1 and may_be_whole:
        small = whole_plan(nq, nk, widest, q.dtype, dropping > 0, seeds)
    if small is not None:
        whole = Launch(
            whole_kernel, batch * heads, device, **constants, **penalties, NQ=nq, NK=nk, DROP=dropping,
            BM=small.m, TAIL_M=small.tail_m, BN=small.n, TAIL_N=small.tail_n,
            num_warps=small.warps, num_stages=1, maxnreg=small.registers,
        )  # fmt: skip
    plan = backward_plan(nq, nk, widest, q.dtype, fill != "none" or drops_weights(dropping), seeds)
    rows = batch * heads * -(-nq // DELTA_ROWS)
    shares = drops_weights(dropping)
    delta = Launch(delta_kernel, rows, device, EV=ev, BEV=padded(ev), BM=DELTA_ROWS, SHARES=shares)
    tiles = -(-nk // plan.key_n) + group * -(-nq // plan.query_m)
    main = Launch(
        backward_kernel, batch * k.shape[1] * tiles, device, **constants, **penalties,
        NQ=nq if static else 0, NK=nk if static else 0, GROUP=group, DROP=dropping,
        KEY_N=plan.key_n, KEY_M=plan.key_m,
        KEY_TAIL_N=tail(nk, plan.key_n, static), KEY_TAIL_M=tail(nq, plan.key_m, static),
        QUERY_M=plan.query_m, QUERY_N=plan.query_n,
        QUERY_TAIL_M=tail(nq, plan.query_m, static),
        QUERY_TAIL_N=tail(nk, plan.query_n, static and not causal, kind == "last"),
        num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
    )  # fmt: skip
    each = group * -(-nq // FLAG_ROWS)
    share = each * max(1, SPAN // each)
    flags = batch * heads * -(-nq // FLAG_ROWS)
    spared = Launch(spared_kernel, -(-flags // share), device, **constants, BN=32, SPAN=SPAN, num_warps=4, num_stages=1)
    dout, out, dq, dk, dv = map(strides_of, others)
    return BackwardLaunches(
        whole, delta, main, spared, share, strides_of(q), strides_of(k), strides_of(v), dout, out, dq, dk, dv,
        sizes_of(q, k),
    )  # fmt: skip
