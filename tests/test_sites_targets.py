"""Which sites are taken: those that targets name, not what is left alone, and inside of whatever wraps a model."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError
from attemper.sites import Geometry, find_sites
from attemper.sites.find import adapters
from contracts import original
from families import VIT, SelfAttention, family, image, timm_model
from test_sites import sites_of

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
