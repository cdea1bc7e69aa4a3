"""Calls that name their operands, such as `torch.matmul(input=q, other=k)`: brought into the order of the others."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.tempering.axes import RESHAPES, SOFTMAX
from attemper.tempering.functions import ADDITIONS, FACTORS, PRODUCTS, SAME_STREAM
from attemper.tempering.products import ADDED, MATMUL
from attemper.tempering.roots import STRIDED

NAMES = (
    ((*PRODUCTS, *MATMUL, *ADDED), ("input", "weight", "bias", "mat1", "batch1", "other", "mat2", "batch2")),
    ((F.scaled_dot_product_attention, F.multi_head_attention_forward), ("query", "key", "value")),
    (SOFTMAX, ("input", "dim")),
    ((*ADDITIONS, *FACTORS, torch.sub, Tensor.sub, torch.true_divide, Tensor.true_divide), ("input", "other")),
    ((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), ("input", "mask", "value")),
    ((torch.where, Tensor.where), ("condition", "input", "other")),
    ((torch.cat, torch.concat, torch.concatenate, torch.stack), ("tensors", "dim")),
    ((*SAME_STREAM, *RESHAPES, *STRIDED, torch.exp, torch.exp2), ("input", "tensor")),
)
"""What functions that are followed call their first operands, in order. Whatever else a call names stays named."""


def in_order(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call of a torch function, operands in front.

    >>> x, y = torch.ones(1), torch.zeros(1)
    >>> in_order(torch.add, (), {"other": y, "alpha": 2, "input": x}) == ((x, y), {"alpha": 2})
    True
    """
    if not kwargs:
        return args, {}
    names = _names_traced(func) if torch.compiler.is_compiling() else _names(func)
    operands = [kwargs[name] for name in names if name in kwargs]
    if not operands:
        return args, kwargs
    return (*args, *operands), {name: value for name, value in kwargs.items() if name not in names}


@functools.cache
def _names(func: Any) -> tuple[str, ...]:
    return _names_traced(func)


def _names_traced(func: Any) -> tuple[str, ...]:
    """The same for a compiler, of which every answer must be traced."""
    for functions, names in NAMES:
        if func in functions:
            return names
    return ()


def input_in_front(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a layer that takes one tensor, which comes first.

    >>> input_in_front((), {"input": torch.ones(1)})
    ((tensor([1.]),), {})
    """
    name = None if args else next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    if name is None:
        return args, kwargs
    return (kwargs[name],), {other: value for other, value in kwargs.items() if other != name}
