"""`attemper plan check`: whether a plan can be run, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attemper.lab.cli.options import Json, Numbers, Suites
from attemper.lab.cli.plan_options import PlanOptions
from attemper.lab.cli.printing import console, print_json, say
from attemper.lab.counting import counted

if TYPE_CHECKING:
    from attemper.lab.tasks.base import Task
    from attemper.lab.training.spec import RunSpec

MOST_TRIED = 8


@dataclass(frozen=True)
class CheckCommand(PlanOptions):
    """Say whether a plan can be run, and what it stands for. Nothing is trained, and nothing is written.

    The plan is read, its data is opened, and recipes are put on the model and run forward and backward once, on two
    inputs of noise. What is wrong is told as 'attemper compare' would tell it, and the exit code is then 2.

    Examples
      attemper plan check plan.yaml
      attemper plan check --recipes "dropkey(0.1)" "explicit(v={1e-4, 5e-4})" --seeds 3
    """

    lr: Numbers = ()
    """Learning rates."""
    evaluate: Suites = ""
    all: bool = False
    """Try every recipe on the model; otherwise, of more than eight, eight from the first to the last."""
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.tasks.registry import open_task

        plan = self.planned()
        task = open_task(plan.task, self.data)
        runs = plan.runs(task.name)
        first = {run.recipe: run for run in reversed(runs)}
        recipes = list(reversed(first))
        tried = recipes if self.all else _spread(recipes)
        _try_out({recipe: first[recipe] for recipe in tried}, task, plan.model)
        if self.json:
            facts = {"task": task.name, "model": plan.model, "rows": len(plan.recipes), "seeds": len(plan.seeds)}
            facts |= {"recipes": len(recipes), "tried": len(tried), "runs": len(runs), "epochs": plan.budget.epochs}
            print_json({**facts, "notes": list(plan.notes)})
            return 0
        say(
            console(),
            *(f"note: {note}" for note in plan.notes),
            f"{plan.title or f'{plan.task} · {plan.model}'}: {counted(len(recipes), 'recipe')} × "
            f"{counted(len(plan.seeds), 'seed')} × {counted(len(plan.lr), 'learning rate')}, "
            f"{counted(len(runs), 'run')} of {counted(plan.budget.epochs, 'epoch')}.",
            f"Every recipe runs with {plan.model} on {task.name}."
            if len(tried) == len(recipes)
            else f"{len(tried)} of them were tried, and run with {plan.model} on {task.name}; --all tries every one.",
        )
        return 0


def _try_out(runs: Mapping[str, RunSpec], task: Task, model: str) -> None:
    """Raise unless every recipe runs on the model."""
    from attemper.lab.evaluation.runs import check_suites
    from attemper.lab.study.fitting import refuse_misfits
    from attemper.lab.training.check import check_run

    def check(spec: RunSpec) -> None:
        check_suites(spec, task)
        check_run(spec, task)

    refuse_misfits(runs, check, model)


def _spread(recipes: Sequence[str]) -> list[str]:
    """At most so many as are tried in a moment: the first, the last, and others evenly between them."""
    if len(recipes) <= MOST_TRIED:
        return list(recipes)
    return [recipes[round(at * (len(recipes) - 1) / (MOST_TRIED - 1))] for at in range(MOST_TRIED)]
