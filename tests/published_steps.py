"""One training step of a published table's plan, on a network and data as small as can be."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from attemper.lab.call_syntax import parse_call, render_call
from attemper.lab.study.plan import Plan
from attemper.lab.study.published import Table
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.data import RunData
from attemper.lab.training.learner import Learner
from attemper.lab.training.spec import Budget, RunSpec

Step = tuple[str, str, str, Budget]
"""Task, model, recipe, budget."""

LIKE: dict[str, dict[str, Any]] = {
    "timm:vit": {"embed_dim": 8, "depth": 2, "num_heads": 2, "patch_size": 8},
    "timm:deit_small": {"embed_dim": 8, "depth": 4, "num_heads": 2, "patch_size": 8},
    "timm:deit": {"embed_dim": 8, "depth": 2, "num_heads": 2, "patch_size": 8},
    "timm:swin": {"depths": [1, 1], "num_heads": [1, 1], "embed_dim": 8, "patch_size": 4, "window_size": 2},
    "timm:pvt": {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "embed_dims": [8, 8, 8, 8]},
    "timm:cait": {"embed_dim": 8, "depth": 2, "num_heads": 2, "patch_size": 8},
    "timm:volo": {"patch_size": 4},
    "hf:pvt": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 8, 8], "num_attention_heads": [1, 1, 1, 1]},
    "vit": {"width": 8, "depth": 2, "heads": 2, "mlp": 16, "patch": 8},
    "t2t": {"width": 8, "depth": 2, "heads": 2, "mlp": 16, "patch": 8, "token_width": 8},
    "localvit": {"width": 8, "depth": 1, "heads": 2, "mlp": 16, "patch": 8},
    "convmixer": {"width": 8, "depth": 1},
    "resnet": {"width": 4, "depth": 8},
    "encoder": {"width": 8, "heads": 2},
    "detr": {"width": 8, "depth": 1, "heads": 2, "mlp": 16, "queries": 4, "backbone": "resnet10t"},
    "anchor-detr": {"width": 8, "depth": 1, "heads": 2, "mlp": 16},
    "segvit": {"width": 8, "depth": 4, "heads": 2, "mlp": 16, "hidden": 8},
    "two-stream": {"width": 8, "depth": 1, "heads": 2},
    "vilt": {"width": 8, "depth": 1, "heads": 2, "patch": 8},
    "seq2seq": {"width": 8, "depth": 1, "heads": 2, "mlp": 16},
}
"""What a model is made small by, by how its name begins; its other options stay."""
IMAGES = "noise(size=32, classes=4, train=12, test=4)"
TASKS = {
    "translation": "numerals(train=60, test=4)",
    "numerals": "numerals(train=60, test=4)",
    "mel": "tones(train=24, test=6)",
    "tones": "tones(train=24, test=6)",
    "actions": "planted(train=24, test=6)",
    "planted": "planted(train=24, test=6)",
    **dict.fromkeys(("boxes", "coco"), "boxes(train=12, test=4)"),
    **dict.fromkeys(("shapes", "segment"), "shapes(train=12, test=4)"),
    "vqa": "vqa:shapes(train=24, test=6)",
}
"""By the kind of a plan's task; images in the place of all others."""


def small(model: str) -> str:
    """A network of the same family, and with the same options, in moments."""
    name, options = parse_call(model.replace("volo_d2", "volo_d1"))  # which has no options for width and depth
    start = next(start for start in LIKE if name.startswith(start))
    return render_call(name, {**options, **LIKE[start]})


def steps_of(table: Table, scale: str) -> set[Step]:
    """What one step of every row of a plan is made with; of a grid, its first configuration stands for all."""
    plan = Plan.from_dict(table.plan(scale))
    kind = parse_call(plan.task)[0].partition(":")[0]
    task = TASKS.get(kind, IMAGES)
    return {(task, small(plan.model), entry.configurations[0], plainly(plan.budget)) for entry in plan.recipes}


def plainly(budget: Budget) -> Budget:
    """The budget without what changes no step on this machine, so that scales have steps in common."""
    teacher = None if budget.teacher is None else "timm:resnet10t(pretrained=false)"
    length = {"epochs": 2, "warmup_epochs": 0.0, "lr": 1e-3, "min_lr": 1e-5, "validation": 0.5}
    few = {"batch_size": 2 * budget.repeats, "precision": "float32", "weight_decay": 0.0}
    return dataclasses.replace(budget, **length, **few, teacher=teacher)


@functools.cache
def one_step(step: Step) -> None:
    """Train one batch as a run would, augmentation, optimiser and average included; tables have steps in common."""
    text, model, recipe, budget = step
    task = open_task(text)
    spec = RunSpec(task=task.name, model=model, recipe=recipe, seed=0, budget=budget)
    learner = Learner(spec, task, torch.device("cpu"))
    learner.to_training()
    learner.tempered.progress(0.0, budget.epochs)
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    learner.set_lr(budget.lr)
    learner.learn(*next(iter(RunData(spec, task, torch.device("cpu")).epoch(1))))
    after = list(learner.model.parameters())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in after), f"{step}: a step leaves no finite weights"
    assert any(not torch.equal(now, then) for now, then in zip(after, before, strict=True)), f"{step}: nothing moved"
