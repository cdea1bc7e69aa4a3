"""Where attention, MLPs, blocks, patches and projections sit, for every family of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attemper
from attemper.sites import Geometry, Sites, find_sites
from contracts import blocks_of, original, recognised_families
from families import VIT, Family, call, family, timm_model


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
@recognised_families
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


@recognised_families
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


@recognised_families
def test_grids_and_prefix_tokens_are_the_familys(family: Family) -> None:
    _, sites = sites_of(family)
    grids = dict.fromkeys(site.geometry.grid if site.geometry else None for site in sites.attentions)
    assert tuple(grids) == family.grids
    prefixes = tuple(site.geometry.prefix if site.geometry else 0 for site in sites.attentions)
    assert prefixes == (family.prefixes or (family.prefix,) * family.attentions)


def test_a_grid_need_not_be_square() -> None:
    model = timm_model("vit_tiny_patch16_224", **{**VIT, "img_size": (16, 32)})()
    assert {site.geometry for site in find_sites(model).attentions} == {Geometry((2, 4), prefix=1)}


@recognised_families
def test_a_tempered_model_has_the_sites_that_it_had_before(family: Family) -> None:
    model, before = sites_of(family)
    attemper.apply(model, "dropkey(0.1)", targets=family.targets)
    assert find_sites(model, family.targets) == before


# -------------------------------------------------------------------------------------------------------- projections
@recognised_families
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
@recognised_families
def test_every_block_has_its_mlp(family: Family) -> None:
    model, sites = sites_of(family)
    without = family.name in ("nn-mha", "hand-written")
    assert [mlp.block for mlp in sites.mlps] == ([] if without else list(range(family.blocks)))
    for mlp in sites.mlps:
        assert is_inside(mlp.name, sites.blocks[mlp.block].name)
        inner = list(model.get_submodule(mlp.name).modules())
        assert all(any(layer is module for module in inner) for layer in (*mlp.firsts, mlp.last))


@recognised_families
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
    "timm-pvtv2": 4,  # patches that overlap
    "timm-mvitv2": 4,
    "timm-pit": 2,
    "lab-t2t": 4,
    "lab-localvit": 4,
    "timm-swin": 2,
    "timm-swinv2": 2,
    "hf-swin": 2,
    "torchvision-swin": 2,
    "hf-pvt": 4,
    "hf-detr": None,
    "hf-segformer": 4,
    "hf-bert": None,
    "hf-whisper": None,
    "nn-encoder": None,
    "nn-decoder": None,
    "nn-mha": None,
    "hand-written": None,
}


OVERLAPPING = ("timm-pvtv2", "timm-volo", "timm-mvitv2", "timm-pit", "lab-t2t", "hf-segformer")


@recognised_families
def test_patches_are_the_convolutions_that_cut_an_image(family: Family) -> None:
    model, sites = sites_of(family)
    size = PATCHES.get(family.name, 8)
    assert [site.patch for site in sites.patches] == ([] if size is None else [(size, size)])
    for site in sites.patches:
        assert model.get_submodule(site.name) is site.module
        assert site.overlaps == (family.name in OVERLAPPING)
        assert site.overlaps or site.module.kernel_size == site.module.stride == site.patch
