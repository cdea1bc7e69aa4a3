"""Which implementation `impl="auto"` asks first: one small table, from what was measured.

Each class of calls has an order of implementations, the fastest first; the first that can serve a call does. The
figures are ratios to the fastest of torch's own kernels without dropout, forward and backward in bfloat16 on an H200
(benchmarks/results/ops-h200.json, ops-long-h200.json, ops-longest-h200.json). `benchmarks/calls.py` times causal,
grouped, padded and biased calls, and says where another order would be faster: at 1024 causal tokens ours took 1.60.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.ops.call import Call
from attemper.ops.outside_softmax import is_outside
from attemper.ops.precision import autocast_dtype

SHORT = 1024  # tokens; there ours and torch's are even, at 4096 torch's is ahead by 3 %
LONG = 1024  # tokens; below, the time that FlashAttention-4's launch takes on the host is felt
VERY_LONG = 2048  # tokens; at 1024 our backward kernel is faster with hard masking
NARROW = 64  # head width; at 128 torch's kernels are ahead


@dataclass(frozen=True)
class Preference:
    """A class of calls and the order in which implementations are asked to serve one."""

    calls: str
    holds: Callable[[Call], bool]
    order: tuple[str, ...]
    because: str
    """Why the first of them comes first."""


def _shares_keys(call: Call) -> bool:
    return any(method.shared_count(call.k.shape[2]) is not None for method in call.methods)


def _stays_outside(call: Call) -> bool:
    return all(is_outside(method) for method in call.methods)


def _gains_early(call: Call) -> bool:
    return all(method.largest_drop(call.k.shape[2]) is None for method in call.methods)


def is_half(x: Tensor) -> bool:
    """Whether products with a tensor are made in half precision on a GPU."""
    return x.device.type == "cuda" and (autocast_dtype(x) is not None or x.dtype in (torch.bfloat16, torch.float16))


def is_short(call: Call) -> bool:
    """Whether our kernel beats torch's on a call without methods: short rows in half precision on a GPU."""
    tokens, width = max(call.shape[2:]), max(call.q.shape[-1], call.v.shape[-1])
    return is_half(call.q) and tokens <= SHORT and width <= NARROW


def _is_long(call: Call, tokens: int) -> bool:
    return is_half(call.q) and min(call.shape[2:]) >= tokens


TABLE = (
    Preference(
        "without methods",
        lambda call: len(call.methods) == 0,
        ("sdpa", "triton", "reference"),
        "a call without methods is torch's own, bit for bit",
    ),
    Preference(
        "keys that all queries share",
        _shares_keys,
        ("gather", "reference"),
        "dropped keys are never multiplied, so it does less than attention without methods",
    ),
    Preference(
        "methods outside of softmax, short rows in half precision on a GPU",
        lambda call: _stays_outside(call) and is_short(call) and not _is_long(call, LONG),
        ("triton", "sdpa", "reference"),
        "it takes 0.44 (65 tokens), 0.81 (197) and 0.86 (577) times as long as torch's fastest kernel (H200)",
    ),
    Preference(
        "methods outside of softmax, rows between short and long in half precision on a GPU",
        lambda call: _stays_outside(call) and is_short(call),
        ("fa4", "triton", "sdpa", "reference"),
        "FlashAttention-4 takes 0.89 times as long as torch's fastest kernel at 1024 tokens, our own 1.01 (H200)",
    ),
    Preference(
        "methods outside of softmax, long rows in half precision on a GPU",
        lambda call: _stays_outside(call) and _is_long(call, LONG),
        ("fa4", "sdpa", "triton", "reference"),
        "FlashAttention-4 takes 0.83 to 0.90 times as long as torch's fastest kernel from 4096 tokens on (H200)",
    ),
    Preference(
        "methods outside of softmax",
        _stays_outside,
        ("sdpa", "triton", "reference"),
        "the methods stay outside of softmax, and torch's kernels are the fastest for this device, dtype and length",
    ),
    Preference(
        "methods inside of softmax on a CPU",
        lambda call: call.q.device.type == "cpu",
        ("tiled", "reference"),
        "with DropKey it takes 1.05 to 1.2 times as long as torch's kernel without, the reference 1.4 to 1.6 (x86)",
    ),
    Preference(
        "methods inside of softmax, long rows in half precision on a GPU",
        lambda call: _is_long(call, LONG) and (_is_long(call, VERY_LONG) or _gains_early(call)),
        ("fa4", "triton", "reference"),
        "with DropKey it takes 0.97 times as long as torch's fastest kernel without, our own 1.21 (H200, 4096 tokens)",
    ),
    Preference(
        "methods inside of softmax",
        lambda call: True,
        ("triton", "reference"),
        "it drops inside of the kernel and stores no logits",
    ),
)
"""The first class that holds is the call's."""


def preference(call: Call) -> Preference:
    """The row of the table that this call belongs to."""
    return next(row for row in TABLE if row.holds(call))
