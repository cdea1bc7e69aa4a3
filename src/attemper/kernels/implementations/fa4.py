"""FlashAttention-4 with keys dropped inside, for long sequences on Hopper and Blackwell: the masks of `keep_mask`.

Inside of softmax it serves one method that drops keys independently (DropKey), or on Hopper one that drops the largest
logits of a row (HardMask), and beside it any that stay outside (Blur, DropHead). Causal attention it serves with
DropKey, other masks it does not. The package `flash-attn-4` compiles a kernel, for some seconds, when it first meets a
dtype, a head width or a kind of call; rates, lengths and seeds compile nothing.
"""

import importlib.metadata

import torch
from torch import Tensor

from attemper.kernels.attention.arguments import prepared
from attemper.kernels.fa4.mixed import mixed_attention
from attemper.kernels.fa4.operators import fa4_attention, is_hopper
from attemper.kernels.fa4.tables import LARGEST_RATE, call_words
from attemper.ops.call import Call, refuse_documents
from attemper.ops.outside_softmax import is_outside, perturbed_heads, perturbed_keys, refuse_keys
from attemper.ops.perturbation import Perturbation, draw
from attemper.ops.stream import live_threshold

DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (32, 64, 96, 128)  # at 8 and at 80 the backward kernel gets dQ wrong; others were not checked
ARCHITECTURES = (9, 10, 11)  # Hopper and Blackwell; Blackwell for desktops, 12, has no score_mod in the backward pass
NARROW = 64  # head width; at 128 its forward kernel is faster than ours
VERSION = "4.0.0b36"
"""The one whose kernels are called by their inner functions, which change from version to version."""


def _installed() -> str | None:
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None


INSTALLED = _installed()


def refuse(call: Call) -> str | None:
    """Why FlashAttention-4 cannot serve this call, or None."""
    refused = refuse_documents(call) or _refuse_device(call) or _refuse_methods(call)
    return refused or _refuse_tensors(call) or refuse_keys(call)


def _refuse_device(call: Call) -> str | None:
    device = call.q.device
    if device.type != "cuda" or torch.version.hip is not None:
        where = device.type if torch.version.hip is None else "an AMD GPU"
        return f"needs a Hopper or Blackwell GPU, and the tensors are on {where}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in ARCHITECTURES:
        return f"needs a Hopper or Blackwell GPU (compute capability 9 to 11), and this one has {capability[0]}"
    if INSTALLED is None:
        return "flash-attn-4 is not installed (pip install 'attemper[fa4]')"
    if INSTALLED != VERSION:
        return f"needs flash-attn-4 {VERSION}, and {INSTALLED} is installed (pip install 'attemper[fa4]')"
    return None


def _refuse_methods(call: Call) -> str | None:
    inside = [method for method in call.methods if not is_outside(method)]
    for method in inside:
        if method.independent_drop is None and not _hits(call, method):
            return (
                "knows only methods that drop every key independently, such as DropKey(0.1), or the largest logits, "
                f"such as HardMask(0.1), inside of softmax, not {method}"
            )
    if inside and call.is_partial:
        return "leaves rows undropped that lose all keys; those of a part of the keys (at.key, at.keys) must lose them"
    if len(inside) > 1:
        return f"takes one method inside of softmax, and this call has {len(inside)}"
    rate = inside[0].independent_drop if inside else None
    if rate is not None and rate > LARGEST_RATE:
        return f"drops at most half of all keys, not {rate}: a row that would lose all of them could not be spared"
    if inside and rate is None:
        return _refuse_hits(call)
    return None


def _hits(call: Call, method: Perturbation) -> bool:
    return method.largest_drop(call.k.shape[2]) is not None


def _refuse_hits(call: Call) -> str | None:
    if not is_hopper(call.q.device):
        return "masks the largest logits on Hopper GPUs only"
    if call.is_causal or call.scale <= 0:
        return "masks the largest logits only where attention is not causal and its scale is positive"
    return None


def _refuse_tensors(call: Call) -> str | None:
    if 0 in call.shape:
        return "has nothing to compute: there are no samples, or no queries"
    dtype = _dtype(call)
    if dtype not in DTYPES:
        return f"computes in float16 and bfloat16, not in {dtype}"
    widths = call.q.shape[-1], call.v.shape[-1]
    if widths[0] != widths[1]:
        return f"needs keys and values of one head width, not {widths[0]} and {widths[1]}"
    if widths[0] not in WIDTHS:
        return f"needs heads of width {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}, not {widths[0]}"
    if call.attn_mask is not None:
        return "takes no attn_mask; is_causal it takes"
    if call.is_causal and call.shape[2] != call.shape[3]:
        return f"is causal for as many queries as keys only, not for {call.shape[2]} queries and {call.shape[3]} keys"
    if call.is_causal and call.at.query != call.at.key:
        return "is causal where queries and keys begin at the same place only (at.query, at.key)"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "takes no part in the transforms of torch.func"
    return None


def _dtype(call: Call) -> torch.dtype:
    """What it computes in: under autocast in autocast's dtype, as torch's own kernels do."""
    kind = call.q.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else call.q.dtype


def attention(call: Call) -> Tensor:
    """softmax(scale · QKᵀ, keys dropped) V, (B, H, Nq, e_v)."""
    if _mixes(call):
        q, k, v, (_, table, scale, _, _, *hard, _), outside = prepared(call)
        return perturbed_heads(mixed_attention(q, k, v, table, scale, *hard), outside)
    drawn = draw(call.methods, call.source, call.q)
    outside = [(method, stream) for method, stream in drawn if is_outside(method)]
    dtype, words = _dtype(call), None
    q, k, v = call.q.to(dtype), perturbed_keys(call, outside).to(dtype), call.v.to(dtype)
    for method, stream in drawn:
        rate = method.independent_drop
        if rate is not None:
            limit = live_threshold(rate, q.device)
            words = call_words(stream, limit, call.shape, call.is_causal)
    return perturbed_heads(fa4_attention(q, k, v, words, call.scale, call.is_causal), outside)


def _mixes(call: Call) -> bool:
    """Whether our forward kernel comes before FlashAttention-4's backward kernel.

    Always for hard masking, and for dropped keys where ours is the faster one.
    """
    if any(_hits(call, method) for method in call.methods):
        return True
    drops = any(method.independent_drop is not None for method in call.methods)
    fast = call.q.shape[-1] <= NARROW and _dtype(call) == torch.bfloat16 and is_hopper(call.q.device)
    return drops and fast and not call.is_causal
