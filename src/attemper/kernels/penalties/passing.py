"""A layer's output, passed on, and the square of it: what a penalty adds to a gradient is added as that comes by.

An operator that takes the output of a layer beside the model has to keep a copy, and autograd to add its gradient to
the model's: launches and sweeps more in each direction. Here the output goes through the function to the model, and
its backward pass adds to the model's gradient in the sweep that makes its own.

The bias of the layer goes through it, too, since it is not penalised: what its layer would make of a gradient with a
penalty in it would have to be taken away again. So the layer adds its values alone, and its gradient, the sums of the
columns of the model's, comes out of the same sweep.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import UnmetError
from attemper.kernels.common.devices import DTYPES
from attemper.kernels.common.direct import Launch, is_aligned, memory, remember
from attemper.kernels.common.launch import is_here, on_device
from attemper.kernels.penalties.outputs import ROWS, TILE
from attemper.ops.announced import announced, only_followed

__all__ = ["Untouched", "bias_gradient", "passed_square", "squared_linear"]

NO_SUMS, OF_MODEL, OF_PENALTY = 0, 1, 2
"""What the bias gets: nothing, the sums of the model's gradient, or those of the penalty's, taken away."""
_launches: dict[Any, "Launches"] = memory()
_biases: dict[Any, Launch] = memory()


class Untouched:
    """Whether a model leaves the output of a layer as it is, as its last backward pass has seen."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known = False


def squared_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, factor: float, untouched: Untouched
) -> tuple[Tensor, Tensor] | None:
    """`F.linear` of these, and numbers whose sum is factor · ‖xWᵀ‖²: see `passed_square`.

    None: a torch-function mode, which sees the product, has made something of it that no kernel takes.
    """
    apart = bias is not None and (not torch._C._is_torch_function_mode_enabled() or only_followed())
    out = F.linear(x, weight, bias.detach() if apart and bias is not None else bias)
    if type(out) is not Tensor or out.dtype not in DTYPES:
        return None
    return passed_square(out, bias, apart, factor, untouched)


@announced("same")
def passed_square(
    out: Tensor, bias: Tensor | None, apart: bool, factor: float, untouched: Untouched
) -> tuple[Tensor, Tensor]:
    """The output, and numbers in float32 whose sum is factor · ‖out − b‖²: out (…, columns), bias (columns,).

    Only where nobody but autograd takes part (`common/eager.py`), and nobody hooks what it saves.
    apart: whether the layer has added values of the bias that autograd does not see. Then it gets its gradient here;
        otherwise what is too much in the one that the layer will give it is taken away here.
    untouched: as long as it does not know, a copy is kept, since activations may overwrite what they get.
    """
    passed, terms = PassedSquare.apply(out, bias, apart, factor, untouched)
    return passed, terms


class Launches(NamedTuple):
    """All that is launched for outputs of one layout. Its functions are few and long: they run for every layer.

    alone: the backward kernel where the model makes no use of the output. columns: adds up what either gives for the
        bias; None: it gets nothing.
    squares: the shape of what the forward kernel gives. blocks: that of what the backward kernels give for the bias.
    """

    forward: Launch
    backward: Launch
    alone: Launch
    columns: Launch | None
    squares: tuple[int]
    blocks: tuple[int, int]
    rows: int
    cols: int


class PassedSquare(torch.autograd.Function):
    """`passed_square`. What is kept differs from pass to pass, what is computed from it does not."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, bias: Tensor | None, apart: bool, factor: float, untouched: Untouched
    ) -> tuple[Tensor, Tensor]:
        rows = out if out.is_contiguous() else out.contiguous()
        of_bias = rows if bias is None else bias if bias.is_contiguous() else bias.contiguous()
        sums = NO_SUMS if not ctx.needs_input_grad[1] else OF_MODEL if apart else OF_PENALTY
        key = (out.shape, out.dtype, None if bias is None else bias.dtype, out.device, sums)
        found = _launches.get(key)
        if found is None:
            found = _plan(out, bias is not None, sums)
            remember(_launches, key, found)
        terms = torch.empty(found.squares, dtype=torch.float32, device=out.device)
        aligned = (rows.data_ptr() | of_bias.data_ptr()) & 15 == 0
        given = (aligned, rows, of_bias, terms, terms, found.cols, found.rows, found.cols, factor)
        if is_here(out):
            found.forward(*given)
        else:
            with on_device(out):
                found.forward(*given)
        # The same memory, but no view of the input: the model may write into it, which its version tells.
        passed = out.data
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.untouched, ctx.apart, ctx.launches = 2 * factor, untouched, apart, found
        if untouched.known:
            ctx.save_for_backward(passed, bias)
            return passed, terms
        ctx.save_for_backward(out, bias)
        ctx.copy, ctx.seen = out.clone(), passed.detach()  # which shares the version of what it is detached from
        ctx.version = ctx.seen._version
        return passed, terms

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dterms: Tensor | None) -> tuple[Tensor | None, ...]:
        out, bias = _kept(ctx)
        if dterms is None or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0:
            return *_by_torch(ctx, out, bias, dout, dterms), None, None, None
        if is_here(out):
            return *_gradients(ctx.launches, out, bias, dout, dterms, ctx.factor), None, None, None
        with on_device(out):
            return *_gradients(ctx.launches, out, bias, dout, dterms, ctx.factor), None, None, None


def _by_torch(
    ctx: Any, out: Tensor, bias: Tensor | None, dout: Tensor | None, dterms: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the output and of the bias, of operations that can be differentiated again."""
    added = None
    if dterms is not None:
        added = ctx.factor * dterms.mean() * (out.float() if bias is None else out.float() - bias)
    dbias = None
    if bias is not None and ctx.needs_input_grad[1]:
        parts = dout if ctx.apart else None if added is None else -added
        dbias = torch.zeros_like(bias) if parts is None else parts.flatten(0, -2).sum(0, dtype=torch.float32)
        dbias = dbias.to(bias.dtype)
    if added is None:
        return dout, dbias
    return (added if dout is None else added + dout).to(out.dtype), dbias


