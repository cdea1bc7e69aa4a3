"""`attemper plan check`: whether a plan can be run, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attemper.lab.cli.compare import Compare, File
from attemper.lab.cli.options import Data, Json, Number, Numbers, Suites, Text, Texts
from attemper.lab.cli.printing import console, print_json, say
from attemper.lab.counting import counted

MOST_TRIED = 8


@dataclass(frozen=True)
class CheckCommand:
    """Say whether a plan can be run, and what it stands for. Nothing is trained, and nothing is written.

    The plan is read, its data is opened, and recipes are put on the model and run forward and backward once, on two
    inputs of noise. What is wrong is told as 'attemper compare' would tell it, and the exit code is then 2.

    Examples
      attemper plan check plan.yaml
      attemper plan check --recipes "dropkey(0.1)" "explicit(v={1e-4, 5e-4})" --seeds 3
    """

    plan: File = None
    """A plan file; otherwise the embedded comparison on digits, changed by the options."""
    task: Text = None
    """Such as digits, cifar10, folder:PATH."""
    model: Text = None
    """Such as vit-cifar, timm:vit_small_patch16_224."""
    recipes: Texts = ()
    """Recipes, each in quotes."""
    seeds: Number = None
    """How many seeds."""
    epochs: Number = None
    """Epochs of every run."""
    batch_size: Number = None
    """Images per step."""
    lr: Numbers = ()
    """Learning rates."""
    augment: Text = None
    """Augmentations joined by '+'."""
    evaluate: Suites = ""
    all: bool = False
    """Try every recipe on the model; otherwise, of more than eight, eight from the first to the last."""
    data: Data = None
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.evaluation.runs import check_suites
        from attemper.lab.study.fitting import refuse_misfits
        from attemper.lab.tasks.registry import open_task
        from attemper.lab.training.check import check_run
        from attemper.lab.training.spec import RunSpec

        names = (
            "plan",
            "task",
            "model",
            "recipes",
            "seeds",
            "epochs",
            "batch_size",
            "lr",
            "augment",
            "evaluate",
            "data",
        )
        plan = Compare(**{name: getattr(self, name) for name in names}).planned()
        task = open_task(plan.task, self.data)

        def check(spec: RunSpec) -> None:
            check_suites(spec, task)
            check_run(spec, task)

        runs = plan.runs(task.name)
        first = {run.recipe: run for run in reversed(runs)}
        recipes = list(reversed(first))
        tried = recipes if self.all else _spread(recipes)
        refuse_misfits({recipe: first[recipe] for recipe in tried}, check, plan.model)
        facts: dict[str, Any] = {
            "task": task.name,
            "model": plan.model,
            "rows": len(plan.recipes),
            "seeds": len(plan.seeds),
        }
        facts |= {"recipes": len(recipes), "tried": len(tried), "runs": len(runs), "epochs": plan.budget.epochs}
        if self.json:
            print_json({**facts, "notes": list(plan.notes)})
            return 0
        where = console()
        say(where, *(f"note: {note}" for note in plan.notes))
        say(
            where,
            f"{plan.title or f'{plan.task} · {plan.model}'}: {counted(len(recipes), 'recipe')} × "
            f"{counted(len(plan.seeds), 'seed')} × {counted(len(plan.lr), 'learning rate')}, "
            f"{counted(len(runs), 'run')} of {counted(plan.budget.epochs, 'epoch')}.",
            f"Every recipe runs with {plan.model} on {task.name}."
            if len(tried) == len(recipes)
            else f"{len(tried)} of them were tried, and run with {plan.model} on {task.name}; --all tries every one.",
        )
        return 0


def _spread(recipes: Sequence[str]) -> list[str]:
    """At most so many as are tried in a moment: the first, the last, and others evenly between them."""
    if len(recipes) <= MOST_TRIED:
        return list(recipes)
    return [recipes[round(at * (len(recipes) - 1) / (MOST_TRIED - 1))] for at in range(MOST_TRIED)]
