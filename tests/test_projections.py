"""Projections however their layers are made and called: the same attention gets the same penalties and drops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model
from transformers.pytorch_utils import Conv1D

import attemper
from attemper.sites import find_sites

WIDTH, HEADS = 16, 2


class Turned(nn.Linear):
    """As Falcon writes a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def linear(rows: int) -> nn.Linear:
    return nn.Linear(WIDTH, rows, bias=False)


def turned(rows: int) -> Turned:
    return Turned(WIDTH, rows, bias=False)


def conv1d(rows: int) -> Conv1D:
    return Conv1D(rows, WIDTH)


class Attention(nn.Module):
    """One projection for Q, K and V, and one behind; by layers that `layer` makes."""

    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.c_attn, self.c_proj = layer(3 * WIDTH), layer(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Convolved(nn.Module):
    """The same on images (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = (nn.Conv2d(WIDTH, rows, 1, bias=False) for rows in (3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, HEADS, -1)).transpose(-2, -1).unbind(1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(-2, -1).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def image(x: Tensor) -> Tensor:
    return x.transpose(1, 2).unflatten(-1, (2, 3))


def pair(kind: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """The attention by linear layers, the same by others with the same weights, and their inputs."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(Attention(linear)))
    x = torch.randn(2, 6, WIDTH)
    if kind == "convolutions":
        other = nn.Sequential(Block(Convolved()))
    else:
        other = nn.Sequential(Block(Attention({"Conv1D": conv1d, "x @ W.T": turned}[kind])))
    with torch.no_grad():
        weights = [plain[0].attn.c_attn.weight, plain[0].attn.c_proj.weight]
        for layer, weight in zip(other[0].attn.children(), weights, strict=True):
            layer.weight.copy_(weight.T if kind == "Conv1D" else weight.view(layer.weight.shape))
            if getattr(layer, "bias", None) is not None:
                layer.bias.zero_()
    return plain.train(), other.train(), x, image(x) if kind == "convolutions" else x


KINDS = ["Conv1D", "x @ W.T", "convolutions"]


@pytest.mark.parametrize(
    "recipe", ["explicit(q=1, k=0.5, v=0.3, av=0.2)", "explicit(v=1, expectation=exact)", "arora(q=1, v=1)"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_penalties_are_those_of_linear_layers(kind: str, recipe: str) -> None:
    plain, other, x, y = pair(kind)
    found, gradients = [], []
    for model, inputs in ((plain, x), (other, y)):
        before = model(inputs).detach().clone()
        tempered = attemper.apply(model, recipe)
        out = model(inputs)
        assert torch.equal(out, before), "a penalty only looks"
        penalty = tempered.penalty()
        penalty.backward()
        found.append(penalty.detach())
        gradients.append([layer.weight.grad for layer in model[0].attn.children() if layer.weight.grad is not None])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)
    for mine, given in zip(*gradients, strict=True):
        theirs = given.T if kind == "Conv1D" else given.flatten(1)
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_dropconnect_reaches_every_weight(kind: str) -> None:
    _, other, _, y = pair(kind)
    attemper.apply(other, "dropconnect(0.5)")
    other(y).square().sum().backward()
    for layer in other[0].attn.children():
        dropped = (layer.weight.grad == 0).float().mean()
        assert 0.3 < dropped < 0.7, "what is dropped gets no gradient"


def test_gpt2_takes_the_penalties_of_its_attention_and_its_mlp() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=2, vocab_size=30, n_positions=12, attn_pdrop=0.0)
    config.resid_pdrop = config.embd_pdrop = 0.0
    model = GPT2Model(config).train()
    site = find_sites(model).attentions[0]
    weight = model.h[0].attn.c_attn.weight
    for number, part in enumerate((site.projections.q, site.projections.k, site.projections.v)):
        assert torch.equal(part.matrix(), weight.T[number * WIDTH : (number + 1) * WIDTH])
    inputs: list[Tensor] = []
    model.h[1].mlp.c_fc.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    tempered = attemper.apply(model, "explicit(ff1=1, p=0.2)", targets={"mlp": "h.1"})
    model(torch.randint(30, (2, 7)))
    layer = model.h[1].mlp.c_fc
    expected = 0.2**2 / 2 * (inputs[-1] @ layer.weight).square().sum(-1).mean()
    torch.testing.assert_close(tempered.penalty(), expected, rtol=1e-5, atol=0)