def _gradients(
    found: Launches, out: Tensor, bias: Tensor | None, dout: Tensor | None, dterms: Tensor, factor: float
) -> tuple[Tensor, Tensor | None]:
    """What the output gets, in one launch; and its bias, if it is to get something, in one more."""
    rows = out if out.is_contiguous() else out.contiguous()
    of_bias = rows if bias is None else bias if bias.is_contiguous() else bias.contiguous()
    grad = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    more = rows if dout is None else dout if dout.is_contiguous() else dout.contiguous()
    sums = grad if found.columns is None else torch.empty(found.blocks, dtype=torch.float32, device=out.device)
    aligned = (rows.data_ptr() | of_bias.data_ptr() | more.data_ptr() | dterms.data_ptr()) & 15 == 0
    main = found.alone if dout is None else found.backward
    main(aligned, rows, of_bias, more, dterms, grad, sums, found.rows, found.cols, factor)
    if found.columns is None:
        return grad, None
    dbias = torch.empty(found.cols, dtype=of_bias.dtype, device=out.device)
    found.columns(True, sums, dbias, found.blocks[0], found.cols)
    return grad, dbias


def _plan(out: Tensor, bias: bool, sums: int) -> Launches:
    from attemper.kernels.penalties.kernels import square_kernel
    from attemper.kernels.penalties.passing_kernels import columns_kernel, passed_kernel

    cols, device = out.shape[-1], out.get_device()
    rows = out.numel() // cols
    blocks, across = -(-rows // ROWS), -(-cols // TILE["BN"])
    grid, shared = (blocks, across), {"BIAS": bias, "PER": ROWS, **TILE, "num_warps": 8}
    return Launches(
        Launch(square_kernel, grid, device, SUMS=False, **shared),
        Launch(passed_kernel, grid, device, ADD=True, SUMS=sums, **shared),
        Launch(passed_kernel, grid, device, ADD=False, SUMS=sums, **shared),
        Launch(columns_kernel, -(-cols // 16), device, BM=128, BN=16, num_warps=4) if sums else None,
        (blocks * across,), (blocks, cols), rows, cols,
    )  # fmt: skip


def _kept(ctx: Any) -> tuple[Tensor, Tensor | None]:
    """The output as it was, and the bias, as constant as it was in there."""
    try:
        out, bias = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error) or not ctx.untouched.known:
            raise
        raise UnmetError(
            "the model overwrote the output of a layer that has a penalty, and in passes before it did not: what the "
            "penalty's gradient needs is gone. Use activations that do not work in place."
        ) from error
    seen = getattr(ctx, "seen", None)
    if seen is None:
        return out, bias
    ctx.untouched.known = seen._version == ctx.version
    if not torch.is_grad_enabled():
        return ctx.copy, bias
    # The output depends on the bias as autograd knows: where the layer keeps it apart, what is saved of it must not.
    return Valued.apply(out, ctx.copy), bias.detach() if ctx.apart and bias is not None else bias


class Valued(torch.autograd.Function):
    """Values of the second argument, whose gradients are those of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def bias_gradient(
    factors: Tensor, scales: tuple[float, float], values: Tensor | None, logits: Tensor | None, bias: Tensor
) -> Tensor:
    """What the bias (3 · H · e) of Q, K and V together gets, in one launch.

    It is not penalised: what its layer's backward pass is going to add for it is taken away here.
    factors, scales: each square's gradient is multiplied with both of its own; that of V has the first.
    values, logits: what it is then multiplied with; of V (blocks, H · e), which are added up first, and of Q and K.
    """
    grad = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    third = bias.shape[0] // 3
    blocks = 0 if values is None else values.shape[0]
    key = (third, blocks, bias.dtype, bias.get_device(), logits is None)
    found = _biases.get(key)
    if found is None:
        from attemper.kernels.penalties.passing_kernels import bias_kernel

        constants = {"VALUES": values is not None, "LOGITS": logits is not None, "BM": 32, "BN": 64}
        found = Launch(bias_kernel, -(-3 * third // 64), bias.get_device(), **constants, num_warps=4)
        remember(_biases, key, found)
    values, logits = factors if values is None else values, factors if logits is None else logits
    with on_device(bias):
        aligned = is_aligned(factors, values, logits)
        found(aligned, factors, values, logits, grad, blocks, third, *scales)
    return grad
