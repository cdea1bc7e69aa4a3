"""Whether a call is made in plain eager mode, so that kernels can be launched without torch's dispatcher."""

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)


def transformed() -> bool:
    """Whether torch.func is at work: its tensors are wrapped."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_plain(x: Tensor, other: Tensor | None = None) -> bool:
    """Whether nobody but autograd takes part in what is done to a tensor, or to two.

    A compiler, torch.func, forward-mode differentiation, a dispatch mode (one that counts operations, say) and
    subclasses of tensors see operators, and see nothing of a kernel that is launched directly. Nor do gradients of many
    directions at once (`is_grads_batched`), whose tensors have no memory of their own.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and (other is None or type(other) in PLAIN)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._has_storage(x)
    )
