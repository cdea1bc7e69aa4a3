"""T2T-ViT, CeiT and LocalViT: published sizes, and what each of their parts computes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.ceit import LocallyEnhancedFeedForward
from attemper.lab.models.localvit import LocalBlock, LocalFeedForward
from attemper.lab.models.registry import build_model
from attemper.lab.models.t2t_vit import (
    PerformerMixing,
    TokenAttention,
    TokensToToken,
    sinusoids,
    soft_split,
    strides_of,
)
from attemper.lab.tasks.base import InputShape
from attemper.tempering.outputs import logits_of

IMAGENET = InputShape(channels=3, height=224, width=224, classes=1000)
DIGITS = InputShape(channels=1, height=8, width=8, classes=10)
CIFAR = InputShape(channels=3, height=32, width=32, classes=10)
WIDE = InputShape(channels=2, height=16, width=32, classes=3)


@pytest.mark.parametrize(
    ("text", "millions"),
    [
        ("t2t-vit-7(patch=16)", 4.3),
        ("t2t-vit-12(patch=16)", 6.9),
        ("t2t-vit-14(patch=16)", 21.5),
        ("t2t-vit-14(patch=16, tokens=transformer)", 21.5),
        ("t2t-vit-19(patch=16)", 39.2),
        ("t2t-vit-24(patch=16)", 64.1),
        ("ceit-tiny(patch=16)", 6.4),
        ("ceit-small(patch=16)", 24.2),
        ("localvit-tiny(patch=16)", 5.9),
        ("localvit-tiny(patch=16, squeezed=192)", 9.4),
        ("localvit-small(patch=16)", 22.4),
    ],
)
def test_models_have_as_many_weights_as_their_papers_give(text: str, millions: float) -> None:
    with torch.device("meta"):
        model = build_model(text, IMAGENET)
    frozen = [buffer for name, buffer in model.named_buffers() if name.endswith(("pos_embed", "directions"))]
    assert round(sum(each.numel() for each in (*model.parameters(), *frozen)) / 1e6, 1) == millions


def test_names_without_a_size_are_the_smallest_that_are_published() -> None:
    with torch.device("meta"):
        for name, size in (("t2t-vit", "t2t-vit-7"), ("ceit", "ceit-tiny"), ("localvit", "localvit-tiny")):
            plain, sized = build_model(name, IMAGENET), build_model(size, IMAGENET)
            shapes = [[(key, value.shape) for key, value in each.state_dict().items()] for each in (plain, sized)]
            assert shapes[0] == shapes[1]


@pytest.mark.parametrize("shape", [DIGITS, CIFAR, WIDE], ids=str)
@pytest.mark.parametrize("text", ["t2t-vit", "t2t-vit(tokens=transformer)", "ceit", "localvit(squeeze_excite=false)"])
def test_small_ones_take_small_images_and_everything_in_them_learns(text: str, shape: InputShape) -> None:
    small = "width=24, depth=2, heads=3, mlp=32"
    model = build_model(f"{text[:-1]}, {small})" if text.endswith(")") else f"{text}({small})", shape)
    out = logits_of(model(torch.randn(2, shape.channels, shape.height, shape.width)))
    assert out.shape == (2, shape.classes)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("localvit(width=50, heads=4)", "width is 50 and heads is 4"),
        ("ceit(patch=5)", "patch is 5; images of 32 × 32 cannot be cut"),
        ("t2t-vit(tokens=convolution)", "tokens is 'convolution'; it must be 'performer' or 'transformer'"),
        ("localvit(activation=gelu)", "activation is 'gelu'; it must be 'hswish' or 'relu6'"),
        ("localvit(squeezed=0)", "squeezed is 0; it must be a whole number, at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(text, CIFAR)


# ------------------------------------------------------------------------------------------------------------- T2T-ViT
@pytest.mark.parametrize("patch", [1, 2, 3, 4, 6, 8, 12, 16, 32])
def test_soft_splits_together_give_as_many_tokens_as_patches_would(patch: int) -> None:
    side = 2 * patch if patch > 1 else 5
    image = torch.zeros(1, 1, side, side)
    for stride in strides_of(patch):
        split = soft_split(stride)
        assert int(split.kernel_size) > stride  # pieces overlap
        tokens = split(image).shape[2]
        image = torch.zeros(1, 1, image.shape[2] // stride, image.shape[3] // stride)
        assert tokens == image[0, 0].numel()
    assert image.shape[2] == side // patch


def test_the_tokens_to_token_module_sees_overlapping_pieces_of_the_image() -> None:
    module = TokensToToken(WIDE, 4, 12, 8, "transformer").double()
    image = torch.randn(1, 2, 16, 32, dtype=torch.double, requires_grad=True)
    cut = module.split1(image).transpose(1, 2)
    assert cut.shape == (1, 8 * 16, 2 * 9)
    rows = F.pad(image, (1, 1, 1, 1))[0, :, 4:7, 10:13]  # of the token in row 2, column 5
    assert torch.equal(cut[0, 2 * 16 + 5], rows.flatten())
    assert module(image).shape == (1, 4 * 8, 12)


def test_attention_over_tokens_adds_the_values_to_what_it_gives() -> None:
    module = TokenAttention(6, 4).double()
    x = torch.randn(2, 5, 6, dtype=torch.double)
    q, k, v = (x @ part.T for part in module.qkv.weight.chunk(3))
    wanted = v + module.proj((q @ k.mT / 2).softmax(-1) @ v)
    assert torch.allclose(module(x), wanted, atol=1e-12)


def test_a_performer_weighs_values_by_products_of_features() -> None:
    module = PerformerMixing(6, 4).double()
    x = torch.randn(2, 5, 6, dtype=torch.double)
    k, q, v = F.linear(x, module.kqv.weight, module.kqv.bias).chunk(3, dim=-1)

    def feature(x: Tensor) -> Tensor:
        return torch.exp(x @ module.directions.T - (x * x).sum(-1, keepdim=True) / 2) / len(module.directions) ** 0.5

    weights = feature(q) @ feature(k).mT
    wanted = v + module.proj(weights @ v / (weights.sum(-1, keepdim=True) + 1e-8))
    assert torch.allclose(module(x), wanted, atol=1e-12)


def test_positions_are_sines_and_cosines() -> None:
    rate = 10000 ** (-2 / 6)
    wanted = [math.sin(3), math.cos(3), math.sin(3 * rate), math.cos(3 * rate)]
    assert torch.allclose(sinusoids(5, 6)[0, 3, :4], torch.tensor(wanted), atol=1e-6)


# ------------------------------------------------------------------------------------------------------ CeiT, LocalViT
def test_the_class_token_passes_by_the_convolutions_of_ceit() -> None:
    module = LocallyEnhancedFeedForward(6, 8, (2, 3))
    x = torch.randn(2, 7, 6)
    out = module(x)
    assert torch.equal(out[:, 0], x[:, 0])
    changed = x.clone()
    changed[:, 0] += 1
    assert torch.equal(module(changed)[:, 1:], out[:, 1:])


def test_the_class_token_passes_by_the_feed_forward_network_of_localvit() -> None:
    block = LocalBlock(6, 2, (2, 3), LocalFeedForward(6, 8, 2, "hswish")).eval()
    x = torch.randn(2, 7, 6)
    attended = x + block.attn(block.norm1(x))
    out = block(x)
    assert torch.equal(out[:, 0], attended[:, 0])
    assert not torch.allclose(out[:, 1:], attended[:, 1:])


@pytest.mark.parametrize("squeezed", [None, 2])
def test_the_feed_forward_network_of_localvit_is_three_convolutions(squeezed: int | None) -> None:
    module = LocalFeedForward(6, 8, squeezed, "relu6").eval().double()
    x = torch.randn(2, 6, 3, 4, dtype=torch.double)
    hidden = (module.norm1(torch.einsum("oi,bihw->bohw", module.conv1.weight[..., 0, 0], x))).clamp(0, 6)
    padded = F.pad(hidden, (1, 1, 1, 1))
    local = sum(
        padded[:, :, i : i + 3, j : j + 4] * module.depthwise.weight[:, 0, i, j, None, None]
        for i in range(3)
        for j in range(3)
    )
    hidden = module.norm2(local).clamp(0, 6)
    if squeezed is not None:
        squeeze = module.squeeze
        gate = squeeze.fc2(squeeze.fc1(hidden.mean((2, 3))).clamp_min(0))
        hidden = hidden * ((gate + 3).clamp(0, 6) / 6)[..., None, None]
    wanted = module.norm3(torch.einsum("oi,bihw->bohw", module.conv2.weight[..., 0, 0], hidden))
    assert torch.allclose(module(x), wanted, atol=1e-12)


def test_ceit_classifies_by_the_class_tokens_of_all_layers() -> None:
    model = build_model("ceit(width=12, depth=3, heads=3)", DIGITS).eval()
    seen: list[Tensor] = []
    model.over_layers.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    blocks: list[Tensor] = []
    for block in model.blocks:
        assert isinstance(block, nn.Module)
        block.register_forward_hook(lambda module, args, out: blocks.append(out[:, 0]))
    model(torch.randn(2, 1, 8, 8))
    assert torch.equal(seen[0], torch.stack(blocks, 1) + model.layer_embed)
