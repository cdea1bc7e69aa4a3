"""Calling functions that have a backward pass of their own."""

from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`, of all its arguments, without what costs a tenth of a millisecond in every call.

    Where a function has a `setup_context`, as torch.func wants it, torch binds its arguments by inspecting the
    signature each time, which takes longer than attention in a small model.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    quick: Any = super(torch.autograd.Function, function)
    return quick.apply(*unwrap_dead_wrappers(arguments))
