"""A small teacher and runs that learn from it, for several files of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import InputShape
from attemper.lab.training.spec import Budget, RunSpec

__all__ = ["TASK", "TEACHER", "TINY", "TOKEN", "saved", "spec"]

TASK = "digits(train=200, test=50)"
TINY = "vit-cifar(depth=2, width=16, heads=2, mlp=16)"  # the head of vit-digits starts at zero, and hides the rest
TOKEN = "timm:deit_tiny_distilled_patch16_224(patch_size=4, embed_dim=16, depth=2, num_heads=2)"
TEACHER = "convmixer(width=8, depth=1, kernel=3)"  # with batch norms, which would show every pass in training mode


def saved(path: Path, text: str = TEACHER, classes: int = 10, seed: int = 7) -> str:
    torch.manual_seed(seed)
    shape = InputShape(channels=1, height=8, width=8, classes=classes)
    save_file(dict(build_model(text, shape).state_dict()), path)
    return str(path)


def spec(recipe: str = "none", *, model: str = TINY, **budget: Any) -> RunSpec:
    chosen = Budget(**{"epochs": 2, "batch_size": 20, "lr": 3e-3, "warmup_epochs": 1, "teacher": TEACHER, **budget})
    return RunSpec(task=TASK, model=model, recipe=recipe, seed=0, budget=chosen)
