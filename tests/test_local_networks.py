"""Context broadcasting and dropout in feed-forward networks with convolutions, which class tokens pass by."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import UnmetError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import InputShape
from attemper.sites import find_sites
from families import build, call, family

SHAPE = InputShape(channels=3, height=8, width=16, classes=3)
SMALL = "width=12, depth=2, heads=3, mlp=16, patch=4"
LOCALVIT, CEIT = f"localvit({SMALL})", f"ceit({SMALL}, stem=8)"


def model_of(text: str) -> Any:
    torch.manual_seed(0)
    model = build_model(text, SHAPE).double()
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(0.5, 2)
                norm.bias.normal_()
    return model


def cb(x: Tensor, variant: str) -> Tensor:
    """Of tokens (B, N, C), by the paper's formulas."""
    mean = x.sum(1, keepdim=True) / x.shape[1]
    token = x[:, :1]
    return {
        "cb": (x + mean) / 2,
        "cb_s": (x + 3 * mean) / 2,
        "gate": x * (token + 1),
        "hybrid": x * token + (x + mean) / 2,
    }[variant]


def over_images(x: Tensor, variant: str) -> Tensor:
    """The same of (B, C, H, W)."""
    return cb(x.flatten(2).mT, variant).mT.reshape(x.shape)


# -------------------------------------------------------------------------------------------- LocalViT, written by hand
def local_network(mlp: Any, x: Tensor, variant: str, position: str) -> Tensor:
    x = over_images(x, variant) if position == "front" else x
    hidden = F.hardswish(mlp.norm1(F.conv2d(x, mlp.conv1.weight)))
    hidden = F.hardswish(mlp.norm2(F.conv2d(hidden, mlp.depthwise.weight, padding=1, groups=hidden.shape[1])))
    gate = mlp.squeeze.fc2(F.relu(mlp.squeeze.fc1(hidden.mean((2, 3)))))
    hidden = hidden * F.hardsigmoid(gate)[..., None, None]
    hidden = over_images(hidden, variant) if position == "mid" else hidden
    out = torch.einsum("oi,bihw->bohw", mlp.conv2.weight[..., 0, 0], hidden)
    return mlp.norm3(over_images(out, variant) if position == "end" else out)


def localvit(model: Any, images: Tensor, variant: str, position: str) -> Tensor:
    x = model.embedded(images)
    for block in model.blocks:
        x = x + block.attn(block.norm1(x))
        patches = x[:, 1:].mT.reshape(len(x), -1, 2, 4)
        patches = patches + local_network(block.mlp, patches, variant, position)
        x = torch.cat([x[:, :1], patches.flatten(2).mT], 1)
    return model.head(model.norm(x[:, 0]))


# ------------------------------------------------------------------------------------------------ CeiT, written by hand
def leff(mlp: Any, x: Tensor, variant: str, position: str) -> Tensor:
    """All tokens count where all are there: at the front and at the end; the hidden layer has the patches alone."""
    x = cb(x, variant) if position == "front" else x
    hidden = F.gelu(mlp.norm1(mlp.conv1(x[:, 1:].mT.reshape(len(x), -1, 2, 4))))
    hidden = F.gelu(mlp.norm2(mlp.depthwise(hidden)))
    hidden = over_images(hidden, variant) if position == "mid" else hidden
    out = torch.cat([x[:, :1], mlp.norm3(mlp.conv2(hidden)).flatten(2).mT], 1)
    return cb(out, variant) if position == "end" else out


def ceit(model: Any, images: Tensor, variant: str, position: str) -> Tensor:
    x, tokens = model.embedded(images), []
    for block in model.blocks:
        x = x + block.attn(block.norm1(x))
        x = x + leff(block.mlp, block.norm2(x), variant, position)
        tokens.append(x[:, 0])
    return model.head(model.norm(model.over_layers(torch.stack(tokens, 1) + model.layer_embed)))


CASES = [
    *((LOCALVIT, localvit, variant, position) for variant in ("cb", "cb_s") for position in ("front", "mid", "end")),
    *((CEIT, ceit, variant, position) for variant in ("cb", "cb_s") for position in ("front", "mid", "end")),
    *((CEIT, ceit, variant, position) for variant in ("gate", "hybrid") for position in ("front", "end")),
]


