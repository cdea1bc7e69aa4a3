"""The ready plans: they can be read, their recipes fit their models, and the planning page counts as they do."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from attemper.errors import ParameterError
from attemper.lab.study.plan import Plan
from attemper.lab.study.planfile import load_plan
from attemper.lab.study.published import find_table
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.check import check_run
from attemper.lab.training.data import RunData
from attemper.lab.training.teacher import open_teacher

ROOT = Path(__file__).resolve().parents[1]
PLANS = sorted((ROOT / "plans").glob("*.yaml"))
STAND_INS = {"segment": "noise-masks"}
"""What is tried in place of data that is not here, where that is no image with one class."""


ELSEWHERE = {
    **dict.fromkeys(
        ("vqav2-cb", "mae-graying", "mae-graying-finetune", "easy-vqa", "pets-heads", "bccd"), "test_plans_ready"
    ),
    "detr-coco": "test_boxes",
}
"""Plans whose recipes fit their models by another file's tests."""


def test_plans_that_are_tried_elsewhere_are() -> None:
    for name, file in ELSEWHERE.items():
        assert name in (ROOT / "tests" / f"{file}.py").read_text()
        assert ROOT / "plans" / f"{name}.yaml" in PLANS


@pytest.mark.parametrize("path", [path for path in PLANS if path.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_every_recipe_of_a_ready_plan_fits_its_model(path: Path) -> None:
    plan = load_plan(path)
    task = open_task(f"{STAND_INS.get(plan.task.partition(':')[0], 'noise')}(size=64, classes=4, train=64, test=8)")
    if path.stem.endswith("-smoke"):
        task = open_task(plan.task)
    for entry in plan.recipes:
        spec = plan.spec(entry.configurations[0], plan.lr[0], plan.seeds[0], task.name)
        # Not every CPU that says it knows bfloat16 does; what fits in one precision fits in the other.
        budget = dataclasses.replace(spec.budget, validation=0.5, precision="float32")
        if budget.teacher is not None:  # a small one, as untrained as this task: nothing is downloaded here
            budget = dataclasses.replace(budget, teacher="timm:resnet10t(pretrained=false)")
        check_run(dataclasses.replace(spec, budget=budget), task)
    assert str(task.augmentation(plan.budget.augment))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_teacher_of_a_ready_plan_is_one_that_timm_has_weights_of(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = load_plan(path).budget
    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        timm, "create_model", lambda name, *, pretrained, **options: asked.append((name, pretrained)) or nn.Identity()
    )
    if budget.teacher is None:
        return
    with pytest.raises(ParameterError, match="gives 2 × 3 × 224 × 224 scores"):  # which is what comes back from here
        open_teacher(budget, InputShape(channels=3, height=224, width=224, classes=1000))
    assert asked == [("regnety_160.deit_in1k", True)]


def test_the_distilled_plan_is_the_other_with_a_teacher_and_a_token_for_it() -> None:
    plain, distilled = (load_plan(ROOT / "plans" / f"deit-small{kind}.yaml") for kind in ("", "-distilled"))
    teacher = {"teacher": distilled.budget.teacher, "distillation": "hard", "distillation_alpha": 0.5}
    assert dataclasses.replace(plain.budget, **teacher) == distilled.budget
    assert plain.recipes == distilled.recipes
    assert "distilled" in distilled.model


def test_plans_of_context_broadcasting_train_as_its_supplement_says() -> None:
    """No repeated augmentation for ViT-S, a warm-up of 10 for ViT-B, cb_s beside cb; no other plan repeats with cb."""
    plain = load_plan(ROOT / "plans" / "deit-small.yaml")
    for name in ("deit-small-cb", "deit-small-distilled-cb"):
        plan = load_plan(ROOT / "plans" / f"{name}.yaml")
        assert [entry.recipe for entry in plan.recipes] == ["none", "cb(cb)", "cb(cb_s)"]
        assert plan.budget.repeats == 1
        assert plan.lr[0] == pytest.approx(5e-4 * plan.budget.batch_size / 512)
        teacher = {"teacher": plan.budget.teacher}
        assert dataclasses.replace(plain.budget, batch_size=1024, repeats=1, **teacher) == plan.budget
    base = load_plan(ROOT / "plans" / "deit-base-cb.yaml")
    assert dataclasses.replace(plain.budget, warmup_epochs=10.0) == base.budget
    assert (base.budget.repeats, base.model) == (3, "timm:vit_base_patch16_224(drop_path_rate=0.2)")
    repeated = [load_plan(path) for path in PLANS if "-cb" not in path.stem]
    assert not [plan.title for plan in repeated if plan.budget.repeats > 1 and "cb(cb)" in str(plan.recipes)]


@pytest.mark.parametrize(
    ("key", "name"), [("dropkey-coco", "detr-coco"), ("cb-ade20k", "cb-ade20k"), ("cb-vqa", "vqav2-cb")]
)
def test_a_published_table_trains_as_its_ready_plan_does(key: str, name: str) -> None:
    table, plan = Plan.from_dict(find_table(key).plan("full")), load_plan(ROOT / "plans" / f"{name}.yaml")
    for one in ("task", "model", "lr", "seeds", "budget"):
        assert getattr(table, one) == getattr(plan, one), one
    assert {entry.recipe for entry in table.recipes} <= {entry.recipe for entry in plan.recipes}


def test_the_planning_page_counts_batches_as_runs_do() -> None:
    plan = load_plan(ROOT / "plans" / "deit-small.yaml")
    task = open_task("noise(size=1, train=1281167, test=1)")
    data = RunData(plan.spec("none", plan.lr[0], 0, task.name), task, torch.device("cpu"))
    total = data.batches_per_epoch * plan.budget.epochs
    hours, runs = total / 3600, len(plan.runs())
    page = (ROOT / "docs" / "planning.md").read_text()
    for said in (
        f"{data.batches_per_epoch:,} batches an epoch and {total:,} in 300 epochs",
        f"one run is {hours:.1f} *t* hours, and {runs} runs are {runs * hours:,.0f} *t* GPU-hours",
    ):
        assert said in page
    rows = re.findall(r"^\| `.+` \| (\d+) ms \| ([\d,]+) \| (\d+) h (\d+) min \|", page, re.MULTILINE)
    assert len(rows) == len(plan.recipes)
    for t, rate, whole, minutes in ([int(cell.replace(",", "")) for cell in row] for row in rows):
        assert rate == pytest.approx(plan.budget.batch_size * 1000 / t, rel=5e-3)
        assert whole + minutes / 60 == pytest.approx(hours * t / 1000, rel=0.02)  # evaluations take the rest
