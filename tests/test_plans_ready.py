"""The ready plans of other tasks than classification: read as they are, they fit their models at the size of a try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attemper.lab.study.defaults import completed
from attemper.lab.study.plan import Plan
from attemper.lab.study.planfile import load_plan
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.check import check_run
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec

pytestmark = pytest.mark.usefixtures("one_thread")

PLANS = Path(__file__).parent.parent / "plans"
TRIES = {
    "vqav2-cb": ("vqa:shapes(train=60, test=20)", "vilt(width=16, depth=2, heads=2)"),
    "mae-graying": ("mae:digits(train=60, test=20)", "vit-mae(width=16, depth=2, heads=2, decoder_depth=1)"),
    "easy-vqa": ("vqa:shapes(train=60, test=20)", "two-stream(width=16, heads=2, depth=1, image_depth=1)"),
    "pets-heads": ("boxes(train=40, test=10)", "anchor-detr(width=16, depth=1)"),
    "bccd": ("boxes(train=40, test=10)", "anchor-detr(width=16, depth=1)"),
    "mae-graying-finetune": ("digits(train=60, test=20)", "vit-mae(width=16, depth=2, heads=2)"),
}


def smaller(name: str, plan: Plan) -> tuple[list[RunSpec], Any]:
    """The runs of a plan on made-up data with a small model, and that data."""
    task, model = TRIES[name]
    known = {**plan.budget.to_dict(), "init": None, "precision": "float32", "epochs": 1, "batch_size": 20}
    budget = Budget.from_dict({**known, "warmup_epochs": 0.2, "lr": 1e-3, "augment": "none", "validation": 0.3})
    recipes = [entry.configurations[0] for entry in plan.recipes]
    return [RunSpec(task=task, model=model, recipe=each, seed=0, budget=budget) for each in recipes], open_task(task)


@pytest.mark.parametrize("name", list(TRIES))
def test_a_ready_plan_can_be_read_and_every_recipe_of_it_fits_its_model(name: str) -> None:
    plan = load_plan(PLANS / f"{name}.yaml")
    specs, task = smaller(name, plan)
    assert specs[0].recipe == "none"
    for spec in specs:
        check_run(spec, task)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_plan_can_be_read_and_is_named_on_a_page(path: Path) -> None:
    plan = load_plan(path)
    assert plan.recipes[0].name == "none"
    docs = "".join(page.read_text(encoding="utf-8") for page in (PLANS.parent / "docs").glob("*.md"))
    assert path.name in docs


@pytest.mark.parametrize("name", ["vqav2-cb", "mae-graying"])
def test_a_smoke_plan_has_the_recipes_of_its_plan(name: str) -> None:
    small, whole = (load_plan(PLANS / f"{each}.yaml") for each in (f"{name}-smoke", name))
    assert [entry.name for entry in small.recipes] == [entry.name for entry in whole.recipes]
    assert len(open_task(small.task).test()) == 60


def test_the_last_recipe_of_each_ready_plan_trains() -> None:
    for name in TRIES:
        specs, task = smaller(name, load_plan(PLANS / f"{name}.yaml"))
        assert run(specs[-1], task)["status"] == "finished"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vqa:noise", "vqa:noise(size=16, train=60, test=20, answers=12)"),
        ("mae:noise", "mae:noise(size=16, classes=5, train=60, test=20)"),
    ],
)
def test_noise_stands_for_data_that_is_not_there(name: str, text: str) -> None:
    task: Any = open_task(text)
    train, validation = task.split(0, 0.3)
    assert len(train) + len(validation) == 60
    assert len(task.test()) == 20
    stored, targets = next(train.batches(train.targets.new_tensor([0, 1]), 2))
    assert len(task.to_input(stored)) == len(targets) == 2
    assert task.fingerprint != open_task(text.replace("60", "50")).fingerprint


def test_what_nobody_says_is_chosen_for_these_tasks_too() -> None:
    asked = completed({"task": "vqa:shapes(train=100, test=20)"})
    assert asked.model == "two-stream"
    assert asked.budget.augment == "none"
    assert "on 100 questions: model two-stream" in asked.notes[0]
    hidden = completed({"task": "mae:digits(train=100, test=20)"})
    assert hidden.model == "vit-mae"
    assert hidden.budget.augment == "crop-flip(flip=0)"