@pytest.mark.parametrize(
    ("text", "by_hand", "variant", "position"), CASES, ids=[f"{c[0][:4]}-{c[2]}-{c[3]}" for c in CASES]
)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_cb_is_what_the_formula_says(text: str, by_hand: Any, variant: str, position: str, training: bool) -> None:
    model = model_of(text).train(training)
    images = torch.randn(2, 3, 8, 16, dtype=torch.double, requires_grad=True)
    wanted = by_hand(model, images, variant, position)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), images)
    tempered = attemper.apply(model, f"cb({variant}, position={position})")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("attemper."):
                parameter.fill_(3.0)
    out = model(images)
    (found,) = torch.autograd.grad(out.square().sum(), images)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-10 * (1 + wanted.abs().max().item()))
    assert torch.allclose(found, gradient, rtol=0, atol=1e-10 * (1 + gradient.abs().max().item()))
    tempered.remove()
    plain = model_of(text).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images), plain(images))


@pytest.mark.parametrize("training", [False, True])
def test_mid_and_end_are_equal_where_the_last_layer_is_linear_and_gives_all_tokens(training: bool) -> None:
    images = torch.randn(2, 3, 8, 16, dtype=torch.double)
    outputs = {}
    for position in ("mid", "end", "front"):
        model = model_of(LOCALVIT).train(training)
        attemper.apply(model, f"cb(position={position})")
        outputs[position] = model(images)
    assert torch.allclose(outputs["mid"], outputs["end"], rtol=0, atol=1e-12)
    assert not torch.allclose(outputs["front"], outputs["end"])


@pytest.mark.parametrize(("text", "recipe"), [(LOCALVIT, "cb(gate)"), (LOCALVIT, "cb(hybrid, position=front)"),
                                              (CEIT, "cb(gate, position=mid)"), (LOCALVIT, "cb(gate, prefix=1)"),
                                              (CEIT, "cb(hybrid, prefix=1, position=mid)")])  # fmt: skip
def test_gates_are_refused_where_the_class_token_is_not_there(text: str, recipe: str) -> None:
    model = model_of(text)
    attemper.apply(model, recipe)
    with pytest.raises(
        UnmetError, match=r"needs the class token, and it passes by the convolutions of 'blocks\.0\.mlp'"
    ):
        model(torch.randn(2, 3, 8, 16, dtype=torch.double))


class LinearLeff(nn.Module):
    """Linear layers round the convolution, as some write it; two tokens pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.depthwise = nn.Conv2d(10, 10, 3, padding=1, groups=10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x[:, 2:]).mT.unflatten(2, (2, 3))
        return torch.cat([x[:, :2], self.down(F.gelu(self.depthwise(hidden)).flatten(2).mT)], 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.leff = LinearLeff()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        out: Tensor = x + self.leff(x)
        return out


def test_tokens_that_pass_by_linear_layers_count_too() -> None:
    model = nn.Sequential(nn.ModuleDict({"layers": nn.ModuleList([Block()])})["layers"][0]).double().eval()
    x = torch.randn(2, 8, 6, dtype=torch.double)
    block = model[0]
    attended = x + block.attention(x, x, x, need_weights=False)[0]
    wanted = attended + cb(block.leff(attended), "cb")
    attemper.apply(model, "cb")
    assert torch.allclose(model(x), wanted, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------------------------------------- sites
@pytest.mark.parametrize("text", [LOCALVIT, CEIT])
def test_the_network_is_its_two_pointwise_convolutions(text: str) -> None:
    model = model_of(text)
    mlps = find_sites(model).mlps
    assert [mlp.name for mlp in mlps] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert all(mlp.firsts == (block.mlp.conv1,) for mlp, block in zip(mlps, model.blocks, strict=True))
    assert all(mlp.last is block.mlp.conv2 for mlp, block in zip(mlps, model.blocks, strict=True))


class HardSigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


class Excite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8), HardSigmoid())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.fc(self.pool(x).flatten(1))[..., None, None]
        return out


class ListedFeedForward(nn.Module):
    """All layers in one list, squeeze-and-excite among them, and the skip inside, as LocalViT's authors write it."""

    def __init__(self) -> None:
        super().__init__()
        depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.conv = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU6(), depthwise, nn.ReLU6(), Excite(), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv(x)
        return out


