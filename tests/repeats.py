"""Calls of attention that are made again and again, in fused kernels: as if each were made for the first time."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attemper
from attemper.kernels.attention.repeats import Repeat
from attemper.kernels.implementations import triton
from attemper.ops.announced import KIND

RECIPES = (
    "dropkey(0.3)",
    "dropattention(0.3)",
    "dropattention(0.3, rescale=normalize)",
    "hardmask(0.4, k=2)",
    "hardmask(0.4, k=2, fill=neg_inf)",
    "blur(1.0)",
    "drophead(0.4)",
    "dropkey(0.2) + blur(1.0) + drophead(0.3)",
    "explicit(v=0.3)",
    "explicit(v=0.3, q=0.1, k=0.2) + dropkey(0.3)",
    "blur(1.0) + explicit(v=0.3)",
)
PASSES = 4


class Attention(nn.Module):
    """Attention of two heads, whose Q, K and V are parts of one tensor or apart, with a scale that may change."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.qkv, self.proj, self.kind = nn.Linear(width, 3 * width), nn.Linear(width, width), kind
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if self.kind == "apart":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind == "causal", scale=self.scale)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), Attention(16, kind))])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def scale_by(self, scale: float | None) -> None:
        for block in self.blocks:
            block[1].scale = scale


@dataclass
class Pair:
    """Two models of the same weights: one that repeats calls, and one that makes each as the first."""

    one: Net
    other: Net
    handles: dict[int, attemper.Tempered]

    def compare(self, x: Tensor, seed: int) -> None:
        """A step of both: the same loss, penalties and gradients, to the last bit."""
        ours = self.step(self.one, x, seed)
        with no_repeats():
            plain = self.step(self.other, x, seed)
        for a, b in zip(ours, plain, strict=True):
            assert torch.equal(a, b)

    def step(self, model: Net, x: Tensor, seed: int) -> list[Tensor]:
        handle = self.handles[id(model)]
        torch.manual_seed(seed)
        loss = handle.loss(lambda: model(x), lambda out: out.float().square().mean())
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@contextlib.contextmanager
def no_repeats() -> Iterator[None]:
    """Inside it, no call is taken for one that was made before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "repeat", lambda call: None)
        yield


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Notes who was served as before."""
    served: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__call__", "with_squares"):
            original = getattr(Repeat, name)

            def noted(self: Repeat, *args: Any, original: Any = original, name: str = name) -> Any:
                served.append(name)
                return original(self, *args)

            patch.setattr(Repeat, name, noted)
        yield served


def pair(recipe: str, kind: str, device: str) -> Pair:
    models, handles = [], {}
    for _ in range(2):
        torch.manual_seed(0)
        model = Net(kind).to(device).train()
        handles[id(model)] = attemper.apply(model, recipe, targets=["blocks.*.1"], impl="triton")
        models.append(model)
    return Pair(models[0], models[1], handles)


def check_passes(recipe: str, kind: str, device: str) -> None:
    """Several passes, of which all but the first ones are repeated."""
    both = pair(recipe, kind, device)
    x = torch.randn(1, 18, 16, device=device)
    with counted() as served:
        for seed in range(PASSES):
            both.compare(x, seed)
    # Three passes decide: one is watched, one is looked at, and one asks what is left to do.
    assert len(served) >= PASSES - 3, "calls are not repeated at all"


def check_changes(device: str) -> None:
    """What may change between passes, and is not part of a layout."""
    both = pair("dropkey(0.3)", "packed", device)
    x = torch.randn(2, 7, 16, device=device)
    other = torch.randn(1, 5, 16, device=device)
    for seed in range(6):
        both.compare((x, other)[seed % 2], seed)
    for seed, scale in enumerate([0.3, None, 0.7]):
        both.one.scale_by(scale)
        both.other.scale_by(scale)
        both.compare(x, seed)
    for rate in (0.6, 0.0, 0.3):
        for handle in both.handles.values():
            handle.set_rate(rate)
        both.compare(x, 5)
        both.compare(x, 6)
    for enabled in (True, False):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            both.compare(x, 7)
            both.compare(x, 8)


def check_copies(device: str) -> None:
    """Copies and pickles of a model whose calls are repeated, which find out everything for themselves."""
    both = pair("dropkey(0.3)", "packed", device)
    x = torch.randn(2, 7, 16, device=device)
    for seed in range(PASSES):
        both.compare(x, seed)

    def step(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(9)
        return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))

    for copied in (copy.deepcopy(both.one), pickle.loads(pickle.dumps(both.one))):
        for _ in range(PASSES):
            for a, b in zip(step(copied), step(both.one), strict=True):
                assert torch.equal(a, b)


def check_gradients(device: str) -> None:
    """Backward twice through one graph, and through a part of it."""
    both = pair("dropkey(0.3)", "packed", device)
    x = torch.randn(2, 7, 16, device=device, requires_grad=True)
    for seed in range(3):
        both.compare(x, seed)
    with counted() as served:
        out = both.one(x)
    assert served
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), x, retain_graph=True)[0])
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().sum(), x)


def check_watched(device: str) -> None:
    """Who looks at operators or at functions of torch sees them, in passes that repeat calls, too."""
    from torch.utils.flop_counter import FlopCounterMode

    both = pair("dropkey(0.3)", "packed", device)
    x = torch.randn(2, 7, 16, device=device)
    counts = []
    for seed in range(4):
        with FlopCounterMode(display=False) as counter:
            both.compare(x, seed)
        counts.append(counter.get_total_flops())
        both.compare(x, seed)
    assert len(set(counts[1:])) == 1
    assert counts[0] > 0
    for _ in range(2):
        with Announced() as mode, counted() as served:
            both.one(x)
        assert not served
        assert "attention" in mode.kinds


class Announced(TorchFunctionMode):
    """Notes what kinds of functions of ours it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kinds += [getattr(func, KIND)] if hasattr(func, KIND) else []
        return func(*args, **(kwargs or {}))
