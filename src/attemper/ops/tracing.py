"""What compilers need to know about a function."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """A function that a compiler calls while it traces, and whose result it takes for a constant.

    It is `torch.compiler.assume_constant_result`, which would load the compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function
