"""CUDA graphs of parts of a model: every replay draws the masks of its own pass, those that eager code draws."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import attemper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RECIPES = ["dropkey(0.5)", "hardmask(0.5) + droppath(0.3)", "dropkey(0.3) + ffdropout(0.2)"]


def make_vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 2, "num_classes": 10}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **sizes)
    return model.cuda().train()


def passes(model: nn.Module, images: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Logits, and the gradient of the first weight, of one pass for each batch."""
    found = []
    for seed, x in enumerate(images):
        torch.compiler.cudagraph_mark_step_begin()
        torch.manual_seed(seed)
        out = model(x)
        out.square().mean().backward()
        weight = next(model.parameters())
        assert weight.grad is not None
        found.append((out.detach().clone(), weight.grad.clone()))
        model.zero_grad()
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_that_are_captured_one_by_one_draw_the_masks_of_the_pass(recipe: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    images = [torch.randn(4, 3, 32, 32, device="cuda") for _ in range(6)]
    plain = make_vit()
    captured = copy.deepcopy(plain)
    attemper.apply(plain, recipe)
    attemper.apply(captured, recipe)
    blocks: nn.Module = captured.blocks  # type: ignore[assignment]
    for block in blocks:
        block.compile(mode="reduce-overhead")
    for ours, theirs in zip(passes(captured, images), passes(plain, images), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_replays_of_a_captured_block_draw_new_masks() -> None:
    torch._dynamo.reset()
    model = make_vit()
    attemper.apply(model, "dropkey(0.5)")
    blocks: nn.Module = model.blocks  # type: ignore[assignment]
    for block in blocks:
        block.compile(mode="reduce-overhead")
    x = torch.randn(4, 3, 32, 32, device="cuda")
    outs = [out for out, _ in passes(model, [x] * 6)]
    assert all(not torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])
