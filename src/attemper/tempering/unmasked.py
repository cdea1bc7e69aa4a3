"""Attention modules whose code tells that nothing but their own arguments can hide tokens.

Methods that mix tokens ask attention which of them are padding, and a mode that catches its calls costs as much as
they do themselves. Where the code of a library's module hands its mask on to the one fused call as it got it, a module
that is called without a mask has no padding, and need not be watched.
"""

from __future__ import annotations

import ast
import functools
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.ops.precision import autocast_dtype
from attemper.tempering.straight import definition_of

FUSED = "scaled_dot_product_attention"
SDPA = torch._C._nn.scaled_dot_product_attention
MOST = 256
"""Inputs that are remembered for one module."""


class Unmasked:
    """What is known of the calls of one module: for which inputs nothing was to do but to see that there is no mask."""

    def __init__(self) -> None:
        self.function: Any = None
        """The forward function that made them."""
        self.inputs: set[Any] = set()

    def __reduce__(self) -> Any:  # a copy of the module finds out by itself
        return Unmasked, ()

    def learn(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> None:
        """Take down a call that was watched, and was one fused call of torch's own, without a mask."""
        function, key = getattr(forward, "__func__", None), key_of(module, args)
        if key is None or hides_tokens(forward, args, kwargs):
            return
        if function is not self.function or len(self.inputs) >= MOST:
            self.function, self.inputs = function, set()
        self.inputs.add(key)

    def knows(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call is like one of these."""
        if self.function is None or getattr(forward, "__func__", None) is not self.function:
            return False
        return key_of(module, args) in self.inputs and not hides_tokens(forward, args, kwargs)


def key_of(module: nn.Module, args: Any) -> Any:
    """What decides who serves a call; None: this is not said by its first argument."""
    x = args[0] if args else None
    if type(x) is not Tensor or F.scaled_dot_product_attention is not SDPA:
        return None
    return x.shape, x.dtype, x.device, autocast_dtype(x), module.training, torch.is_grad_enabled()


def hides_tokens(forward: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of a bound function may hide tokens, as far as its code tells."""
    masks = masks_of(getattr(forward, "__func__", None))
    if masks is None:
        return True
    for name, place in masks:
        given = args[place] if place < len(args) else kwargs.get(name)
        if given is not None and given is not False:
            return True
    return False


@functools.lru_cache(maxsize=256)
def masks_of(function: Any) -> tuple[tuple[str, int], ...] | None:
    """The arguments of a forward function that its fused call is masked by: their names, and their places behind self.

    None: it is no library's, or may hide tokens in another way.
    """
    if type(function) is not FunctionType or (function.__module__ or "").partition(".")[0] != "timm":
        return None
    defined = definition_of(function)
    if defined is None or defined.args.vararg is not None or function.__kwdefaults__:
        return None
    calls = [node for node in ast.walk(defined) if isinstance(node, ast.Call) and _name(node).find("attention") >= 0]
    if len(calls) != 1 or _name(calls[0]) != FUSED or len(calls[0].args) > 3:
        return None
    given = {keyword.arg: keyword.value for keyword in calls[0].keywords}
    if None in given:  # **kwargs
        return None
    places = [each.arg for each in (*defined.args.posonlyargs, *defined.args.args)]
    defaults = dict(zip(places[::-1], (function.__defaults__ or ())[::-1], strict=False))
    names = [node for node in ast.walk(defined) if isinstance(node, ast.Name)]
    written = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    found = []
    for value in (given.get("attn_mask"), given.get("is_causal")):
        if value is None or (isinstance(value, ast.Constant) and not value.value):
            continue
        if not isinstance(value, ast.Name) or value.id in written or value.id not in places:
            return None
        if defaults.get(value.id, True) not in (None, False):
            return None
        found.append((value.id, places.index(value.id) - 1))
    return tuple(found)


def _name(call: ast.Call) -> str:
    """The name of what is called, as far as it has one."""
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
