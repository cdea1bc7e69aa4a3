"""Kernels are launched past torch's dispatcher only where nobody would have looked at the operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attemper.kernels.common.eager import is_plain
from attemper.ops.announced import announced
from attemper.tempering.functions import kind_of

X = torch.ones(2, 3)


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Marked(Tensor):
    """A tensor that may mean something else than torch's own."""


def seen_in(call: Callable[[Callable[[Tensor], Tensor]], object]) -> list[bool]:
    """Whether a tensor is plain inside of a function that somebody calls."""
    found: list[bool] = []

    def function(x: Tensor) -> Tensor:
        found.append(is_plain(x))
        return x.sin().sum()

    call(function)
    return found


def test_tensors_and_parameters_are_plain_with_and_without_gradients() -> None:
    assert is_plain(X)
    assert is_plain(nn.Parameter(X), X)
    with torch.no_grad():
        assert is_plain(X)
    assert seen_in(lambda function: function(X.clone().requires_grad_()).backward()) == [True]


@pytest.mark.parametrize(
    "watched",
    [forward_ad.dual_level, Looking, FakeTensorMode, lambda: FlopCounterMode(display=False)],
    ids=["forward-mode AD", "dispatch mode", "fake tensors", "counter"],
)
def test_whoever_watches_operators_sees_them(watched: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    with watched():
        assert not is_plain(X)
        assert not is_plain(nn.Parameter(X))
    assert is_plain(X)


@pytest.mark.parametrize(
    "transform",
    [
        lambda function: torch.func.grad(function)(X),
        lambda function: torch.func.vmap(function)(X),
        lambda function: torch.func.jvp(function, (X,), (X,)),
        lambda function: torch.func.jacrev(function)(X),
        lambda function: torch.func.hessian(function)(X),
    ],
    ids=["grad", "vmap", "jvp", "jacrev", "hessian"],
)
def test_transforms_of_functions_see_operators(transform: Callable[[Callable[[Tensor], Tensor]], object]) -> None:
    found = seen_in(transform)
    assert len(found) > 0
    assert not any(found)


def test_a_dual_tensor_is_followed_and_another_kind_of_tensor_is_asked() -> None:
    with forward_ad.dual_level():
        assert not is_plain(forward_ad.make_dual(X, X))
    assert not is_plain(X.as_subclass(Marked))
    assert not is_plain(X, X.as_subclass(Marked))


def test_a_compiler_sees_operators() -> None:
    compiled = torch.compile(lambda x: x + is_plain(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), X)


class Following(TorchFunctionMode):
    """Writes down the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_functions_that_are_announced_are_seen_once_by_every_mode_and_computed_once() -> None:
    runs: list[int] = []

    @announced("attention")
    def function(x: int, *, more: int) -> int:
        runs.append(x)
        return x + more

    assert function(1, more=2) == 3
    with Following() as outer, Following() as inner:
        assert function(2, more=2) == 4
    assert outer.seen == inner.seen == [function]
    assert runs == [1, 2]
    assert kind_of(function) == "attention"
    assert torch.compile(lambda x: x + function(2, more=2), backend="eager", fullgraph=True)(X)[0, 0] == 5
