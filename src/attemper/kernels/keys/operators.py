"""The kernels as torch library operators, with shapes for the compiler and gradients for autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.common.direct import Launch, is_aligned, layout, memory, remember
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.launch import DEVICES, launch, on_device, strided, token_major, unit_stride
from attemper.kernels.common.plans import is_static, padded
from attemper.ops.stream import Stream, all_signed

TOKENS = 64
"""Tokens that one program moves."""
RUN = {3: 8}
"""Taps → tokens in a row that one thread blurs along the sequence; 4 where there are more taps."""
ACROSS = 1024
"""Numbers that one program blurs along the sequence at a time; each of its threads then goes on to its next token."""
IMAGE = 2048
"""Numbers that one program blurs on an image."""
SORTED = 4096
"""Keys that one program can sort."""
RANKED = 64
"""Of more keys, those that one program ranks."""
_blurs: dict[Any, Launch] = memory()
_moves: dict[Any, Launch] = memory()

torch.library.define(
    "attemper::blur_keys",
    "(Tensor x, Tensor seed, SymInt site, SymInt path, float sigma, int w, bool causal, Tensor? real, "
    "SymInt[] grid) -> (Tensor, Tensor)",
)
torch.library.define(
    "attemper::blur_keys_backward",
    "(Tensor dout, Tensor inverse, Tensor seed, SymInt site, SymInt path, float sigma, int w, bool causal, "
    "Tensor? real, SymInt[] grid) -> Tensor",
)
torch.library.define(
    "attemper::draw_order",
    "(Tensor seed, SymInt batch, SymInt sets, SymInt keys, SymInt count, SymInt? limit, SymInt site, SymInt path, "
    "SymInt sample, SymInt head) -> (Tensor, Tensor, Tensor)",
)
torch.library.define("attemper::take_keys", "(Tensor x, Tensor order, Tensor rank, SymInt count) -> Tensor")
torch.library.define("attemper::take_keys_backward", "(Tensor dout, Tensor order, Tensor rank, SymInt heads) -> Tensor")


def blur_keys(
    x: Tensor, stream: Stream, sigma: float, w: int, causal: bool, real: Tensor | None, grid: Sequence[int]
) -> Tensor:
    """What `methods.blur.Blur.perturb_keys` gives, (B, H, N, e).

    sigma: the largest width; the stream draws the width itself.
    real: boolean (B or 1, H or 1, N), the keys that are no padding.
    grid: (prefix, rows, columns) of an image, or empty: along the sequence.
    """
    told = (stream.seed, stream.site, stream.path, sigma, w, causal, real, list(grid))
    out: Tensor = DirectBlur.apply(x, *told) if is_plain(x) else torch.ops.attemper.blur_keys(x, *told)[0]
    return out


def draw_order(
    stream: Stream, batch: int, sets: int, keys: int, count: int, limit: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """All keys in the order of `Stream.scores`, the place of every key in it, and which of the first `count` are kept.

    Shapes (batch, sets, keys) twice, int64, and (batch, sets, count), boolean.
    limit: of the last one that is drawn, `stream.threshold` of the rate at which it is not kept; None: always kept.
    """
    numbers = (stream.site, stream.path, stream.at.sample, stream.at.head)
    draw = _draw_order if is_plain(stream.seed) else torch.ops.attemper.draw_order
    drawn: tuple[Tensor, Tensor, Tensor] = draw(stream.seed, batch, sets, keys, count, limit, *numbers)
    return drawn


def take_keys(x: Tensor, order: Tensor, rank: Tensor, count: int) -> Tensor:
    """The first `count` of every head's tokens in an order, (B, H or sets, count, e).

    x: (B, H, N, e). order, rank: (B, sets, N), one the inverse of the other; sets is 1, H or a multiple of H.
    """
    direct = is_plain(x)
    out: Tensor = (
        DirectTake.apply(x, order, rank, count) if direct else torch.ops.attemper.take_keys(x, order, rank, count)
    )
    return out


# -------------------------------------------------------------------------------------------------------------- blur
def _launch_blur(
    x: Tensor, out: Tensor, inverse: Tensor, transposed: bool,
    seed: Tensor, site: int, path: int, sigma: float, w: int, causal: bool, real: Tensor | None, grid: Sequence[int],
) -> None:  # fmt: skip
    batch, heads, n, e = x.shape
    if x.numel() == 0:
        return
    block = _blur_block(e, grid)
    samples = max(1, (2**31 - block) // (heads * n))  # tokens are counted in 32 bits
    known = None if real is None else real.view(torch.uint8)
    site, path = all_signed((site, path))
    numbers = (sigma, tuple(grid), site, path)
    with on_device(x):
        if samples >= batch:
            _blur_samples(x, out, inverse, known, seed, numbers, w, causal, transposed)
            return
        for first in range(0, batch, samples):
            part = slice(first, first + samples)
            here = known if known is None or known.shape[0] == 1 else known[part]
            _blur_samples(x[part], out[part], inverse[part], here, seed, numbers, w, causal, transposed)


def _blur_block(e: int, grid: Sequence[int]) -> int:
    """Tokens, or runs of them, of one program."""
    return max(16, IMAGE // padded(e)) if grid else ACROSS // padded(e)


def _blur_samples(
    x: Tensor, out: Tensor, inverse: Tensor, known: Tensor | None, seed: Tensor,
    numbers: tuple[float, tuple[int, ...], int, int], w: int, causal: bool, transposed: bool,
) -> None:  # fmt: skip
    """One launch. known: bytes, which keys are no padding. numbers: sigma, grid, site and path."""
    batch, heads, n = x.shape[:3]
    sigma, grid, site, path = numbers
    key = (*layout(x, out, known), x.get_device(), grid, w, causal, transposed)
    found = _blurs.get(key)
    if found is None:
        found = _plan_blur(x, known, grid, w, causal, transposed)
        remember(_blurs, key, found)
    strides = [0, 0, 0]
    if known is not None:
        strides = [0 if size == 1 else step for size, step in zip(known.shape, known.stride(), strict=True)]
    mask = x if known is None else known
    arguments = (strided(x), strided(out), (mask, *strides), inverse, seed, sigma)
    sizes: tuple[Any, ...] = ((batch * heads * n, heads, n), grid)
    if not grid:
        sizes = (batch * heads * -(-n // RUN.get(w, 4)), n)
    found(is_aligned(x, out, mask, inverse, seed), *arguments, *sizes, site, path)


def _plan_blur(
    x: Tensor, known: Tensor | None, grid: tuple[int, ...], w: int, causal: bool, transposed: bool
) -> Launch:
    from attemper.kernels.keys.kernels import blur_grid_kernel, blur_line_kernel

    batch, heads, n, e = x.shape
    constants: dict[str, Any] = {
        "N": n if is_static(n, n, (e,)) else 0, "E": e, "BE": padded(e), "W": w,
        "REAL": known is not None, "TRANSPOSED": transposed, "num_warps": 4,
    }  # fmt: skip
    block, run, device = _blur_block(e, grid), RUN.get(w, 4), x.get_device()
    if grid:
        return Launch(blur_grid_kernel, -(-batch * heads * n // block), device, **constants, BLOCK=block)
    runs = batch * heads * -(-n // run)
    constants |= {"H": heads, "CAUSAL": causal, "RUN": run, "BLOCK": block}
    return Launch(blur_line_kernel, -(-runs // block), device, **constants)


def _blur(x: Tensor, *told: Any) -> tuple[Tensor, Tensor]:
    x = unit_stride(x)
    out, inverse = _blur_fake(x)
    _launch_blur(x, out, inverse, False, *told)
    return out, inverse


def _blur_fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:3], dtype=torch.float32)


def _blur_backward(dout: Tensor, inverse: Tensor, *told: Any) -> Tensor:
    dout = unit_stride(dout)
    dx = _blur_backward_fake(dout)
    _launch_blur(dout, dx, inverse, True, *told)
    return dx


def _blur_backward_fake(dout: Tensor, *_: object) -> Tensor:
    return token_major(dout, *dout.shape[1:])


def _save_blur(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, seed, ctx.site, ctx.path, ctx.sigma, ctx.w, ctx.causal, real, ctx.grid = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # zeros for the second output would cost a launch
    ctx.save_for_backward(output[1], seed, real)


def _blur_gradients(ctx: Any, dout: Tensor, _: object) -> tuple[Tensor | None, ...]:
    inverse, seed, real = ctx.saved_tensors
    rest = (ctx.site, ctx.path, ctx.sigma, ctx.w, ctx.causal, real, ctx.grid)
    dx: Tensor = torch.ops.attemper.blur_keys_backward(dout, inverse, seed, *rest)
    return (dx, *([None] * 8))


def _save_blur_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, seed, ctx.site, ctx.path, ctx.sigma, ctx.w, ctx.causal, real, ctx.grid = inputs
    ctx.save_for_backward(seed, real)


def _blur_second_gradients(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    seed, real = ctx.saved_tensors  # blur is linear: the gradient of its gradient is blur
    rest = (ctx.site, ctx.path, ctx.sigma, ctx.w, ctx.causal, real, ctx.grid)
    return (torch.ops.attemper.blur_keys(ddx, seed, *rest)[0], *([None] * 9))


class DirectBlur(torch.autograd.Function):
    """The operator in eager mode, without the dispatcher's way to Python and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *told: Any) -> Tensor:
        output = _blur(x, *told)
        seed, ctx.site, ctx.path, ctx.sigma, ctx.w, ctx.causal, real, ctx.grid = told
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], seed, real)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 9
        if not is_plain(dout) or torch.is_grad_enabled():  # second gradients go through the operators
            return _blur_gradients(ctx, dout, None)
        inverse, seed, real = ctx.saved_tensors
        dx = _blur_backward(dout, inverse, seed, ctx.site, ctx.path, ctx.sigma, ctx.w, ctx.causal, real, ctx.grid)
        return (dx, *([None] * 8))


