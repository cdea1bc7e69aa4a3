"""Where attention, MLPs, blocks, patches and projections sit, for every family of models."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attemper
from attemper.errors import NoSiteError
from attemper.sites import Geometry, Sites, find_sites
from attemper.sites.find import adapters
from contracts import blocks_of, every_family, original
from families import VIT, Family, SelfAttention, call, family, image, timm_model


def sites_of(family: Family) -> tuple[nn.Module, Sites]:
    model = original(family)
    return model, find_sites(model, family.targets)


# ------------------------------------------------------------------------------------- what the model itself computes
@dataclass
class Seen:
    """One attention call of the untempered model: in which module, over how many keys, with how many heads."""

    module: str
    keys: int
    heads: int


class Watch(TorchFunctionMode):
    """Writes down every attention call, and the innermost module that makes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Seen] = []
        self.inside = [""]
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.inside.append(name))
            module.register_forward_hook(self.leave)

    def leave(self, *_: Any) -> None:
        self.inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls.append(Seen(self.inside[-1], args[1].shape[2], args[0].shape[1]))
        elif func is F.multi_head_attention_forward:
            self.calls.append(Seen(self.inside[-1], args[1].shape[0], args[4]))
        elif func in (F.softmax, torch.softmax, Tensor.softmax) and args[0].dim() == 4:
            self.calls.append(Seen(self.inside[-1], args[0].shape[3], args[0].shape[1]))
        return func(*args, **kwargs)


def watch(family: Family) -> list[Seen]:
    model = original(family).train()
    with Watch(model) as watched:
        call(model, family.inputs())
    return watched.calls


def is_inside(name: str, site: str) -> bool:
    return name == site or name.startswith(f"{site}.")


# --------------------------------------------------------------------------------------------------------- attention
@every_family
def test_sites_are_the_modules_that_compute_attention(family: Family) -> None:
    _, sites = sites_of(family)
    calls = watch(family)
    assert len(sites.attentions) == family.attentions
    reached = [[site for site in sites.attentions if is_inside(seen.module, site.name)] for seen in calls]
    assert [len(found) for found in reached] == [1] * len(calls)
    assert {site.name for (site,) in reached} == {site.name for site in sites.attentions}
    for seen, (site,) in zip(calls, reached, strict=True):
        assert site.heads == seen.heads
        if site.geometry is not None:
            rows, columns = site.geometry.grid
            assert site.geometry.prefix + rows * columns == seen.keys


@every_family
def test_depth_is_the_true_position_in_the_network(family: Family) -> None:
    model, sites = sites_of(family)
    assert [site.block for site in sites.attentions] == blocks_of(family)
    assert [block.index for block in sites.blocks] == list(range(family.blocks))
    for block in sites.blocks:
        assert model.get_submodule(block.name) is block.module
    for site in sites.attentions:
        assert model.get_submodule(site.name) is site.module
        assert not sites.blocks[site.block].name or is_inside(site.name, sites.blocks[site.block].name)
    order = [site.block for seen in watch(family) for site in sites.attentions if is_inside(seen.module, site.name)]
    assert order == sorted(order)


@every_family
def test_grids_and_prefix_tokens_are_the_familys(family: Family) -> None:
    _, sites = sites_of(family)
    grids = dict.fromkeys(site.geometry.grid if site.geometry else None for site in sites.attentions)
    assert tuple(grids) == family.grids
    prefixes = tuple(site.geometry.prefix if site.geometry else 0 for site in sites.attentions)
    assert prefixes == (family.prefixes or (family.prefix,) * family.attentions)


def test_a_grid_need_not_be_square() -> None:
    model = timm_model("vit_tiny_patch16_224", **{**VIT, "img_size": (16, 32)})()
    assert {site.geometry for site in find_sites(model).attentions} == {Geometry((2, 4), prefix=1)}


@every_family
def test_a_tempered_model_has_the_sites_that_it_had_before(family: Family) -> None:
    model, before = sites_of(family)
    attemper.apply(model, "dropkey(0.1)", targets=family.targets)
    assert find_sites(model, family.targets) == before


# -------------------------------------------------------------------------------------------------------- projections
@every_family
def test_projections_fit_the_heads(family: Family) -> None:
    _, sites = sites_of(family)
    for site in sites.attentions:
        assert site.projections is not None
        q, k, v = (p.matrix() for p in (site.projections.q, site.projections.k, site.projections.v))
        assert q.shape[0] == k.shape[0]
        assert q.shape[0] % site.heads == v.shape[0] % site.heads == 0
        if site.projections.out is not None:
            assert site.projections.out.matrix().shape[1] == v.shape[0]
        assert len({part.data_ptr() for part in (q, k, v)}) == 3


