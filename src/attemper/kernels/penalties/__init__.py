"""The squares of logits of every head in Triton, for penalties: ‖QKᵀ‖² from Gram matrices that stay on chip.

Queries and keys are read where their projection left them, biases are taken away as they are loaded, and nothing is
written in forward but one number per head. Triton is imported when a kernel first runs.
"""

import torch
from torch import Tensor, nn

from attemper.kernels.common.devices import DTYPES, refuse_device, runs_on
from attemper.kernels.common.eager import is_plain
from attemper.kernels.penalties.logits import logit_squares, widest
from attemper.kernels.penalties.outputs import output_square
from attemper.kernels.penalties.passing import Untouched, squared_linear
from attemper.ops.precision import autocast_dtype

__all__ = ["Untouched", "logit_squares", "output_square", "passes", "reads", "serves", "squared_linear"]


def reads(out: Tensor) -> bool:
    """Whether a kernel can take the squares of a layer's output; torch takes all others, and compiled code its own."""
    return not torch.compiler.is_compiling() and out.dtype in DTYPES and out.numel() > 0 and runs_on(out)


def passes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `squared_linear` can be asked: only autograd follows what it gives, and nobody hooks what it saves."""
    if not (is_plain(x) and (bias is None or type(bias) is nn.Parameter)):
        return False
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return False
    dtype = autocast_dtype(x) or weight.dtype
    if dtype not in DTYPES or x.is_nested or x.numel() == 0 or refuse_device(x.device) is not None:
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def serves(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether the kernels can take such queries and keys, (B, N, H · e); torch takes all others."""
    return (
        q.dtype in DTYPES
        and k.dtype == q.dtype
        and q.shape[-1] == k.shape[-1]  # every head has its own keys
        and q.shape[-1] // heads <= widest(q.dtype)
        and runs_on(q)
    )
