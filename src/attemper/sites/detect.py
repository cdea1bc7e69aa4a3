"""Telling by a class's own code whether, and how, it computes attention."""

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from attemper.sites.adapted import inner, is_linear, is_transposed, widths
from attemper.sites.base import Projection, Projections, Slot, original_class

FUSED = {"scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS"}
DEPTH = 3  # forward → a method or helper → its helper

PACKED = ("qkv", "to_qkv", "in_proj", "query_key_value", "c_attn", "Wqkv")
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("projection_query", "projection_key", "projection_value"),
    ("project_q", "project_k", "project_v"),
    ("linear_q", "linear_k", "linear_v"),
    ("q_head", "k_head", "v_head"),
    ("Wq", "Wk", "Wv"),
)
SHARED_KV = (("q", "kv"), ("to_q", "to_kv"), ("q_proj", "kv_proj"), ("query", "key_value"))
SHARED_QK = (("qk", "v"), ("to_qk", "to_v"), ("qk_proj", "v_proj"))
OUT = (
    *("proj", "out_proj", "o_proj", "to_out", "out", "proj_out", "c_proj", "out_lin", "wo", "dense", "Wo", "o"),
    *("linear_out", "attention_out", "post_proj", "projection", "projection_layer", "output"),
)
CALLED = ("attn", "attention", "mhsa", "mha", "multihead")
HEADS = ("num_heads", "num_attention_heads", "heads", "n_heads", "n_head", "nhead")


def computes_attention(module: nn.Module) -> bool:
    """Whether this module itself, not one inside it, computes attention.

    A class that calls torch's attention function does. One that calls softmax, or holds or makes an nn.Softmax, does
    where it has a projection for Q, K or V and is called attention: softmax alone says too little.
    """
    if isinstance(module, nn.MultiheadAttention):
        return True
    cls = original_class(module)
    names = names_in(cls)
    if names & FUSED:
        return True
    softmax = "softmax" in names or "Softmax" in names or any(isinstance(m, nn.Softmax) for m in module.children())
    return softmax and is_called_attention(module) and has_projection(module)


@functools.cache
def names_in(cls: Any) -> frozenset[str]:
    """Every global, attribute and method name that a class's forward mentions, itself or through helpers."""
    found: set[str] = set()
    seen: set[CodeType] = set()
    waiting: list[tuple[Any, int]] = [(getattr(cls, "forward", None), 0)]
    while waiting:
        function, depth = waiting.pop()
        function = inspect.unwrap(function) if callable(function) else function
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = set(_code_names(function.__code__))
        found |= names
        if depth < DEPTH:
            waiting += [(helper, depth + 1) for helper in _helpers(cls, function, names)]
    return frozenset(found)


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


def _helpers(cls: type, function: FunctionType, names: set[str]) -> Iterator[Any]:
    """The class's own methods and the functions of the same package among `names`."""
    package = function.__module__.partition(".")[0]
    for name in names:
        method = inspect.getattr_static(cls, name, None)
        if isinstance(method, FunctionType) and not hasattr(nn.Module, name):
            yield method
        helper = function.__globals__.get(name)
        if isinstance(helper, FunctionType) and helper.__module__.partition(".")[0] == package:
            yield helper
    for cell in function.__closure__ or ():  # what a decorator wrapped
        try:
            inner = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
        if isinstance(inner, FunctionType) and inner.__name__ == "forward":
            yield inner


def is_called_attention(module: nn.Module) -> bool:
    """Whether the name of a module's class says that it is attention."""
    called = original_class(module).__name__.lower()
    return any(word in called for word in CALLED)


def has_projection(module: nn.Module) -> bool:
    """Whether a layer has one of the names that people give to projections of queries, keys or values."""
    names = {*PACKED, *(name for group in (*SEPARATE, *SHARED_KV, *SHARED_QK) for name in group)}
    return any(_projection(module, name) is not None for name in names)


def find_heads(module: nn.Module) -> int | None:
    """The number of heads, by the names that people give it."""
    for holder in (module, getattr(module, "config", None)):
        for name in HEADS:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def find_projections(module: nn.Module) -> Projections | None:
    """Where Q, K and V come from, by the names that people give their layers; None where that is not clear.

    Adapters round the layers are seen through.
    """
    out = next((part for name in OUT if (part := _projection(*_only(module, name)))), None)
    if isinstance(module, nn.MultiheadAttention):
        return _multihead(module, out)
    for name in PACKED:
        parts = _parts(module, name, 3)
        if parts:
            return Projections(parts[0], parts[1], parts[2], out)
    for names in SEPARATE:
        q, k, v = (_projection(module, name) for name in names)
        if q and k and v:
            return Projections(q, k, v, out)
    for q_name, kv_name in SHARED_KV:
        one, halves = _projection(module, q_name), _parts(module, kv_name, 2)
        if one and halves:
            return Projections(one, halves[0], halves[1], out)
    for qk_name, v_name in SHARED_QK:
        halves, one = _parts(module, qk_name, 2), _projection(module, v_name)
        if one and halves:
            return Projections(halves[0], halves[1], one, out)
    return None


def _multihead(module: nn.MultiheadAttention, out: Projection | None) -> Projections:
    if module.in_proj_weight is None:
        q, k, v = (Projection(module, weight=f"{name}_proj_weight") for name in "qkv")
        return Projections(q, k, v, out)
    width = module.embed_dim
    q, k, v = (Projection(module, "in_proj_weight", (i * width, (i + 1) * width)) for i in range(3))
    return Projections(q, k, v, out)


def _projection(module: nn.Module, name: str) -> Projection | None:
    """The linear layer of this name, or the 1 × 1 convolution standing for one."""
    layer = inner(getattr(module, name, None))
    if is_pointwise(layer) or is_linear(layer):
        return Projection(layer, slot=Slot(module, name), transposed=is_transposed(layer))
    return None


def is_pointwise(layer: Any) -> bool:
    """Whether a convolution does the same to every pixel, and nothing else."""
    ones = (1, 1)
    return (
        isinstance(layer, nn.Conv2d)
        and (layer.kernel_size, layer.stride, layer.groups) == (ones, ones, 1)
        and layer.padding in ((0, 0), "valid", "same")
    )


def _parts(module: nn.Module, name: str, count: int) -> list[Projection]:
    """Several projections of one layer, one behind the other; none where its rows cannot be shared out."""
    whole = _projection(module, name)
    if whole is None or widths(whole.module)[1] % count:
        return []
    rows = widths(whole.module)[1] // count
    return [replace(whole, rows=(i * rows, (i + 1) * rows)) for i in range(count)]


def _only(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Where the one linear layer of a list stands, such as one of a linear layer and dropout; else where it says."""
    holder = getattr(module, name, None)
    if not isinstance(holder, nn.Sequential | nn.ModuleList):
        return module, name
    linear = [key for key in holder._modules if _projection(holder, key) is not None]
    return (holder, linear[0]) if len(linear) == 1 else (module, name)
