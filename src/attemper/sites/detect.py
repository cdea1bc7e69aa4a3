"""Telling by a class's own code whether, and how, it computes attention."""

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, TypeGuard

from torch import nn

from attemper.sites.base import Projection, Projections

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
)
SHARED_KV = (("q", "kv"), ("to_q", "to_kv"), ("q_proj", "kv_proj"), ("query", "key_value"))
SHARED_QK = (("qk", "v"), ("to_qk", "to_v"), ("qk_proj", "v_proj"))
OUT = ("proj", "out_proj", "o_proj", "to_out", "out", "proj_out", "c_proj", "out_lin", "wo", "dense")
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
    called = cls.__name__.lower()
    softmax = "softmax" in names or "Softmax" in names or any(isinstance(m, nn.Softmax) for m in module.children())
    return softmax and any(word in called for word in CALLED) and _has_projection(module)


def original_class(module: nn.Module) -> Any:
    """The class that a module was written with; a tempered one has a made subclass of it."""
    cls: Any = type(module)
    while "_attemper_original" in cls.__dict__:
        cls = cls._attemper_original
    return cls


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


def _has_projection(module: nn.Module) -> bool:
    """Whether a layer has one of the names that people give to projections of queries, keys or values."""
    names = {*PACKED, *(name for group in (*SEPARATE, *SHARED_KV, *SHARED_QK) for name in group)}
    return any(_is_linear(getattr(module, name, None)) for name in names)


def find_heads(module: nn.Module) -> int | None:
    """The number of heads, by the names that people give it."""
    for holder in (module, getattr(module, "config", None)):
        for name in HEADS:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def find_projections(module: nn.Module) -> Projections | None:
    """Where Q, K and V come from, by the names that people give their layers; None where that is not clear."""
    out = next((Projection(layer) for name in OUT if _is_linear(layer := _only(getattr(module, name, None)))), None)
    if isinstance(module, nn.MultiheadAttention):
        return _multihead(module, out)
    for name in PACKED:
        layer = getattr(module, name, None)
        if _is_linear(layer) and layer.weight.shape[0] % 3 == 0:
            third = layer.weight.shape[0] // 3
            q, k, v = (Projection(layer, rows=(i * third, (i + 1) * third)) for i in range(3))
            return Projections(q, k, v, out)
    for names in SEPARATE:
        layers = [layer for name in names if _is_linear(layer := getattr(module, name, None))]
        if len(layers) == 3:
            q, k, v = (Projection(layer) for layer in layers)
            return Projections(q, k, v, out)
    for q_name, kv_name in SHARED_KV:
        q_layer, halves = getattr(module, q_name, None), _halves(getattr(module, kv_name, None))
        if _is_linear(q_layer) and halves is not None:
            return Projections(Projection(q_layer), *halves, out)
    for qk_name, v_name in SHARED_QK:
        halves, v_layer = _halves(getattr(module, qk_name, None)), getattr(module, v_name, None)
        if halves is not None and _is_linear(v_layer):
            return Projections(*halves, Projection(v_layer), out)
    return None


def _multihead(module: nn.MultiheadAttention, out: Projection | None) -> Projections:
    if module.in_proj_weight is None:
        q, k, v = (Projection(module, weight=f"{name}_proj_weight") for name in "qkv")
        return Projections(q, k, v, out)
    width = module.embed_dim
    q, k, v = (Projection(module, "in_proj_weight", (i * width, (i + 1) * width)) for i in range(3))
    return Projections(q, k, v, out)


def _halves(layer: Any) -> tuple[Projection, Projection] | None:
    """Two projections of one layer, one behind the other."""
    if not _is_linear(layer) or layer.weight.shape[0] % 2:
        return None
    half = layer.weight.shape[0] // 2
    return Projection(layer, rows=(0, half)), Projection(layer, rows=(half, 2 * half))


def _only(layer: Any) -> Any:
    """The one linear layer of a list, such as one of a linear layer and dropout; anything else as it is."""
    if not isinstance(layer, nn.Sequential | nn.ModuleList):
        return layer
    linear = [part for part in layer if _is_linear(part)]
    return linear[0] if len(linear) == 1 else layer


def _is_linear(layer: Any) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """A linear layer, or a 1 × 1 convolution standing for one."""
    if isinstance(layer, nn.Conv2d):
        return layer.kernel_size == (1, 1) and layer.groups == 1
    return isinstance(layer, nn.Linear)
