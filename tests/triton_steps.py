"""One training step of a tempered model in Triton's interpreter, and which operators ran in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import attemper

DIRECT = {
    "DirectAttention": "attemper::fused_attention",
    "DirectAttentionBackward": "attemper::fused_attention_backward",
    "DirectPackedAttention": "attemper::packed_attention",
    "DirectPackedAttentionBackward": "attemper::packed_attention_backward",
    "DirectPenalisedAttention": "attemper::penalised_attention",
    "DirectPenalisedAttentionBackward": "attemper::penalised_attention_backward",
}
"""What runs without an operator in eager mode → the operator that would run elsewhere."""


def step_of(model: nn.Module, recipe: str, impl: Any, compiled: bool) -> tuple[Counter[str], list[Tensor]]:
    """How often each operator ran; the penalties, the output and all gradients."""
    handle = attemper.apply(model, recipe, impl=impl)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    torch.manual_seed(1)
    images = torch.randn(2, 3, 32, 32)
    with torch.random.fork_rng():
        forward(images)  # traced, if it is compiled
    handle.penalty()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        out = forward(images)
        penalty = handle.penalty()
        (out.square().sum() + penalty).backward()
    calls = Counter(DIRECT.get(event.name, event.name) for event in profiler.events())
    return calls, [penalty.detach(), out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
