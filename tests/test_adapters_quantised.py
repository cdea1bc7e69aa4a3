"""Quantised and parametrized layers: refused by name where a weight is needed, and no matter where none is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm

import attemper

NEEDS_WEIGHTS = ["explicit(v=0.1)", "arora(ff=0.1)", "dropconnect(0.1)"]
NEEDS_NONE = ["dropkey(0.3)", "drophead(0.4)", "ffdropout(0.3)", "cb(cb_s)", "cb(cb_s, branch=both, position=mid)"]
WIDTH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).train()


def tokens() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


# -------------------------------------------------------------------------- layers that look like those of each library
class Linear4bit(nn.Linear):
    """bitsandbytes' way: a column of bytes for a weight, and a product of its own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.hidden = (layer.weight.detach(), layer.bias.detach())
        self.weight = nn.Parameter(torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.hidden[0].T + self.hidden[1]


class Float8(Linear4bit):
    """A weight that is floating-point, but of no type that can be multiplied without its scale."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


class Packed(nn.Module):
    """torch.ao's way: no nn.Linear, no parameter, and `weight` is a method."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.hidden = (layer.weight.detach(), layer.bias.detach())

    def weight(self) -> Tensor:
        return self.hidden[0]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.hidden[0].T + self.hidden[1]


class Int8Tensor(Tensor):
    """torchao's way: a plain nn.Linear whose weight is a tensor of another kind, which says that it is float32."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class FakeQuantized(nn.Linear):
    """Training for quantisation: a float weight that is rounded before it is used."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias = layer.weight, layer.bias
        self.rounding = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounding(self.weight * 1), self.bias)


class LoraInside(nn.Linear):
    """loralib's way: the adapter is part of a subclass of the layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = nn.Parameter(torch.randn(2, layer.in_features))
        self.lora_B = nn.Parameter(torch.randn(layer.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + x @ self.lora_A.T @ self.lora_B.T


def in_place(layer: nn.Linear) -> nn.Linear:
    weight = layer.weight.detach().as_subclass(Int8Tensor)
    del layer.weight
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def normalised(layer: nn.Linear) -> nn.Module:
    return parametrizations.weight_norm(layer)


KINDS = {
    "bitsandbytes": (Linear4bit, "Linear4bit|uint8"),
    "torch.ao": (Packed, "Packed"),
    "torchao": (in_place, "Int8Tensor"),
    "float8": (Float8, "Float8|float8"),
    "for quantisation": (FakeQuantized, "FakeQuantized"),
    "loralib": (LoraInside, "LoraInside"),
    "parametrize": (normalised, "parametrize"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def converted(whole: nn.Module, kind: str, blocks=(0, 1)) -> nn.Module:
    for block in blocks:
        for holder, names in ((whole[block].attn, ("qkv", "proj")), (whole[block].mlp, ("fc1", "fc2"))):
            for name in names:
                setattr(holder, name, KINDS[kind][0](getattr(holder, name)))
    return whole


@each_kind
@pytest.mark.parametrize("recipe", NEEDS_WEIGHTS)
def test_a_weight_that_is_not_known_is_refused_by_name_before_apply_and_after(kind, recipe):
    with pytest.raises(attemper.errors.NoSiteError, match=rf"'(qkv|fc1)' of '0\..*({KINDS[kind][1]})"):
        attemper.apply(converted(model(), kind), recipe)
    with pytest.raises(attemper.errors.NoSiteError, match=rf"'(qkv|fc1)' of '1\..*({KINDS[kind][1]})"):
        attemper.apply(converted(model(), kind, blocks=[1]), recipe)  # one such layer is enough
    whole = model()
    attemper.apply(whole, recipe)
    converted(whole, kind)
    with pytest.raises(
        attemper.errors.UnmetError, match=rf"'(qkv' of '0\.|fc1' of '0\.|0\.mlp\.fc1').*({KINDS[kind][1]})"
    ):
        whole(tokens())


@pytest.mark.parametrize("kind", ["bitsandbytes", "torch.ao", "for quantisation", "loralib", "parametrize"])
@pytest.mark.parametrize("recipe", NEEDS_NONE)
def test_methods_that_need_no_weight_act_on_quantised_layers_as_on_others(kind, recipe):
    def outcome(whole: nn.Module) -> Tensor:
        torch.manual_seed(4)
        return whole(tokens())

    whole = converted(model(), kind)
    plain = copy.deepcopy(whole)
    tempered = attemper.apply(whole, recipe)
    assert not torch.equal(outcome(whole), outcome(plain))
    assert all(p.is_floating_point() for name, p in whole.named_parameters() if name.startswith("attemper"))
    if kind not in ("loralib", "parametrize"):  # the same numbers as before they were quantised
        same = model()
        attemper.apply(same, recipe)
        torch.testing.assert_close(outcome(whole), outcome(same))
    tempered.remove()
    assert torch.equal(outcome(whole), outcome(plain))


@pytest.mark.parametrize("recipe", NEEDS_WEIGHTS)
@pytest.mark.parametrize("change", [weight_norm, lambda layer: prune.random_unstructured(layer, "weight", 0.5)])
@pytest.mark.parametrize("first", ["apply", "change"])
def test_weights_that_hooks_compute_before_each_pass_are_taken_as_they_are(recipe, change, first):
    def changed(whole: nn.Module) -> nn.Module:
        for name in ("attn.qkv", "mlp.fc1", "mlp.fc2"):
            change(whole[0].get_submodule(name))
        return whole

    def outcome(whole: nn.Module, tempered: attemper.Tempered) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return whole(tokens()), tempered.penalty()

    torch.manual_seed(2)
    whole = model() if first == "apply" else changed(model())
    tempered = attemper.apply(whole, recipe)
    whole = changed(whole) if first == "apply" else whole
    found = outcome(whole, tempered)
    same = model()
    with torch.no_grad():
        for name in ("attn.qkv", "mlp.fc1", "mlp.fc2"):
            same[0].get_submodule(name).weight.copy_(whole[0].get_submodule(name).weight)
    torch.testing.assert_close(found, outcome(same, attemper.apply(same, recipe)))
