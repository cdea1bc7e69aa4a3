"""Tempered models on a GPU: which kernel computes attention that nothing perturbs."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import attemper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


OURS = ("attemper::fused_attention", "attemper::packed_attention", "attemper::penalised_attention")


class Ours(TorchDispatchMode):
    """Counts the calls of our forward kernel, for three tensors or for one, looked on by penalties or not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.name() in OURS
        return func(*args, **(kwargs or {}))


def step(model: nn.Module, handle: attemper.Tempered, images: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """One pass forward and backward in bfloat16: how often our kernel ran, the outputs and all gradients."""
    model.zero_grad()
    with Ours() as ours, torch.autocast("cuda", torch.bfloat16):
        out = model(images)
        loss = out.float().square().mean() + handle.penalty()
    loss.backward()
    return ours.calls, [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", ["cb", "explicit(q=1e-3, k=1e-3, v=1e-3, av=1e-3, ff=1e-3)"])
def test_attention_that_is_only_looked_at_runs_on_our_kernel_in_training_and_on_torchs_in_eval(recipe: str) -> None:
    images = torch.randn(128, 3, 224, 224, device="cuda")  # of small calls torch's kernels are the faster ones
    results = []
    for impl in ("auto", "sdpa"):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10).cuda().train()
        handle = attemper.apply(model, recipe, impl=impl)
        calls, values = step(model, handle, images)
        assert calls == (2 if impl == "auto" else 0)
        assert step(model.eval(), handle, images)[0] == 0
        results.append(values)
    for ours, torchs in zip(*results, strict=True):
        assert (ours - torchs).norm() <= 0.02 * torchs.norm() + 1e-6