@pytest.mark.parametrize("name", ["timm-vit", "hf-vit", "hf-bert", "hf-clip", "torchvision-vit", "nn-encoder"])
def test_projections_give_the_q_k_v_of_the_attention_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = original(family(name)).train()
    site = find_sites(model).attentions[0]
    received: list[tuple[Tensor, ...]] = []
    inputs: list[Tensor] = []
    attend = F.scaled_dot_product_attention

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        received.append(args[:3] or tuple(kwargs[key] for key in ("query", "key", "value")))
        return attend(*args, **kwargs)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else next(iter(kwargs.values())))

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    site.module.register_forward_pre_hook(enter, with_kwargs=True)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "bias" in key:
                parameter.zero_()
    call(model, family(name).inputs())
    (x, q, k, v), p = (inputs[0], *received[0]), site.projections
    for projection, got in zip((p.q, p.k, p.v), (q, k, v), strict=True):
        wanted = F.linear(x, projection.matrix()).unflatten(-1, (site.heads, -1)).transpose(1, 2)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_projections_of_attention_over_other_widths() -> None:
    site = find_sites(nn.MultiheadAttention(8, 2, kdim=4, vdim=12)).attentions[0]
    assert site.projections is not None
    shapes = [tuple(getattr(site.projections, name).matrix().shape) for name in "qkv"]
    assert shapes == [(8, 8), (8, 4), (8, 12)]


# --------------------------------------------------------------------------------------------------- MLPs and patches
@every_family
def test_every_block_has_its_mlp(family: Family) -> None:
    model, sites = sites_of(family)
    without = family.name in ("nn-mha", "hand-written")
    assert [mlp.block for mlp in sites.mlps] == ([] if without else list(range(family.blocks)))
    for mlp in sites.mlps:
        assert is_inside(mlp.name, sites.blocks[mlp.block].name)
        inner = list(model.get_submodule(mlp.name).modules())
        assert all(any(layer is module for module in inner) for layer in (*mlp.firsts, mlp.last))


@every_family
def test_an_mlps_input_enters_its_first_layers_and_leaves_its_last(family: Family) -> None:
    model, sites = sites_of(family)
    order: list[nn.Module] = []
    shapes: dict[nn.Module, tuple[torch.Size, torch.Size]] = {}

    def left(module: nn.Module, args: Any, out: Tensor) -> None:
        order.append(module)
        shapes[module] = args[0].shape, out.shape

    for mlp in sites.mlps:
        for layer in (*mlp.firsts, mlp.last):
            layer.register_forward_hook(left)
    call(model.train(), family.inputs())
    assert order == [layer for mlp in sites.mlps for layer in (*mlp.firsts, mlp.last)]
    for mlp in sites.mlps:
        entered, (hidden, end) = shapes[mlp.firsts[0]][0], shapes[mlp.last]
        assert entered == end
        gates = 2 if family.name == "timm-eva02" else 1
        assert sum(shapes[first][1][-1] for first in mlp.firsts) == gates * hidden[-1]


PATCHES = {
    "timm-pvtv2": None,  # patches that overlap
    "timm-volo": None,
    "timm-mvitv2": None,
    "timm-swin": 2,
    "timm-swinv2": 2,
    "hf-swin": 2,
    "torchvision-swin": 2,
    "hf-pvt": 4,
    "hf-detr": None,
    "hf-bert": None,
    "hf-whisper": None,
    "nn-encoder": None,
    "nn-decoder": None,
    "nn-mha": None,
    "hand-written": None,
}


@every_family
def test_patches_are_the_convolutions_that_cut_an_image(family: Family) -> None:
    model, sites = sites_of(family)
    size = PATCHES.get(family.name, 8)
    assert [site.patch for site in sites.patches] == ([] if size is None else [(size, size)])
    for site in sites.patches:
        assert model.get_submodule(site.name) is site.module
        assert site.module.kernel_size == site.module.stride == site.patch


# ------------------------------------------------------------------------------------------------------------ targets
HIDDEN = [F.scaled_dot_product_attention]


class Unrecognised(nn.Module):
    """Computes attention in a way that nothing gives away."""

    def forward(self, x: Tensor) -> Tensor:
        return HIDDEN[0](x, x, x)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Unrecognised() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("targets", "blocks"),
    [
        ("*", [0, 1, 2]),
        ("", [0, 1, 2]),
        ("blocks.1.attn", [1]),
        ("blocks.1", [1]),
        ("blocks.[12]*", [1, 2]),
        (["blocks.2.attn", "blocks.0"], [0, 2]),
        (("blocks.0", "blocks.0.attn", "blocks.0.*"), [0]),
        ("*.attn", [0, 1, 2]),
    ],
)
def test_targets_choose_attentions_and_leave_depth_and_grid_as_they_are(targets: Any, blocks: list[int]) -> None:
    sites = find_sites(original(family("timm-vit")), targets)
    assert [site.name for site in sites.attentions] == [f"blocks.{l}.attn" for l in blocks]
    assert [site.block for site in sites.attentions] == blocks
    assert len(sites.blocks) == 3
    assert {site.geometry for site in sites.attentions} == {Geometry((4, 4), prefix=1)}


