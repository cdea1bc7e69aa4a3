"""What compilers need to know about a function, and what can be known of a tensor whose numbers are not at hand."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """A function that a compiler calls while it traces, and whose result it takes for a constant.

    It is `torch.compiler.assume_constant_result`, which would load the compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def has_numbers(x: Tensor) -> bool:
    """Whether the numbers in a tensor can be looked at: not while it is traced, and not where it is a shape alone."""
    return not (torch.compiler.is_compiling() or x.is_meta or type(x).__name__ == "FakeTensor")


def all_true(x: Tensor) -> bool:
    """Whether all entries are true, in all samples over which torch.func maps."""
    x = x.all()
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return bool(x.all())