# ------------------------------------------------------------------------------------------------------------ gather
def _draw_order(
    seed: Tensor, batch: int, sets: int, keys: int, count: int, limit: int | None, *numbers: int
) -> tuple[Tensor, Tensor, Tensor]:
    from attemper.kernels.keys.kernels import order_kernel, sort_kernel

    order, rank, kept = _draw_order_fake(seed, batch, sets, keys, count)
    if order.numel():
        arguments = (
            seed, (order, rank, kept.view(torch.uint8)), (sets, keys, count), 0 if limit is None else limit,
            *all_signed(numbers),
        )  # fmt: skip
        with on_device(seed):
            if keys <= SORTED:
                block = padded(keys)
                launch(
                    sort_kernel,
                    (batch * sets,),
                    *arguments,
                    SOMETIMES=limit is not None,
                    BLOCK=block,
                    num_warps=min(16, max(1, block // 128)),
                )
            else:
                launch(
                    order_kernel,
                    (batch * sets * -(-keys // RANKED),),
                    *arguments,
                    SOMETIMES=limit is not None,
                    BLOCK=RANKED,
                    num_warps=4,
                )
    return order, rank, kept


def _draw_order_fake(
    seed: Tensor, batch: int, sets: int, keys: int, count: int, *_: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    order = seed.new_empty((batch, sets, keys), dtype=torch.int64)
    return order, torch.empty_like(order), seed.new_empty((batch, sets, count), dtype=torch.bool)


def _set_strides(order: Tensor) -> tuple[int, int]:
    """Of samples and sets; a set that all heads share is met again and again."""
    return order.stride(0), order.stride(1) if order.shape[1] > 1 else 0


def _take(x: Tensor, order: Tensor, rank: Tensor, count: int) -> Tensor:
    x = unit_stride(x)
    out = _take_fake(x, order, rank, count)
    heads = out.shape[1]
    if out.numel():
        _move("take_kernel", x, out, order, (heads, heads // x.shape[1], count), count)
    return out


def _move(kernel: str, x: Tensor, out: Tensor, places: Tensor, sizes: tuple[int, ...], tokens: int) -> None:
    """Launch a kernel that moves tokens of x to `out`, which has so many; places: (B, sets, N)."""
    key = (kernel, *layout(x, out, places), x.get_device())
    found = _moves.get(key)
    if found is None:
        from attemper.kernels.keys import kernels

        programs, e = out.shape[0] * out.shape[1] * -(-tokens // TOKENS), x.shape[3]
        constants = {"E": e, "BE": padded(e), "BLOCK": TOKENS, "num_warps": 4}
        found = Launch(getattr(kernels, kernel), programs, x.get_device(), **constants)
        remember(_moves, key, found)
    with on_device(x):
        found(is_aligned(x, out, places), strided(x), strided(out), (places, *_set_strides(places)), sizes)


def _take_fake(x: Tensor, order: Tensor, rank: Tensor, count: int) -> Tensor:
    return x.new_empty((x.shape[0], max(x.shape[1], order.shape[1]), count, x.shape[3]))


def _take_backward(dout: Tensor, order: Tensor, rank: Tensor, heads: int) -> Tensor:
    dout = unit_stride(dout)
    dx = _take_backward_fake(dout, order, rank, heads)
    (_, many, count, _), n = dout.shape, rank.shape[2]
    if dx.numel():
        _move("put_back_kernel", dout, dx, rank, (heads, many // heads, n, count), n)
    return dx


def _take_backward_fake(dout: Tensor, order: Tensor, rank: Tensor, heads: int) -> Tensor:
    return token_major(dout, heads, rank.shape[2], dout.shape[3])


def _save_take(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    x, order, rank, _ = inputs
    ctx.heads = x.shape[1]
    ctx.save_for_backward(order, rank)


def _take_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    order, rank = ctx.saved_tensors
    return torch.ops.attemper.take_keys_backward(dout, order, rank, ctx.heads), None, None, None


def _save_take_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    dout, order, rank, _ = inputs
    ctx.count = dout.shape[2]
    ctx.save_for_backward(order, rank)


def _take_second_gradients(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    order, rank = ctx.saved_tensors
    return torch.ops.attemper.take_keys(ddx, order, rank, ctx.count), None, None, None


class DirectTake(torch.autograd.Function):
    """The operator in eager mode, without the dispatcher's way to Python and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rank: Tensor, count: int) -> Tensor:
        _save_take(ctx, (x, order, rank, count), x)
        return _take(x, order, rank, count)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if not is_plain(dout) or torch.is_grad_enabled():  # second gradients go through the operators
            return _take_gradients(ctx, dout)
        order, rank = ctx.saved_tensors
        return _take_backward(dout, order, rank, ctx.heads), None, None, None


for _device in DEVICES:
    torch.library.impl("attemper::blur_keys", _device, _blur)
    torch.library.impl("attemper::blur_keys_backward", _device, _blur_backward)
    torch.library.impl("attemper::draw_order", _device, _draw_order)
    torch.library.impl("attemper::take_keys", _device, _take)
    torch.library.impl("attemper::take_keys_backward", _device, _take_backward)
torch.library.register_fake("attemper::blur_keys", _blur_fake)
torch.library.register_fake("attemper::blur_keys_backward", _blur_backward_fake)
torch.library.register_fake("attemper::draw_order", _draw_order_fake)
torch.library.register_fake("attemper::take_keys", _take_fake)
torch.library.register_fake("attemper::take_keys_backward", _take_backward_fake)
torch.library.register_autograd("attemper::blur_keys", _blur_gradients, setup_context=_save_blur)
torch.library.register_autograd(
    "attemper::blur_keys_backward", _blur_second_gradients, setup_context=_save_blur_backward
)
torch.library.register_autograd("attemper::take_keys", _take_gradients, setup_context=_save_take)
torch.library.register_autograd(
    "attemper::take_keys_backward", _take_second_gradients, setup_context=_save_take_backward
)
