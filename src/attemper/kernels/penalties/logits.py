"""The kernels as torch library operators, with shapes for the compiler and gradients for autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.common.flops import counted_by, grams_flops
from attemper.kernels.common.launch import DEVICES, launch, on_device, precision
from attemper.kernels.common.plans import padded

torch.library.define(
    "attemper::logit_squares", "(Tensor q, Tensor k, Tensor? q_bias, Tensor? k_bias, SymInt heads) -> Tensor"
)
torch.library.define(
    "attemper::logit_squares_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor? q_bias, Tensor? k_bias) -> (Tensor, Tensor, Tensor)",
)


def logit_squares(q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None, heads: int) -> Tensor:
    """‖(Q − b_q)(K − b_k)ᵀ‖² of every sample and head, (B, H) in float32.

    q: (B, Nq, H · e), k: (B, Nk, H · e), with any strides; biases: (H · e,), None: there is none.
    """
    squares: Tensor = torch.ops.attemper.logit_squares(q, k, q_bias, k_bias, heads)
    return squares


def widest(dtype: torch.dtype) -> int:
    """The widest head whose Gram matrices a program can hold."""
    return 64 if dtype == torch.float32 else 128


def _tiles(e: int, dtype: torch.dtype, backward: bool = False, both: bool = False) -> dict[str, int]:
    """How many tokens a program reads at once, its warps and stages. both: Q and K in one loop.

    In half precision up to width 64 the fastest of a dozen or more on an H200; otherwise as many as spill no registers
    there.
    """
    if dtype == torch.float32:
        return {"BN": 32, "num_warps": 4, "num_stages": 2}
    if e > 64:
        return {"BN": 32 if both else 64, "num_warps": 8, "num_stages": 3}
    return {"BN": 32, "num_warps": 2 if backward else 4, "num_stages": 4 if both else 3}


def _side_by_side(x: Tensor) -> Tensor:
    """x (B, N, H · e), copied only if the elements of a token do not lie side by side."""
    return x.contiguous() if x.stride(2) != 1 and x.shape[2] > 1 else x


def _strided(x: Tensor) -> tuple[Any, ...]:
    """A tensor (B, N, H · e) as kernels take it: its elements, and its strides along samples and tokens."""
    return (x, *x.stride()[:2])


def _biases(q_bias: Tensor | None, k_bias: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Biases as kernels take them. like: what to point at where there is none."""
    return like if q_bias is None else q_bias.contiguous(), like if k_bias is None else k_bias.contiguous()


def _forward(q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None, heads: int) -> Tensor:
    from attemper.kernels.penalties.kernels import forward_kernel

    q, k = _side_by_side(q), _side_by_side(k)
    out = _forward_fake(q, k, q_bias, k_bias, heads)
    e = q.shape[2] // heads
    if out.numel():
        with on_device(q):
            launch(forward_kernel, (out.numel(),),
                _strided(q), _strided(k), _biases(q_bias, k_bias, q), out, (heads, q.shape[1], k.shape[1]),
                Q_BIAS=q_bias is not None, K_BIAS=k_bias is not None, E=e, BE=padded(e), PRECISION=precision(),
                **_tiles(e, q.dtype),
            )  # fmt: skip
    return out


