"""The kernels as torch library operators, with shapes for the compiler and gradients for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention.prepare import drop_table
from attemper.kernels.common.dropping import NOTHING, drop_code, drops_weights
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.launch import DEVICES, launch, on_device
from attemper.ops.announced import announced
from attemper.ops.perturbation import Drawn
from attemper.ops.stream import live_threshold

HELD = 2048
"""Numbers that a program holds, if its rows are short."""
HOW = "int drop, bool first, str fill, bool shared"

torch.library.define(
    "attemper::perturbed_softmax",
    f"(Tensor logits, ScalarType dtype, Tensor? table, Tensor? hard, int largest, {HOW}) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "attemper::perturbed_softmax_backward",
    "(Tensor dout, Tensor? logits, Tensor weights, Tensor before, Tensor rows, Tensor? table, Tensor? hard, "
    "ScalarType dtype, int drop, str fill, bool shared) -> Tensor",
)


def perturbed_softmax(logits: Tensor, drawn: Drawn, dtype: torch.dtype) -> Tensor:
    """Weights in this dtype of logits (B, H, Nq, Nk) that hold their masks, with what methods do before and behind.

    drawn: the methods with their streams, in the order in which they act; what `serves` said yes to.
    """
    keys, device = logits.shape[3], logits.device
    table, hard, largest, code, first, fill, shared = None, None, 0, NOTHING, False, "none", False
    for method, stream in drawn:
        drop, hit = method.word_drop, method.largest_drop(keys)
        if drop is not None:
            code, first = drop_code(drop), hard is None
            table = drop_table(
                stream.for_all_queries() if drop.by_key else stream, live_threshold(drop.p, device), keys
            )
        elif hit is not None:
            largest, fill, shared = hit.count, hit.fill, hit.shared
            hard = drop_table(stream.for_all_heads() if shared else stream, live_threshold(hit.p, device), keys)
    weights = _weights(logits, dtype, table, hard, largest, code, first, fill, shared)
    for method, stream in drawn:
        weights = method.perturb_heads(weights, stream)
    return weights


@announced("attention")
def _weights(logits: Tensor, *others: Any) -> Tensor:
    direct = is_plain(logits)
    weights: Tensor = (
        DirectSoftmax.apply(logits, *others) if direct else torch.ops.attemper.perturbed_softmax(logits, *others)[0]
    )
    return weights


def _strided(x: Tensor) -> tuple[Any, ...]:
    return (x, *x.stride()[:3])


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _tile(keys: int) -> dict[str, int]:
    """Rows of a program, and a power of two that holds their keys.

    >>> _tile(49), _tile(1500)
    ({'ROWS': 32, 'BN': 64, 'num_warps': 4}, {'ROWS': 1, 'BN': 2048, 'num_warps': 4})
    """
    n = max(16, 1 << (keys - 1).bit_length())
    return {"ROWS": max(1, min(32, HELD // n)), "BN": n, "num_warps": 4 if n <= 4 * HELD // 4 else 8}


def _forward(
    logits: Tensor, dtype: torch.dtype, table: Tensor | None, hard: Tensor | None, largest: int, drop: int, first: bool,
    fill: str, shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weights; those that softmax gave, where some are dropped behind it; two numbers of each row, for backward."""
    from attemper.kernels.softmax.kernels import forward_kernel

    logits = _side_by_side(logits)
    weights, before, rows = _forward_fake(logits, dtype, table, hard, largest, drop, first, fill, shared)
    batch, heads, nq, nk = logits.shape
    tile = _tile(nk)
    with on_device(logits):
        launch(forward_kernel, (-(-batch * heads * nq // tile["ROWS"]),),
            _strided(logits), _strided(weights), before, rows,
            weights if table is None else table, weights if hard is None else hard, (batch, heads, nq, nk), largest,
            DROP=drop, FIRST=first, HARD=fill, SHARED=shared, **tile,
        )  # fmt: skip
    return weights, before, rows


def _forward_fake(
    logits: Tensor, dtype: torch.dtype, table: Tensor | None, hard: Tensor | None, largest: int, drop: int, first: bool,
    fill: str, shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, nq, nk = logits.shape
    behind = drops_weights(drop)
    weights = torch.empty_like(_side_by_side(logits), dtype=dtype)
    before = logits.new_empty((batch, heads, nq, nk) if behind else (0,), dtype=dtype)
    rows = logits.new_empty((batch, heads, nq, 2) if behind or fill == "zero" else (0,), dtype=torch.float32)
    return weights, before, rows


def _backward(
    dout: Tensor, logits: Tensor | None, weights: Tensor, before: Tensor, rows: Tensor, table: Tensor | None,
    hard: Tensor | None, dtype: torch.dtype, drop: int, fill: str, shared: bool,
) -> Tensor:  # fmt: skip
    from attemper.kernels.softmax.kernels import backward_kernel

    dout, logits = _side_by_side(dout), weights if logits is None else _side_by_side(logits)
    grad = torch.empty_like(weights, dtype=dtype)
    batch, heads, nq, nk = weights.shape
    tile = _tile(nk)
    with on_device(weights):
        launch(backward_kernel, (-(-batch * heads * nq // tile["ROWS"]),),
            _strided(dout), _strided(grad), _strided(weights), _strided(logits), before, rows,
            weights if table is None else table, weights if hard is None else hard, (batch, heads, nq, nk),
            DROP=drop, HARD=fill, SHARED=shared, **tile,
        )  # fmt: skip
    return grad


def _backward_fake(
    dout: Tensor, logits: Tensor | None, weights: Tensor, before: Tensor, rows: Tensor, table: Tensor | None,
    hard: Tensor | None, dtype: torch.dtype, *_: object,
) -> Tensor:  # fmt: skip
    return torch.empty_like(weights, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, table, hard, _, ctx.drop, _, ctx.fill, ctx.shared = inputs
    weights, before, rows = output
    ctx.set_materialize_grads(False)
    ctx.dtype = logits.dtype
    # What is not read is not kept: logits only where some were set to zero, weights only where none are dropped behind.
    given = logits if ctx.fill == "zero" else None
    ctx.save_for_backward(given, before if drops_weights(ctx.drop) else weights, before, rows, table, hard)


def _gradients(ctx: Any, dout: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 9
    logits, weights, before, rows, table, hard = ctx.saved_tensors
    direct = is_plain(dout) and not torch.is_grad_enabled()  # otherwise it says that there are no second gradients
    backward = _backward if direct else torch.ops.attemper.perturbed_softmax_backward
    grad = backward(
        dout, logits, weights, before, rows, table, hard, ctx.dtype, ctx.drop, ctx.fill, ctx.shared
    )  # fmt: skip
    return (grad, *[None] * 8)


class DirectSoftmax(torch.autograd.Function):
    """The operator in eager mode, without the dispatcher's way to Python and back."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        output = _forward(*arguments)
        _save(ctx, arguments, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dout)


def _no_second_gradients(ctx: Any, *_: object) -> None:
    raise NotImplementedError("softmax in one kernel has no second derivatives; impl='reference' has")


for _device in DEVICES:
    torch.library.impl("attemper::perturbed_softmax", _device, _forward)
    torch.library.impl("attemper::perturbed_softmax_backward", _device, _backward)
torch.library.register_fake("attemper::perturbed_softmax", _forward_fake)
torch.library.register_fake("attemper::perturbed_softmax_backward", _backward_fake)
torch.library.register_autograd("attemper::perturbed_softmax", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::perturbed_softmax_backward", _no_second_gradients)
