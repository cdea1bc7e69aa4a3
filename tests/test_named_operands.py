"""Operands by name, as in `torch.matmul(input=q, other=k)` and `layer(input=x)`, mean what they mean without."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attemper
from attemper.tempering.operands import NAMES, in_order
from plain_blocks import HEADS, WIDTH, model_of, tokens

NAMED = {
    torch.matmul: ("input", "other"), torch.bmm: ("input", "mat2"), torch.addmm: ("input", "mat1", "mat2"),
    torch.baddbmm: ("input", "batch1", "batch2"), F.linear: ("input", "weight", "bias"),
    torch.softmax: ("input", "dim"), torch.add: ("input", "other"), torch.mul: ("input", "other"),
    torch.masked_fill: ("input", "mask", "value"), torch.where: ("condition", "input", "other"),
    torch.transpose: ("input", "dim0", "dim1"), torch.flatten: ("input", "start_dim", "end_dim"),
    torch.cat: ("tensors", "dim"), F.scaled_dot_product_attention: ("query", "key", "value"),
}  # fmt: skip


class Naming(TorchFunctionMode):
    """Names every operand of the functions above, last ones first."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        names = NAMED.get(func, ())
        named = dict(zip(names, args, strict=False)) if len(args) <= len(names) else {}
        if not named:
            return func(*args, **(kwargs or {}))
        return func(**{name: named[name] for name in reversed(named)}, **(kwargs or {}))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return torch.transpose(F.linear(x, layer.weight, layer.bias).unflatten(-1, (HEADS, -1)), 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer, x) for layer in (self.q, self.k, self.v))
        out = torch.flatten(torch.transpose(self.attend(q, k, v), 1, 2), 2, 3)
        return F.linear(out, self.proj.weight, self.proj.bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.mul(torch.matmul(q, torch.transpose(k, -2, -1)), 1 / math.sqrt(q.shape[-1]))
        return torch.matmul(torch.softmax(torch.add(logits, torch.zeros(())), -1), v)


class Masked(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        logits = torch.masked_fill(torch.matmul(q, k.mT), future, -1e9)
        logits = torch.where(future, torch.full_like(logits, -1e9), logits)
        return torch.matmul(torch.softmax(logits, -1), v)


class Folded(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (torch.flatten(t, 0, 1) for t in (q, k, v))
        logits = torch.baddbmm(torch.zeros(1), q, torch.transpose(k, 1, 2))
        return torch.bmm(torch.softmax(logits, -1), v).unflatten(0, (-1, HEADS))


class Fused(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Multiplied(Written):
    """Projections without F.linear."""

    def split(self, layer: nn.Linear, x: Tensor) -> Tensor:
        out = torch.addmm(layer.bias, x.flatten(0, 1), layer.weight) if layer is self.q else x @ layer.weight.t()
        return out.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


class Pieces(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [
            torch.matmul(torch.softmax(torch.matmul(q[:, [h]], k[:, [h]].mT), -1), v[:, [h]]) for h in range(HEADS)
        ]
        return torch.cat(heads, 1)


KINDS = (Written, Masked, Folded, Fused, Multiplied, Pieces)
RECIPES = (
    "dropkey(0.5)", "hardmask(0.5, k=2)", "blur(2.0)", "drophead(0.5)", "dropattention(0.5)", "dropconnect(0.3)", "cb",
    "graying(where=tokens)", "layerdrop(0.5)", "droppath(0.5) + ffdropout(0.3)", "skipless", "skipless(mlp)",
    "explicit(q=1, v=1, ff=1)", "explicit(av=1, expectation=exact)", "arora(k=1, ff=1)",
)  # fmt: skip


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module], named: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), kind(), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 32), "fc2": nn.Linear(32, WIDTH)})
        self.named = named

    def forward(self, x: Tensor) -> Tensor:
        if self.named:
            with Naming():
                return self.run(x)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        x = torch.add(x, self.attn(self.norm1(x)))
        if self.named:
            return torch.add(x, self.mlp["fc2"](input=F.gelu(self.mlp["fc1"](input=self.norm2(x)))))
        return torch.add(x, self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))


def outcome(kind: type[nn.Module], recipe: str, named: bool) -> list[Tensor] | str:
    """The loss and the gradients of the third step, or the error."""
    model = model_of(lambda: Block(kind, named))  # type: ignore[arg-type]
    try:
        tempered = attemper.apply(model, recipe)
        for seed in range(3):
            torch.manual_seed(seed)
            model.zero_grad()
            loss = tempered.loss(lambda: model(tokens()), lambda out: out.square().mean())
            loss.backward()
    except attemper.errors.AttemperError as error:
        return str(error)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@given(st.sampled_from(KINDS), st.sampled_from(RECIPES))
@settings(max_examples=12, deadline=None)
def test_a_model_that_names_operands_is_tempered_like_one_that_does_not(kind, recipe):
    assert_alike(kind, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_recipe_minds_names_in_no_spelling(kind, recipe):
    assert_alike(kind, recipe)


def assert_alike(kind: type[nn.Module], recipe: str) -> None:
    plain, named = outcome(kind, recipe, False), outcome(kind, recipe, True)
    if isinstance(plain, str) or isinstance(named, str):
        assert plain == named
        return
    assert len(plain) == len(named)
    for one, other in zip(plain, named, strict=True):
        torch.testing.assert_close(one, other)


def test_named_and_plain_calls_of_the_functions_in_the_table_agree():
    x, y, bias = torch.randn(2, 3, 3), torch.randn(2, 3, 3), torch.randn(3)
    operands = {
        torch.bmm: (x, y), torch.addmm: (bias, x[0], y[0]), torch.baddbmm: (bias, x, y), F.linear: (x, y[0], bias),
        torch.softmax: (x, -1), torch.masked_fill: (x, x > 0, 1.0), torch.where: (x > 0, x, y), torch.cat: ([x, y], 1),
        torch.transpose: (x, 0, 1), torch.flatten: (x, 0, 1), F.scaled_dot_product_attention: (x, y, x),
    }  # fmt: skip
    for func, names in NAMED.items():
        given_ = operands.get(func, (x, y))
        args, kwargs = in_order(func, (), dict(reversed(list(zip(names, given_, strict=True)))))
        assert all(one is other for one, other in zip(args, given_, strict=False))
        torch.testing.assert_close(func(*args, **kwargs), func(*given_))
    assert in_order(torch.searchsorted, (), {"sorted_sequence": bias, "input": x}) == (
        (),
        {"sorted_sequence": bias, "input": x},
    )
    assert all(len(set(names)) == len(names) for _, names in NAMES)


def test_the_image_of_a_patch_embedding_may_be_named():
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = nn.Conv2d(3, WIDTH, 4, stride=4)
            self.blocks = model_of(lambda: Block(Fused, False))  # type: ignore[arg-type]

        def forward(self, images: Tensor, named: bool) -> Tensor:
            tokens = self.patch_embed(input=images) if named else self.patch_embed(images)
            return self.blocks(tokens.flatten(2).transpose(1, 2))

    model = Embedded()
    attemper.apply(model, "graying")
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(images, True), model(images, False))