def squares_and_grams(qkv: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For the Q and K of one projection: their `logit_squares`, and what their gradients need, of Q − b_q and K − b_k.

    qkv: (B, N, 3 · H · e), each token's elements side by side; bias: (3 · H · e,), None: there is none.
    Gives (B, H) squares; (B, H, 2, e, e) KᵀK and QᵀQ in the dtype of qkv; (B, 2 · H · e) Σ Q·KᵀK and Σ K·QᵀQ over
    tokens; and in the same way, where there is a bias, b_q·KᵀK and b_k·QᵀQ.
    """
    from attemper.kernels.penalties.kernels import grams_kernel

    batch, tokens, width = qkv.shape
    third = width // 3
    e = third // heads
    squares = qkv.new_empty((batch, heads), dtype=torch.float32)
    grams = qkv.new_empty((batch, heads, 2, e, e))
    sums = qkv.new_empty((batch, 2 * third), dtype=torch.float32)
    shifts = qkv.new_empty((batch, 0 if bias is None else 2 * third), dtype=torch.float32)
    q_bias, k_bias, _ = (qkv, qkv, qkv) if bias is None else bias.contiguous().chunk(3)
    if squares.numel():
        with on_device(qkv):
            launch(grams_kernel, (squares.numel(),),
                (qkv, qkv[..., third:], *qkv.stride()[:2]), (q_bias, k_bias), (squares, grams, sums, shifts),
                (heads, tokens),
                BIAS=bias is not None, E=e, BE=padded(e), PRECISION=precision(),
                **_tiles(e, qkv.dtype, both=True),
            )  # fmt: skip
    return squares, grams, sums, shifts


def _forward_fake(q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None, heads: int) -> Tensor:
    return q.new_empty((q.shape[0], heads), dtype=torch.float32)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from attemper.kernels.penalties.kernels import backward_kernel

    q, k = _side_by_side(q), _side_by_side(k)
    dq, dk, sums = _backward_fake(grad, q, k, q_bias, k_bias)
    heads = grad.shape[1]
    e = q.shape[2] // heads
    if grad.numel():
        with on_device(q):
            launch(backward_kernel, (2 * grad.numel(),),
                (grad, *grad.stride()), _strided(q), _strided(k), _strided(dq), _strided(dk),
                _biases(q_bias, k_bias, q), sums, (heads, q.shape[1], k.shape[1]),
                Q_BIAS=q_bias is not None, K_BIAS=k_bias is not None,
                SUMS=sums.numel() > 0, SCALED=q.dtype == torch.float16, E=e, BE=padded(e), PRECISION=precision(),
                **_tiles(e, q.dtype, backward=True),
            )  # fmt: skip
    return dq, dk, sums


def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ and dK, and the sums of their columns in every sample, (B, 2, H · e); empty where there is no bias."""
    width = 0 if q_bias is None and k_bias is None else q.shape[2]
    return q.new_empty(q.shape), k.new_empty(k.shape), q.new_empty((q.shape[0], 2, width), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, int], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, q_bias, k_bias = ctx.saved_tensors
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # second gradients go through torch
    backward = _backward_by_torch if again else torch.ops.attemper.logit_squares_backward
    dq, dk, sums = backward(grad, q, k, q_bias, k_bias)
    if q_bias is None and k_bias is None:
        return dq, dk, None, None, None
    of_biases = -sums.sum(0)  # in all samples, and with the sign that a bias is taken away with
    dq_bias = None if q_bias is None else of_biases[0].to(q_bias.dtype)
    dk_bias = None if k_bias is None else of_biases[1].to(k_bias.dtype)
    return dq, dk, dq_bias, dk_bias, None


def _backward_by_torch(
    grad: Tensor, q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`_backward` in float32, of operations that can be differentiated again."""
    with torch.autocast(q.device.type, enabled=False):
        left, right = (
            (x.float() if bias is None else x.float() - bias).unflatten(-1, (grad.shape[1], -1)).transpose(1, 2)
            for x, bias in ((q, q_bias), (k, k_bias))
        )
        scale = 2 * grad[..., None, None]
        dq = (scale * left @ (right.mT @ right)).transpose(1, 2).flatten(2)
        dk = (scale * right @ (left.mT @ left)).transpose(1, 2).flatten(2)
    return dq.to(q.dtype), dk.to(k.dtype), torch.stack((dq.sum(1), dk.sum(1)), 1)


def _no_gradients(ctx: Any, *_: object) -> None:
    raise NotImplementedError("the gradients of compiled logit squares cannot be differentiated again")


for _device in DEVICES:
    torch.library.impl("attemper::logit_squares", _device, _forward)
    torch.library.impl("attemper::logit_squares_backward", _device, _backward)
torch.library.register_fake("attemper::logit_squares", _forward_fake)
torch.library.register_fake("attemper::logit_squares_backward", _backward_fake)
torch.library.register_autograd("attemper::logit_squares", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::logit_squares_backward", _no_gradients)


def _flops(q: Sequence[int], k: Sequence[int], q_bias: Any, k_bias: Any, heads: int, **_: object) -> int:
    """QᵀQ and KᵀK."""
    return grams_flops(q[0] * (q[1] + k[1]), heads, q[2] // heads)


def _backward_flops(grad: Sequence[int], q: Sequence[int], k: Sequence[int], *_: object, **__: object) -> int:
    """Both once more, and Q and K times them."""
    return 2 * _flops(q, k, None, None, grad[1])


counted_by(torch.ops.attemper.logit_squares, _flops)
counted_by(torch.ops.attemper.logit_squares_backward, _backward_flops)
