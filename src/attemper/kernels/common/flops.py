"""How many floating-point operations our operators do, for torch's `FlopCounterMode`.

Counted as torch counts its own fused attention: a product and its addition are two; backward computes the logits once
more; what a causal mask would save is not taken off. Elementwise work, such as masks, softmax and blur, is not counted.
Shapes are those of the operators' arguments.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

Shape = Sequence[int]
COUNTER = "torch.utils.flop_counter"
WAITING: dict[Any, Callable[..., int]] = {}
"""Formulas that torch has not been told yet."""


def counted_by(operator: Any, formula: Callable[..., int]) -> None:
    """Tell torch's counter how many operations an operator does.

    If the counter is not loaded yet, it is told when a kernel is launched first: loading it loads Triton, too.

    operator: such as torch.ops.attemper.fused_attention. formula: of its arguments, with shapes in place of tensors.
    """

    def count(*arguments: Any, out_shape: Any = None, **named: Any) -> int:
        return formula(*arguments, **named)

    WAITING[operator] = count
    if COUNTER in sys.modules:
        tell_counter()


def tell_counter() -> None:
    """Tell torch's counter all formulas that it has not been told yet."""
    if WAITING:
        from torch.utils.flop_counter import register_flop_formula

        while WAITING:
            operator, formula = WAITING.popitem()
            register_flop_formula(operator)(formula)


def attention_flops(q: Shape, k: Shape, v: Shape, *_: object, **__: object) -> int:
    """QKᵀ and PV: q (B, H, Nq, e), k (B, H or fewer, Nk, e), v (B, …, Nk, e_v)."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def attention_backward_flops(dout: Shape, q: Shape, k: Shape, v: Shape, *_: object, **__: object) -> int:
    """QKᵀ once more, the gradients of P and of V, and those of Q and of K."""
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


def logits_flops(q: Shape, k: Shape, *_: object, **__: object) -> int:
    """QKᵀ alone."""
    return 2 * math.prod(q[:3]) * k[2] * q[3]


def part(qkv: Shape, heads: int) -> tuple[int, int, int, int]:
    """The shape (B, H, N, e) of the queries, keys or values in qkv (B, N, 3 · H · e)."""
    return qkv[0], heads, qkv[1], qkv[2] // (3 * heads)


def packed_flops(qkv: Shape, heads: int, *_: object, **__: object) -> int:
    """Attention of the parts of qkv."""
    return attention_flops(*[part(qkv, heads)] * 3)


def packed_backward_flops(dout: Shape, qkv: Shape, heads: int, *_: object, **__: object) -> int:
    """Its gradients."""
    return attention_backward_flops(dout, *[part(qkv, heads)] * 3)


def document_flops(q: Shape, k: Shape, v: Shape, offsets: Shape, *_: object, **__: object) -> int:
    """Attention of packed documents, as if all had the same length: shapes do not tell."""
    return attention_flops(q, k, v) // (offsets[0] - 1)


def document_backward_flops(
    dout: Shape, q: Shape, k: Shape, v: Shape, out: Shape, stats: Shape, flags: Shape, offsets: Shape, *_: object,
    **__: object,
) -> int:  # fmt: skip
    """Its gradients."""
    return attention_backward_flops(dout, q, k, v) // (offsets[0] - 1)


def grams_flops(tokens: int, heads: int, e: int) -> int:
    """XᵀX of every head, of so many tokens in all; as many to multiply X with it."""
    return 2 * tokens * heads * e * e