def test_squeeze_and_excite_between_the_layers_is_passed_over() -> None:
    network = ListedFeedForward()
    block = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "network": network})
    (mlp,) = find_sites(nn.ModuleDict({"blocks": nn.ModuleList([block])})).mlps
    assert (mlp.firsts, mlp.last) == ((network.conv[0],), network.conv[5])


# ------------------------------------------------------------------------------------------------------------- dropout
@pytest.mark.parametrize("text", [LOCALVIT, CEIT])
def test_dropout_acts_on_hidden_and_output_activations_entry_by_entry(text: str) -> None:
    """The last layer hands on twelve of sixteen channels: what comes out is what goes in times two keeps, each by 2."""
    model = model_of(text).train()
    seen: dict[str, Tensor] = {}
    mlp = model.blocks[0].mlp
    with torch.no_grad():
        mlp.conv2.weight.copy_(torch.eye(12, 16)[..., None, None])
        if mlp.conv2.bias is not None:
            mlp.conv2.bias.zero_()
    mlp.conv2.register_forward_pre_hook(lambda module, args: seen.update(hidden=args[0][:, :12]))
    mlp.norm3.register_forward_pre_hook(lambda module, args: seen.update(out=args[0]))
    attemper.apply(model, "ffdropout(0.5)")
    model(torch.randn(8, 3, 8, 16, dtype=torch.double))
    ratios = (seen["out"] / seen["hidden"])[seen["hidden"] != 0].round(decimals=9)
    assert set(ratios.unique().tolist()) == {0.0, 4.0}
    assert abs((ratios > 0).double().mean() - 0.25) < 6 * (0.1875 / len(ratios)) ** 0.5


@pytest.mark.parametrize("name", ["timm-pvtv2", "hf-segformer"])
def test_networks_whose_tokens_all_pass_through_are_as_before(name: str) -> None:
    """At the front of the network, or of its first layer: the same tokens."""
    model = build(family(name)).double().eval()
    inputs = {
        key: [x.double() for x in value] if key == "args" else value for key, value in family(name).inputs().items()
    }
    inputs = {key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
              for key, value in inputs.items()}  # fmt: skip
    handles = [first.register_forward_pre_hook(lambda module, args: (cb(args[0], "cb"), *args[1:]))
               for mlp in find_sites(model).mlps for first in mlp.firsts]  # fmt: skip
    wanted = call(model, inputs)
    for handle in handles:
        handle.remove()
    attemper.apply(model, "cb(position=front)")
    assert torch.allclose(call(model, inputs), wanted, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("text", [LOCALVIT, CEIT])
@pytest.mark.parametrize("position", ["front", "end"])
def test_compiled_and_eager_compute_the_same(text: str, position: str) -> None:
    model = model_of(text).train()
    attemper.apply(model, f"cb(cb_s, position={position})")
    images = torch.randn(2, 3, 8, 16, dtype=torch.double)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager_default_partitioner", fullgraph=True)
    assert torch.allclose(compiled(images), model(images), rtol=0, atol=1e-10)


def test_another_thread_in_the_same_network_changes_nothing() -> None:
    model = model_of(CEIT).eval()
    attemper.apply(model, "cb")
    x = torch.randn(2, 3, 8, 16, dtype=torch.double)
    expected = model(x)
    conv = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.groups > 1)
    runs: list[threading.Thread] = []

    def meanwhile(*_: Any) -> None:
        if not runs:  # in the middle of a network, another thread runs the whole model
            runs.append(threading.Thread(target=model, args=(x,)))
            runs[0].start()
            runs[0].join()

    with conv.register_forward_hook(meanwhile):
        found = model(x)
    assert runs
    torch.testing.assert_close(found, expected)
