"""What the contract tests share: the recipes, a model of every family, and the ways to run one."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from families import FAMILIES, RECOGNISED, Family, build, call

RECIPES = [
    "dropkey(0.3, schedule=decreasing)",
    "dropattention(0.3, rescale=normalize)",
    "dropkey(0.2) + dropattention(0.2, rescale=normalize)",
]
"""Every contract holds for every recipe here; what is slow is tried with the first and the last."""
SCHEDULED, COMPOSED = RECIPES[0], RECIPES[-1]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
recognised_families = pytest.mark.parametrize("family", RECOGNISED, ids=lambda family: family.name)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)

BLOCKS = {"timm-volo": [1, 2, 3, 4], "hf-detr": [0, 1, 2, 2, 3, 3], "nn-decoder": [0, 0, 1, 1, 2, 2]}
"""The block of every attention where that is not simply 0, 1, 2 …"""


def blocks_of(family: Family) -> list[int]:
    """The true depth of every attention, in the order of the modules."""
    return list(family.depths or BLOCKS.get(family.name, range(family.attentions)))


@functools.cache
def _built(name: str) -> nn.Module:
    return build(next(family for family in FAMILIES if family.name == name))


def original(family: Family) -> nn.Module:
    """The family's model, untempered; every call gives another copy of the same weights."""
    return copy.deepcopy(_built(family.name))


def tempered(family: Family, recipe: str) -> tuple[nn.Module, attemper.Tempered]:
    model = original(family)
    return model, attemper.apply(model, recipe, targets=family.targets)


def evaluate(model: nn.Module, family: Family, seed: int | None = 1) -> Tensor:
    """The output in eval mode, without gradients: that is where torch takes its fast paths.

    seed: some models shuffle their patches; None leaves torch's generator where it is.
    """
    model.eval()
    if seed is not None:
        torch.manual_seed(seed)
    with torch.no_grad():
        return call(model, family.inputs())


def train(model: nn.Module, family: Family, seed: int | None = 1) -> Tensor:
    """The output in training mode; None leaves torch's generator where it is."""
    model.train()
    if seed is not None:
        torch.manual_seed(seed)
    return call(model, family.inputs())


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """The gradient of some scalar of the output in every parameter that gets one."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    (output * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train_with_gradients(model: nn.Module, family: Family, seed: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    output = train(model, family, seed)
    return output.detach(), gradients(model, output)


def assert_same(got: Any, wanted: Any, **tolerance: float) -> None:
    """Equal to the tolerance given, and bit for bit where none is."""
    torch.testing.assert_close(got, wanted, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": by_torch_save,
}


def copies_of(family: Family) -> list[Callable[[nn.Module], nn.Module]]:
    """The ways in which a family's model can be copied."""
    return list(COPIES.values()) if family.pickles else [COPIES["deepcopy"]]


def fingerprint(model: nn.Module) -> list[Any]:
    """All that could tell a model from the one that it was: classes, attributes, hooks, parameters and buffers."""
    prints: list[Any] = []
    for name, module in model.named_modules():
        hooks = {
            key: list(value) for key, value in module.__dict__.items() if "hooks" in key and hasattr(value, "keys")
        }
        prints.append((name, type(module), sorted(module.__dict__), hooks, module.training))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return prints + [(name, id(tensor), tensor.requires_grad) for name, tensor in tensors]


@contextlib.contextmanager
def unharmed(model: nn.Module, output: Callable[[], Tensor]) -> Iterator[None]:
    """Whatever happens inside leaves the model exactly as it was."""
    result = output()
    prints = fingerprint(model)
    yield
    assert fingerprint(model) == prints
    assert_same(output(), result)


def checkpoint_blocks(model: nn.Module, blocks: list[str]) -> None:
    """Recompute these modules in backward, as libraries do it: by putting another forward on the instance."""
    for name in blocks:
        block = model.get_submodule(name)
        for part in block if isinstance(block, nn.ModuleList) else [block]:
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)


@pytest.fixture
def all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random stream that drops nothing, while everything else runs as it always does."""

    def keep(self: Any, shape: Any, p: float) -> Tensor:
        return torch.ones(tuple(shape), dtype=torch.bool)

    monkeypatch.setattr("attemper.ops.stream.Stream.keep", keep)
    monkeypatch.setattr("attemper.ops.tile_masks.threshold", lambda p: -(2**31))