def test_a_module_that_is_not_recognised_is_taken_at_its_word() -> None:
    model = Own()
    assert find_sites(model).attentions == ()
    sites = find_sites(model, "layers.*")
    assert [(site.name, site.block) for site in sites.attentions] == [("layers.0", 0), ("layers.1", 1)]
    attemper.apply(model, "dropkey(0.3)", targets="layers.*")
    x = torch.randn(2, 2, 9, 4)
    assert not torch.equal(model.train()(x), model.eval()(x))


@pytest.mark.parametrize("targets", ["nothing.*", ["blocks.0", "nothing.*"]])
def test_targets_that_match_nothing_are_an_error_that_names_them(targets: Any) -> None:
    with pytest.raises(NoSiteError, match=r"'nothing\.\*' matches no module.*patch_embed"):
        find_sites(original(family("timm-vit")), targets)


# --------------------------------------------------------------------------------------------------------- left alone
def test_outlook_attention_is_left_alone_with_a_reason() -> None:
    _, sites = sites_of(family("timm-volo"))
    assert list(sites.left_alone) == ["network.0.0.attn"]
    assert "without keys" in sites.left_alone["network.0.0.attn"]
    assert sites.blocks[0].name == "network.0.0", "its block counts all the same"


def pooled_vit() -> nn.Module:
    return timm_model("vit_tiny_patch16_224", **VIT, class_token=False, global_pool="map")()


def test_attention_outside_the_blocks_is_left_alone_and_can_be_named() -> None:
    model = pooled_vit()
    sites = find_sites(model)
    assert list(sites.left_alone) == ["attn_pool"]
    assert "targets=" in sites.left_alone["attn_pool"]
    assert [site.name for site in sites.attentions] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    named = find_sites(model, ["blocks.*", "attn_pool"])
    assert [site.name for site in named.attentions] == [*(site.name for site in sites.attentions), "attn_pool"]
    assert [site.block for site in named.attentions] == [0, 1, 2, 3]
    assert named.left_alone == {}


def test_attention_outside_the_blocks_is_tempered_where_it_is_named() -> None:
    model, x = pooled_vit(), image()()["args"][0]
    before = model.eval()(x)
    handle = attemper.apply(model, "dropkey(0.5)", targets="attn_pool")
    assert [row.site for row in handle.summary()] == ["attn_pool"]
    assert "left alone" not in str(handle)
    assert not torch.equal(model.train()(x), before)


def test_a_model_without_attention_has_no_attention_sites() -> None:
    class Attentive(nn.Module):
        """Called attention and ending in softmax, but without queries and keys: a gate."""

        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x * F.softmax(self.proj(x), -1)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Attentive(), nn.Linear(4, 5), nn.Softmax(-1))
    assert find_sites(model).attentions == ()


# ------------------------------------------------------------------------------------------ around and beyond models
class Wrapper(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.backbone(x))
        return out


@pytest.mark.parametrize("name", ["timm-vit", "timm-swin", "hf-vit", "torchvision-vit", "nn-encoder"])
def test_a_model_inside_a_users_module_keeps_grid_and_depth(name: str) -> None:
    inner, before = sites_of(family(name))
    sites = find_sites(Wrapper(inner))
    assert [f"backbone.{site.name}" for site in before.attentions] == [site.name for site in sites.attentions]
    for attribute in ("block", "geometry", "heads", "projections"):
        wanted = [getattr(site, attribute) for site in before.attentions]
        assert [getattr(site, attribute) for site in sites.attentions] == wanted
    assert len(sites.blocks) == len(before.blocks)
    assert len(sites.mlps) == len(before.mlps), "a classifier of two layers is no block's MLP"


def test_a_users_subclass_of_a_librarys_model_keeps_its_grid() -> None:
    from timm.models.vision_transformer import VisionTransformer

    class Mine(VisionTransformer):
        pass

    model = Mine(**VIT)
    assert {site.geometry for site in find_sites(model).attentions} == {Geometry((4, 4), prefix=1)}


class Strips:
    """Another package's adapter: it knows the grid of one class and calls another one no attention."""

    def geometry(self, owner: nn.Module, attention: nn.Module) -> Geometry | None:
        return Geometry((2, 5)) if isinstance(owner, SelfAttention) else None

    def leave_alone(self, module: nn.Module) -> str | None:
        return "it is no attention" if isinstance(module, Unrecognised) else None


@pytest.fixture
def _added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Entry:
        def load(self) -> Strips:
            return Strips()

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()] * (group == "attemper.sites"))
    adapters.cache_clear()
    yield
    adapters.cache_clear()


@pytest.mark.usefixtures("_added")
def test_another_package_adds_an_adapter_by_its_entry_point() -> None:
    assert find_sites(SelfAttention()).attentions[0].geometry == Geometry((2, 5))
    assert find_sites(Own()).left_alone == {f"layers.{i}": "it is no attention" for i in range(2)}
    assert find_sites(original(family("timm-vit"))).attentions[0].geometry == Geometry((4, 4), prefix=1)
    attemper.apply(SelfAttention(), "dropkey(0.1, structure=cross)")
