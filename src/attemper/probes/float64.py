"""Running a function in float64 that was not written for it, and that keeps weights of another type."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, resolve_name

_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}
"""What would leave float64 without naming a type."""


class Float64(TorchFunctionMode):
    """Inside it, every operation on floating-point numbers is computed in float64.

    Weights are widened where they are used, and stay as they are. A cast to another type, as norms and softmax have
    one for models in half precision, gives float64 too: it would cost the digits that small singular values need.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return _wide(func(*args))
        if getattr(func, "__name__", "") == "__get__" or _is_setting(func):
            return func(*args, **(kwargs or {}))
        func = Tensor.double if func in _NARROWING else func
        return _wide(func(*_wide(args), **_wide(kwargs or {})))


def _is_setting(func: Any) -> bool:
    """Whether a function looks at a tensor or sets something of it, and a widened copy would be the wrong one."""
    name = resolve_name(func) or ""
    return name.endswith(("__set__", ".requires_grad_", ".retain_grad", ".register_hook", ".backward"))


def _wide(value: Any) -> Any:
    """Tensors and types in a value, as float64 where they are floating-point numbers."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, dict):
        return {name: _wide(part) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_wide(part) for part in value)
    return value


@contextmanager
def in_float64(device: torch.device) -> Iterator[None]:
    """Context manager: float64 inside, and attention by operators that can be differentiated twice."""
    with torch.autocast(device.type, enabled=False), sdpa_kernel(SDPBackend.MATH), Float64():
        yield


def widened(batch: Any) -> Any:
    """A batch with its floating-point tensors in float64."""
    return _wide(batch)
