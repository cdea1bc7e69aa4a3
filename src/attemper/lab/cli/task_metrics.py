"""What `attemper evaluate` says of runs whose task has metrics of its own: those, class by class, and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attemper.errors import ParameterError
from attemper.lab.counting import counted

if TYPE_CHECKING:
    from attemper.lab.evaluation.runs import FinishedRun


def has_own_metrics(finished: FinishedRun) -> bool:
    """Whether a task is not about one class per image, which the suites of an evaluation need."""
    from attemper.lab.tasks.base import InputShape

    return not isinstance(finished.task.shape, InputShape)


def refuse_suites(finished: FinishedRun, given: Mapping[str, Any], usual: str) -> None:
    """Raise if anything was asked for that only classifiers of images can be asked.

    given: the options by name. usual: the suites that nobody has asked for.
    """
    asked = [name for name, value in given.items() if value is not None and (name, value) != ("suites", usual)]
    if asked:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise ParameterError(
            f"{names}: that needs a classifier of images, and the run is on '{finished.task.name}'. Leave it out: the "
            f"task's own metrics are measured, {finished.task.primary} first."
        )


def task_metrics(finished: FinishedRun) -> dict[str, Any]:
    """The task's metrics on its test set, and whatever it says and shows beside them."""
    from attemper.lab.training.validation import details_of, finite

    device = next(finished.model.parameters()).device
    source = finished.task.test().to(device)
    with torch.no_grad():
        metrics = finished.task.measure(finished.model, source)
        details = details_of(finished.model, finished.task, source)
    return {
        "samples": len(source),
        "metric": finished.task.primary,
        "metrics": {name: finite(value) for name, value in metrics.items()},
        **({} if details is None else {"test_details": details}),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """The metrics for people, the main one first."""
    primary, metrics = found["metric"], found["metrics"]
    names = [primary, *(name for name in metrics if name != primary)]
    each = ", ".join(f"{name} {_shown(name, metrics[name])}" for name in names)
    return [f"{found['spec']['recipe']}: {each}, on {counted(found['samples'], 'test sample')}"]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if name == "loss" else f"{100 * value:.2f} %"


def page_of(found: Mapping[str, Any]) -> str:
    """The page of one run."""
    from attemper.lab.report import by_class, confusion
    from attemper.lab.report.entries import entries
    from attemper.lab.report.markup import facts
    from attemper.lab.report.page import page
    from attemper.lab.study.summary import details_over_seeds

    spec = found["spec"]
    row = {"name": spec["recipe"], "recipe": spec["recipe"], "details": details_over_seeds([dict(found)])}
    ranked = entries({"recipes": [row]})
    sections = [confusion.classes(ranked), by_class.by_class(ranked), by_class.pictures(ranked)]
    figures = {name: _shown(name, value) for name, value in found["metrics"].items()}
    figures |= {"test samples": f"{found['samples']:,}", "seed": str(spec["seed"])}
    return page(
        f"{spec['recipe']} on {spec['task']} with {spec['model']}",
        [section for section in sections if section is not None],
        head=facts(figures),
        kicker="Attemper · evaluation of one run",
    )
