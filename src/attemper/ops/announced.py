"""Functions that torch-function modes see, though they call no operator of torch.

A kernel that is launched directly is no operator, and an autograd function is not shown to modes either. Whoever
follows tensors through a model (`tempering/residual.py`) would lose them there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function

Given = ParamSpec("Given")
Result = TypeVar("Result")
OWN = __name__.partition(".")[0] + "."
KIND = "_attemper_kind"
"""The attribute that says what such a function does with the residual stream (`tempering/functions.py`)."""


def only_followed() -> bool:
    """Whether all torch-function modes of now are this library's own, which leave products of layers as they are."""
    many = torch._C._len_torch_function_stack()
    return all(type(torch._C._get_function_stack_at(n)).__module__.startswith(OWN) for n in range(many))


def announced(kind: Literal["attention", "same"]) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator: show a function to torch-function modes, as torch does with its own.

    >>> from torch.overrides import TorchFunctionMode
    >>> class Seen(TorchFunctionMode):
    ...     def __torch_function__(self, func, types, args=(), kwargs=None):
    ...         return func.__name__, getattr(func, KIND)
    >>> @announced("same")
    ... def as_it_is(x):
    ...     return x
    >>> with Seen():
    ...     as_it_is(1)
    ('as_it_is', 'same')
    """

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def shown(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            if not torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled():
                found: Result = handle_torch_function(shown, (), *args, **kwargs)
                return found
            return function(*args, **kwargs)

        shown.__dict__[KIND] = kind
        return shown

    return decorate
