"""What torch's functions do with a residual stream: add to it, scale it, leave it, or compute something new."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.ops.announced import KIND


@functools.cache
def kind_of(func: Any) -> str:
    """What a function does with the stream."""
    kind = getattr(func, KIND, "") or kind_of_traced(func)
    name = getattr(func, "__name__", "")
    if kind == "" and name.endswith("_") and not name.endswith("__"):  # every function that changes its first operand
        return "change"
    return kind


def kind_of_traced(func: Any) -> str:
    """The same for a compiler, of which every answer must be traced."""
    if func in ADDITIONS:
        return "add_" if func in IN_PLACE else "add"
    if func in SAME_STREAM:
        return "same"
    if func in FACTORS:
        return "factor"
    if func in CHANGES:
        return "change"
    if func in PRODUCTS:
        return "product"
    return "attention" if is_attention(func) else ""


def is_attention(func: Any) -> bool:
    """Whether a function computes attention, or the softmax inside of it."""
    if isinstance(func, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return "attemper" in str(func) and ("attention" in str(func) or "softmax" in str(func))
    return func in ATTENTION_CALLS


ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
IN_PLACE = (Tensor.add_, Tensor.__iadd__)
FACTORS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__)
CHANGES = (
    Tensor.mul_, Tensor.__imul__, Tensor.sub_, Tensor.__isub__, Tensor.div_, Tensor.__itruediv__, Tensor.copy_,
    Tensor.fill_, Tensor.zero_, Tensor.clamp_, Tensor.relu_, Tensor.masked_fill_, Tensor.addcmul_, Tensor.lerp_,
    Tensor.__setitem__, Tensor.index_add_, Tensor.index_copy_, Tensor.scatter_, Tensor.scatter_add_,
)  # fmt: skip
ATTENTION_CALLS = (
    F.scaled_dot_product_attention, F.multi_head_attention_forward,
    F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax,
)  # fmt: skip
PRODUCTS = (
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.addmm,
    Tensor.addmm, torch.baddbmm, torch.einsum,
)  # fmt: skip
SAME_STREAM = (  # views, casts, and the norm or dropout that a block may put behind the sum
    F.layer_norm, F.rms_norm, F.batch_norm, F.group_norm, F.dropout, torch.clamp, Tensor.clamp,
    Tensor.__getitem__, Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as, Tensor.clone,
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.contiguous, Tensor.transpose, Tensor.permute,
    Tensor.squeeze, Tensor.unsqueeze, torch.clone,
    torch.reshape, torch.flatten, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze,
)  # fmt: skip
