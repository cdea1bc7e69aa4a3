"""Models by name: the papers' sizes, sites that methods find, skips that can be left out, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attemper
from attemper.errors import ParameterError
from attemper.lab.models.convmixer import ConvMixer
from attemper.lab.models.registry import build_model, list_models
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.patch_size import patch_for
from attemper.tempering.outputs import logits_of

DIGITS = InputShape(channels=1, height=8, width=8, classes=10)
CIFAR = InputShape(channels=3, height=32, width=32, classes=100)
VITS = ["vit-digits", "vit-cifar", "vit-tiny", "vit-small", "vit-base"]
HF = "hf:vit(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, patch_size=4)"
SMALL = [
    ("vit-digits", DIGITS),
    ("vit-cifar(depth=2, width=48, mlp=48)", CIFAR),
    ("convmixer(width=16, depth=2)", CIFAR),
    ("resnet(width=4, depth=8)", CIFAR),
    ("resnet(width=4, depth=8, skip=False)", DIGITS),
    ("timm:vit_tiny_patch16_224(patch_size=4, depth=2)", CIFAR),
    ("timm:resnet10t", CIFAR),
    (HF, CIFAR),
]


@pytest.mark.parametrize(("text", "shape"), SMALL)
def test_a_model_gives_one_logit_per_class(text: str, shape: InputShape) -> None:
    model = build_model(text, shape)
    out = logits_of(model(torch.randn(2, shape.channels, shape.height, shape.width)))
    assert out.shape == (2, shape.classes)


@pytest.mark.parametrize(("text", "shape"), SMALL)
def test_initial_weights_are_a_function_of_torchs_seed(text: str, shape: InputShape) -> None:
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(build_model(text, shape).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert any(not torch.equal(models[0][name], models[2][name]) for name in models[0])


@pytest.mark.parametrize("name", VITS)
def test_every_method_finds_its_sites_in_our_vits(name: str) -> None:
    model = build_model(f"{name}(depth=2)", DIGITS)
    recipe = "dropkey(0.1) + cb + explicit(v=5e-4, ff=5e-4) + droppath(0.1) + graying + ffdropout(0.1)"
    tempered = attemper.apply(model, recipe)
    assert {row.method for row in tempered.summary()} == {part.partition("(")[0].strip() for part in recipe.split("+")}
    tempered.loss(lambda: model.train()(torch.randn(2, 1, 8, 8)), lambda out: out.sum()).backward()


def test_the_cifar_model_has_the_sizes_of_the_paper() -> None:
    model = build_model("vit-cifar", CIFAR)
    block = model.blocks[0]
    assert len(model.blocks) == 7
    assert block.attn.num_heads == 12
    assert (block.mlp.fc1.in_features, block.mlp.fc1.out_features) == (384, 384)
    assert model.pos_embed.shape == (1, 65, 384)


@pytest.mark.parametrize(("name", "width", "heads"), [("tiny", 192, 3), ("small", 384, 6), ("base", 768, 12)])
def test_the_vits_for_small_images_have_their_usual_widths(name: str, width: int, heads: int) -> None:
    model = build_model(f"vit-{name}(depth=1)", CIFAR)
    assert (model.embed_dim, model.blocks[0].attn.num_heads) == (width, heads)
    assert model.blocks[0].mlp.fc1.out_features == 4 * width
    assert model.pos_embed.shape[1] == 65


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (28, 4), (32, 4), (64, 8), (96, 12), (17, 1)])
def test_patches_are_about_an_eighth_of_the_side_and_fit(side: int, patch: int) -> None:
    assert patch_for(InputShape(3, side, side, 10)) == patch


def test_images_need_not_be_square() -> None:
    model = build_model("vit-cifar(depth=1, patch=4)", InputShape(channels=1, height=16, width=32, classes=3))
    assert model(torch.randn(2, 1, 16, 32)).shape == (2, 3)


def test_leaving_a_skip_out_changes_that_sum_and_no_weight() -> None:
    inputs = torch.randn(2, 3, 32, 32)
    models = {}
    for spatial in (True, False):
        for channel in (True, False):
            torch.manual_seed(0)
            text = f"convmixer(width=8, depth=1, spatial_skip={spatial}, channel_skip={channel})"
            model = build_model(text, CIFAR).eval()
            assert isinstance(model, ConvMixer)
            models[spatial, channel] = model
    whole = models[True, True]
    block, x = whole.blocks[0], whole.patches(inputs)
    for (spatial, channel), model in models.items():
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))
        mixed = block.spatial(x) + (x if spatial else 0)
        expected = block.channel(mixed) + (mixed if channel else 0)
        assert torch.allclose(model.blocks(model.patches(inputs)), expected, atol=1e-6)


def test_the_resnet_is_that_of_the_paper() -> None:
    shape = InputShape(channels=3, height=32, width=32, classes=10)
    model = build_model("resnet", shape)
    assert sum(layer.weight.dim() > 1 for layer in model.modules() if hasattr(layer, "weight")) == 20
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    widths = [(16, 16)] * 6 + [(16, 32)] + [(32, 32)] * 5 + [(32, 64)] + [(64, 64)] * 5
    assert weights == 9 * (3 * 16 + sum(given * width for given, width in widths)) + 64 * 10  # 0.27 million
    assert model.blocks(model.stem(torch.randn(2, 3, 32, 32))).shape == (2, 64, 8, 8)


def test_a_resnet_without_skips_has_the_same_weights_and_no_identity_anywhere() -> None:
    models = {}
    for skip in (True, False):
        torch.manual_seed(0)
        models[skip] = build_model(f"resnet(width=4, depth=8, skip={skip})", CIFAR).eval()
    assert all(torch.equal(a, b) for a, b in zip(models[True].parameters(), models[False].parameters(), strict=True))
    x = torch.randn(2, 4, 32, 32)
    with torch.no_grad():
        for given, block, bare in zip((4, 4, 8), models[True].blocks, models[False].blocks, strict=True):
            branch = block.branch(x)
            shortcut = torch.zeros_like(branch)
            step = x.shape[2] // branch.shape[2]
            shortcut[:, :given] = x[:, :, ::step, ::step]
            assert torch.equal(bare(x), branch.clamp(min=0))
            assert torch.equal(block(x), (shortcut + branch).clamp(min=0))
            x = block(x)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vit-cifr", "no model 'vit-cifr'. Did you mean 'vit-cifar'"),
        ("vit-cifar(dpth=3)", "no option 'dpth'. Did you mean 'depth'"),
        ("vit-cifar(depth=0)", "depth is 0; it must be a whole number"),
        ("vit-cifar(width=50)", "width is 50 and heads is 12"),
        ("vit-cifar(patch=5)", "patch is 5; images of 32 × 32 cannot be cut"),
        ("vit-cifar(pool=max)", "pool is 'max'"),
        ("convmixer(kernel=4)", "kernel is 4; it must be odd"),
        ("convmixer(channel_skip=1)", "channel_skip is 1; it must be true or false"),
        ("resnet(depth=18)", r"depth is 18; it must be 6n \+ 2, such as 8, 14, 20"),
        ("resnet(depth=2)", r"depth is 2; it must be 6n \+ 2"),
        ("resnet(skip=0)", "skip is 0; it must be true or false"),
        ("resnet(width=0)", "width is 0; it must be a whole number"),
        ("timm:vit_tiny_patch16_24", "Did you mean 'vit_tiny_patch16_224'"),
        ("timm:vit_tiny_patch16_224(dpth=2)", "no option 'dpth'. Did you mean 'depth'"),
        ("timm:vit_tiny_patch16_224(num_heads=5)", "timm could not build"),
        ("hf:vitt", "no image classifier of the model type 'vitt'. Did you mean 'vit'"),
        ("hf:vit(hiddn_size=3)", "has no 'hiddn_size'. Did you mean 'hidden_size'"),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(text, CIFAR)


def test_every_own_model_is_listed_with_a_line_about_it() -> None:
    assert {*VITS, "convmixer", "resnet"} <= set(list_models())
    assert all(list_models().values())


@pytest.mark.parametrize("name", VITS[1:])
def test_drop_path_rises_over_the_blocks_and_is_none_unless_asked(name: str) -> None:
    small = "width=8, depth=3, heads=2, mlp=8"

    def rates(options: str) -> list[float]:
        model: Any = build_model(f"{name}({small}{options})", DIGITS)
        return [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]

    assert rates(", drop_path=0.2") == pytest.approx([0.0, 0.1, 0.2])
    assert rates("") == [0.0] * 3
    with pytest.raises(ParameterError, match="drop_path is 1"):
        rates(", drop_path=1.0")
