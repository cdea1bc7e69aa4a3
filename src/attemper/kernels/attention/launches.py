"""Which kernels a call of attention launches, and with which tiles: decided once for every layout of its tensors.

A layout is what tensors are but for their addresses: shapes, strides, dtypes. Loops see few of them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.kernels.common.direct import Launch, layout, memory, remember
from attemper.kernels.common.dropping import by_seeds, drops_weights
from attemper.kernels.common.launch import FLAG_ROWS
from attemper.kernels.common.plans import backward_plan, forward_plan, is_static, kind_of, padded, tail, whole_plan
from attemper.kernels.common.products import products

SPAN = 128  # flags that one program looks at
DELTA_ROWS = 32

_forwards: dict[Any, tuple[Launch, Launch | None]] = memory()
_backwards: dict[Any, "BackwardLaunches"] = memory()


class BackwardLaunches(NamedTuple):
    """The kernels of a backward pass: `whole` alone, or the others.

    share: flags that one program of `spared` looks at.
    """

    whole: Launch | None
    delta: Launch
    main: Launch
    spared: Launch
    share: int


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: str, dropping: int, causal: bool, fill: str
) -> tuple[Launch, Launch | None]:
    """The forward kernel and, where rows may need it, the one that repairs them.

    kind: of mask. dropping: what is dropped, a number of `dropping.py`.
    """
    key = (*layout(q, k, v, mask), q.get_device(), dropping, causal, fill, products(q.dtype))
    found = _forwards.get(key)
    if found is None:
        found = _plan_forward(q, k, v, kind, dropping, causal, fill)
        remember(_forwards, key, found)
    return found


def _plan_forward(
    q: Tensor, k: Tensor, v: Tensor, kind: str, dropping: int, causal: bool, fill: str
) -> tuple[Launch, Launch | None]:
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
    if not (dropping or (fixed and not plain)):
        return main, None
    flags = batch * heads * -(-nq // FLAG_ROWS)
    programs = -(-flags // SPAN)
    return main, Launch(repair_kernel, programs, device, **constants, BN=32, SPAN=SPAN, num_warps=4, num_stages=1)


def backward_launches(
    q: Tensor, k: Tensor, v: Tensor, others: tuple[Tensor, ...], mask: Tensor | None, kind: str, dropping: int,
    causal: bool, fill: str, may_be_whole: bool, penalties: dict[str, Any],
) -> BackwardLaunches:  # fmt: skip
    """The kernels of a backward pass.

    others: the gradient of the output, the output, and the gradients to be written. penalties: constants.
    """
    settings = (q.get_device(), dropping, causal, fill, products(q.dtype), may_be_whole, *penalties.values())
    key = (*layout(q, k, v, *others, mask), *settings)
    found = _backwards.get(key)
    if found is None:
        found = _plan_backward(q, k, v, kind, dropping, causal, fill, may_be_whole, penalties)
        remember(_backwards, key, found)
    return found


def _plan_backward(
    q: Tensor, k: Tensor, v: Tensor, kind: str, dropping: int, causal: bool, fill: str, may_be_whole: bool,
    penalties: dict[str, Any],
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
    return BackwardLaunches(whole, delta, main, spared, share)
