"""A forward pass on a GPU neither waits for it nor copies to it, so that a CUDA graph can hold it.

No GPU is needed: tensors without numbers say that they lie on one, and every operator is looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attemper
from attemper.kernels.attention import arguments
from attemper.kernels.common import devices
from attemper.kernels.implementations import triton as implementation

WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "lift_fresh", "equal.default")
"""Operators whose result the host has to know, or that bring numbers of its own to a device."""
RECIPES = (
    "dropkey(0.1)",
    "dropkey(learn)",
    "dropattention(learn, each=head)",
    "hardmask(learn)",
    "blur",
    "droppath(0.1) + ffdropout(0.1) + drophead(0.1)",
    "cb + explicit(q=1e-3, v=1e-3, ff=1e-3)",
    "dropkey(0.3, share=queries)",
)


class Watch(TorchDispatchMode):
    """Writes down what the host waits for, and what is copied from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), out))
        name = str(func)
        by_mask = "index" in name and any(x.dtype == torch.bool for x in given[1:])
        moved = len({x.device.type for x in (*given, *made) if x.dim() > 0 or "copy" in name}) > 1
        if by_mask or moved or any(each in name for each in WAITING):
            self.found.append(name)
        return out


@contextlib.contextmanager
def on_an_absent_gpu(model: nn.Module) -> Iterator[Watch]:
    """Inside it, the model is on a GPU that is not there, and what is done is watched."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, x in held.items():
                    if x is not None:
                        moved = torch.empty(x.shape, dtype=x.dtype, device="cuda")
                        held[name] = nn.Parameter(moved) if held is module._parameters else moved
        with Watch() as watch:
            yield watch


def serve_by_kernels(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels serve calls on a GPU, or torch all of them."""
    pytest.importorskip("triton")

    def refuse(device: torch.device) -> str | None:
        return None if asked and device.type == "cuda" else "not asked"

    for module in (devices, implementation, arguments):
        monkeypatch.setattr(module, "refuse_device", refuse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize(("recipe", "by_kernels"), [*((recipe, True) for recipe in RECIPES), (RECIPES[1], False)])
def test_a_pass_neither_waits_for_a_gpu_nor_copies_to_it(
    recipe: str, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_by_kernels(by_kernels, monkeypatch)
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 1, "num_heads": 6, "num_classes": 2}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).train()
    tempered = attemper.apply(model, recipe)
    for _ in range(2):  # first passes may look at values
        tempered.loss(lambda: model(torch.randn(2, 3, 32, 32)), lambda out: out.float().sum())
    with on_an_absent_gpu(model) as watch:
        images = torch.empty(2, 3, 32, 32, device="cuda")
        tempered.loss(lambda: model(images), lambda out: out.float().sum())
    assert watch.found == []


def test_what_waits_or_copies_is_noticed() -> None:
    with on_an_absent_gpu(nn.Linear(2, 2)) as watch:
        x = torch.empty(3, device="cuda")
        torch.tensor([1.0, 2.0]).to("cuda")
        assert len(watch.found) > 0
        watch.found.clear()
        torch.tensor(0.5, device="cuda")
        assert len(watch.found) > 0
        watch.found.clear()
        with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
            x.sum().item()
