"""The image grid of an attention's keys where it shows only when the model runs, and never a guess."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import ParameterError
from attemper.methods.base import Method, Paper
from attemper.methods.dropkey import DropKey
from attemper.ops.perturbation import Perturbation, drop_logits
from attemper.sites import find_sites
from families import VIT, build, build_detr, family, hf, timm_model
from families.transformers_models import HF_IMAGE

Found = list[tuple[tuple[int, int], int]]
PYRAMID = {"depths": (1, 1, 1, 1), "embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 2, 3)}
HF_PYRAMID = {"depths": [1] * 4, "hidden_sizes": [16, 24, 32, 48], "num_attention_heads": [1, 2, 2, 3]}
DYNAMIC = {**VIT, "depth": 1, "dynamic_img_size": True}


def images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Every grid that a method is given while a model runs, without repeats."""
    seen: Found = []
    plain = DropKey.on_grid

    def spy(self: DropKey, grid: tuple[int, int], prefix: int) -> DropKey:
        if (grid, prefix) not in seen:
            seen.append((grid, prefix))
        return plain(self, grid, prefix)

    monkeypatch.setattr(DropKey, "on_grid", spy)
    return seen


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Found]] = {
    # 64 × 128 pixels in patches of 4, 8, 16, 32; keys are reduced 8, 4, 2, 1 times more
    "timm pvt_v2": (timm_model("pvt_v2_b0", **PYRAMID), {"args": (images(64, 128),)}, [((2, 4), 0)]),
    # keys are pooled to 7 × 7 wherever they come from
    "timm pvt_v2, linear": (timm_model("pvt_v2_b2_li", **PYRAMID), {"args": (images(64, 96),)}, [((7, 7), 0)]),
    # 16 × 64 pixels in patches of 8: as many as the 4 × 4 that the model was built for
    "timm vit, any size": (timm_model("vit_tiny_patch16_224", **DYNAMIC), {"args": (images(16, 64),)}, [((2, 8), 1)]),
    "timm dinov2, registers": (
        timm_model("vit_small_patch14_reg4_dinov2", **DYNAMIC),
        {"args": (images(64, 16),)},
        [((8, 2), 5)],
    ),
    "hf vit, interpolated": (
        hf("ViTConfig", "ViTModel", **HF_IMAGE),
        {"pixel_values": images(16, 64), "interpolate_pos_encoding": True},
        [((2, 8), 1)],
    ),
    "hf dinov2, registers": (
        hf("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", **HF_IMAGE),
        {"pixel_values": images(16, 64)},
        [((2, 8), 5)],
    ),
    # 64 × 64: the last stage has a class token
    "hf pvt": (family("hf-pvt").build, {"pixel_values": images(64, 64)}, [((2, 2), 0), ((2, 2), 1)]),
    "hf pvt_v2": (
        hf("PvtV2Config", "PvtV2ForImageClassification", image_size=64, **HF_PYRAMID),
        {"pixel_values": images(64, 128)},
        [((2, 4), 0)],
    ),
    "hf segformer": (
        hf("SegformerConfig", "SegformerModel", **HF_PYRAMID),
        {"pixel_values": images(64, 128)},
        [((2, 4), 0)],
    ),
    # windows of 7 × 7, however small the map; then the whole map, reduced 8, 4, 2, 1 times
    "timm twins": (
        timm_model(
            "twins_svt_small", img_size=64, depths=(2, 2, 2, 2), embed_dims=(16, 24, 32, 48), num_heads=(1,) * 4
        ),
        {"args": (images(64, 96),)},
        [((2, 3), 0)],
    ),
    "timm mvitv2": (family("timm-mvitv2").build, family("timm-mvitv2").inputs(), [((2, 2), 0), ((4, 4), 0)]),
}
SLOW = ("hf dinov2, registers", "timm pvt_v2, linear", "timm mvitv2", "hf pvt", "timm dinov2, registers")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS])
def test_the_grid_of_the_keys_is_found_while_a_model_runs(name: str, found: Found) -> None:
    make, inputs, wanted = MODELS[name]
    model = make().train()
    attemper.apply(model, "dropkey(0.3, structure=block, w=1)")
    found.clear()
    model(*inputs.get("args", ()), **{key: value for key, value in inputs.items() if key != "args"})
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    ("recipe", "by_hand"),
    [
        ("dropkey(0.4, structure=cross)", "dropkey(0.4, structure=cross, grid=[2, 4], prefix=0)"),
        ("blur(2.0, grid=2d)", "blur(2.0, grid=2d, size=[2, 4], prefix=0)"),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_it_is_as_if_the_grid_had_been_given_by_hand(recipe: str, by_hand: str, fused: bool) -> None:
    torch.manual_seed(0)
    model = timm_model("pvt_v2_b0", **PYRAMID)().train()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    outputs = []
    for text in (recipe, by_hand, recipe.replace("cross", "block, w=1").replace("2d", "raster")):
        tempered = attemper.apply(model, text)
        torch.manual_seed(1)
        outputs.append(model(images(64, 128)))
        tempered.remove()
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_the_keys_of_detr_lie_on_its_feature_map_and_its_queries_on_none(found: Found) -> None:
    model = build_detr().train()
    with pytest.raises(ParameterError, match=r"none is known for 'model\.decoder\.layers\.0\.self_attn'"):
        attemper.apply(model, "dropkey(0.3, structure=block)")
    attemper.apply(model, "dropkey(0.3, structure=block)", targets=["model.encoder.*", "*.encoder_attn"])
    for height, width in ((32, 64), (64, 32), (48, 48)):
        found.clear()
        model(pixel_values=images(height, width))
        assert found == [((height // 8, width // 8), 0)]


def test_pit_halves_its_grid_in_every_stage() -> None:
    model = timm_model("pit_ti_224", img_size=(32, 48), patch_size=8, stride=4, base_dims=(8,) * 3, depth=(1,) * 3,
                       heads=(1, 2, 4))().train()  # fmt: skip
    keys: list[int] = []
    sites = find_sites(model).attentions
    for site in sites:
        site.module.register_forward_pre_hook(lambda module, args: keys.append(args[0].shape[1]))
    attemper.apply(model, "dropkey(0.3, structure=block, w=1) + blur(grid=2d)")
    model(images(32, 48))
    geometries = [site.geometry for site in sites if site.geometry is not None]
    assert [geometry.grid for geometry in geometries] == [(7, 11), (4, 6), (2, 3)]
    assert [1 + rows * columns for rows, columns in (geometry.grid for geometry in geometries)] == keys


# ------------------------------------------------------------------------------------------------------- never a guess
class Windows(nn.Module):
    """Attention in windows of 2 × 8, to which the map is padded, and whose size it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        rows = size[0]
        padded = F.pad(x.unflatten(1, size), (0, 0, 0, 0, 0, rows % 2))
        parts = padded.unflatten(1, (-1, 2)).unflatten(3, (-1, 8)).transpose(2, 3)
        q, k, v = self.qkv(parts.flatten(0, 2).flatten(1, 2))[:, None].chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v)[:, 0].view(parts.shape).transpose(2, 3)
        return out.flatten(3, 4).flatten(1, 2)[:, :rows].flatten(1, 2)


class Reduced(nn.Module):
    """Keys by a convolution that gives as many of them as the map has columns in another shape."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.q, self.kv, self.sr = nn.Linear(8, 8), nn.Linear(8, 16), nn.Conv2d(8, 8, (2, 1), (2, 1))

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        map_ = x.mT.unflatten(2, (height, width))
        small = self.sr(map_)
        F.adaptive_avg_pool2d(map_, (self.rows, small[0, 0].numel() // self.rows))  # which is not used
        k, v = self.kv(small.flatten(2).mT)[:, None].chunk(2, -1)
        return F.scaled_dot_product_attention(self.q(x)[:, None], k, v)[:, 0]


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([attention])

    def forward(self, x: Tensor, *size: Any) -> Tensor:
        out: Tensor = x + self.blocks[0](x, *size)
        return out


def test_windows_are_not_taken_for_the_map_that_has_as_many_places() -> None:
    """A map of 1 × 16, padded to 2 × 16, has the 16 places of each of its two windows; a map of 2 × 8 is a window."""
    model = Model(Windows()).train()
    attemper.apply(model, "dropkey(0.3, structure=block, w=1)", targets=["blocks.*"])
    with pytest.raises(ParameterError, match="16 keys in this call, and on which image grid they lie is not known"):
        model(torch.randn(2, 16, 8), (1, 16))
    model(torch.randn(2, 16, 8), (2, 8))


@pytest.mark.parametrize(("rows", "fits"), [(2, True), (4, False)])
def test_two_maps_that_fit_are_refused(rows: int, fits: bool, found: Found) -> None:
    model = Model(Reduced(rows)).train()
    attemper.apply(model, "dropkey(0.3, structure=block, w=1)", targets=["blocks.*"])
    x = torch.randn(2, 4 * 4, 8)
    if fits:
        model(x, 4, 4)
        assert found == [((2, 4), 0)]
        return
    with pytest.raises(ParameterError, match="maps seen were 4 × 4, 2 × 4, 4 × 2, and more than one of them fits"):
        model(x, 4, 4)


def test_a_prefix_in_the_recipe_is_kept(found: Found) -> None:
    model = timm_model("pvt_v2_b0", **PYRAMID)().train()
    attemper.apply(model, "dropkey(0.3, structure=block, w=1, prefix=1)")
    with pytest.raises(ParameterError, match=r"8 keys in this call.*none of them and 1 before it make so many"):
        model(images(64, 128))


def test_where_a_grid_is_asked_for_nothing_else_changes() -> None:
    """Neither what a model computes in eval mode, nor its classes after remove."""
    model = build(family("timm-pvtv2"))
    classes = [type(module) for module in model.modules()]
    wanted = model.eval()(images(64, 64))
    tempered = attemper.apply(model, "dropkey(0.3, structure=block, w=1)")
    assert torch.equal(model(images(64, 64)), wanted)
    tempered.remove()
    assert [type(module) for module in model.modules()] == classes


@dataclasses.dataclass(frozen=True)
class DropFirstRow(Method, Perturbation):
    """A method as another package may write it: it acts on the first row of the grid, wherever that is."""

    name: ClassVar[str] = "dropfirstrow"
    summary: ClassVar[str] = "never look at the first row of the image"
    paper: ClassVar[Paper] = Paper("none", "nowhere")
    grid: tuple[int, int] | None = None
    prefix: int = 0

    @property
    def seeks_grid(self) -> bool:
        return self.grid is None

    def on_grid(self, grid: tuple[int, int], prefix: int) -> DropFirstRow:
        return dataclasses.replace(self, grid=grid, prefix=prefix)

    def perturb_logits(self, logits: Tensor, allowed: Tensor | None, stream: Any) -> tuple[Tensor, Tensor | None]:
        assert self.grid is not None
        key = torch.arange(logits.shape[-1]) - self.prefix
        return drop_logits(logits, (key < 0) | (key >= self.grid[1]), allowed)


def test_a_method_of_another_package_is_given_the_grid_too() -> None:
    """In a PVT of one stage the keys of the first row get no gradient, and those of the second do."""
    model = timm_model("pvt_v2_b0", **{key: value[:1] for key, value in PYRAMID.items()})().train()
    keys: list[Tensor] = []

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        out.retain_grad()
        keys.append(out)

    model.stages[0].blocks[0].attn.kv.register_forward_hook(note)
    attemper.apply(model, DropFirstRow())
    model(images(64, 96)).sum().backward()
    assert keys[0].shape[1] == 2 * 3
    assert keys[0].grad is not None
    reached = keys[0].grad.abs().sum((0, 2)) > 0
    assert reached.tolist() == [False] * 3 + [True] * 3


def two_passes(model: nn.Module, recipe: str, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The gradients of one backward behind two passes, of wide images and of high ones that have as many patches."""
    tempered = attemper.apply(model, recipe)
    torch.manual_seed(1)
    wide, high = run(images(16, 64)), run(images(64, 16))
    gradients = torch.autograd.grad(wide.square().sum() + high.sum(), list(model.parameters()), allow_unused=True)
    tempered.remove()
    return [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("recipe", ["blur(2.0, grid=2d)", "dropkey(0.3, structure=cross)"])
def test_what_is_computed_again_has_the_grid_of_its_own_pass(recipe: str, part: bool) -> None:
    """Of the whole model, and of a part that is run without the model round it."""
    model = timm_model("vit_tiny_patch16_224", **DYNAMIC)().double().train()

    def run(x: Tensor) -> Tensor:
        out: Tensor = model.forward_features(x.double()) if part else model(x.double())
        return out

    plain = two_passes(model, recipe, run)
    model.set_grad_checkpointing()
    for one, other in zip(plain, two_passes(model, recipe, run), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dropkey(0.3, structure=block, w=1)", "blur(2.0, grid=2d)"])
def test_compiled_and_eager_find_the_same(recipe: str) -> None:
    make = functools.partial(timm_model("vit_tiny_patch16_224", **DYNAMIC))
    model = make().train()
    attemper.apply(model, recipe)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager_default_partitioner", fullgraph=True)
    for size in ((16, 64), (64, 16)):
        outputs = []
        for each in (model, compiled):
            torch.manual_seed(1)
            outputs.append(each(images(*size)))
        assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6)
