"""Many studies beside each other: recipes × tasks, and what a recipe does on tasks in general."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attemper.errors import AttemperError
from attemper.lab.errors import StudyError
from attemper.lab.study.plan_rows import BASELINE
from attemper.lab.study.sameness import plainest
from attemper.lab.study.statistics import CONFIDENCE
from attemper.methods.base import Method
from attemper.methods.kinds import BlockMap, BranchMap, LossTerm, PatchMap, Penalty, SkipRemover, TokenMap, WeightMap
from attemper.ops.perturbation import Perturbation
from attemper.recipe import as_methods, render

Summary = Mapping[str, Any]
Overview = dict[str, Any]
RESAMPLES = 4000
KINDS = (Perturbation, PatchMap, TokenMap, WeightMap, BranchMap, BlockMap, SkipRemover, Penalty, LossTerm)
"""Of methods, in the order in which a recipe that is shared by studies is written."""


def overview(summaries: Sequence[Summary], sources: Sequence[str] = ()) -> Overview:
    """All of several studies, recipe by recipe. Recipes are the same where they compute the same.

    sources: what each study is called by, such as its folder; where two have one title, it stands beside it.

    Returns "tasks" (title, task, model, metric, verdict, cautions), and "recipes": in each "cells", one per task, with
    the difference and the decision or None; "rank", the mean over tasks; "improvement", the probability of scoring
    higher than none under one seed, with its interval over tasks and seeds; "cost", the median ratio of step times.
    """
    if not summaries:
        raise StudyError("A report over tasks needs at least one study.")
    sources = list(sources) or [str(summary["title"]) for summary in summaries]
    titles = [str(summary["title"]) for summary in summaries]
    tasks = [
        {
            "title": title if titles.count(title) == 1 else f"{title} ({source})",
            "source": source,
            **{name: summary["plan"].get(name) for name in ("task", "model")},
            **{name: summary.get(name) for name in ("metric", "verdict", "cautions", "margin", "complete")},
            "baseline": _baseline(summary)["mean"],
        }
        for summary, title, source in zip(summaries, titles, sources, strict=True)
    ]
    baseline = {"name": BASELINE, "cells": [_cell(none, none) for none in map(_baseline, summaries)]}
    rows: dict[str, dict[str, Any]] = {}
    named = _named_alike(summaries)
    for at, summary in enumerate(summaries):
        none = _baseline(summary)
        for row in summary["recipes"]:
            if row is none or row["name"] in summary["same"]:
                continue
            name = row["name"] if row["name"] in named else _shared_name(row)
            if name in rows and rows[name]["cells"][at] is not None:
                name = row["name"]  # one study has two of them, such as a recipe at two learning rates
            entry = rows.setdefault(name, {"name": name, "cells": [None] * len(summaries)})
            entry["cells"][at] = _cell(row, none)
    recipes = [_whole(entry) for entry in rows.values()]
    _rank(recipes, baseline)
    recipes.sort(key=lambda row: (row["rank"] is None, row["rank"] or 0.0))
    return {"tasks": tasks, "recipes": recipes, "confidence": CONFIDENCE, "baseline": baseline}


def _baseline(summary: Summary) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(row for row in summary["recipes"] if row["recipe"] == "none")
    return found


def _named_alike(summaries: Sequence[Summary]) -> set[str]:
    """Names under which several studies have different recipes: whoever gave them means the same by them."""
    rows = [row for summary in summaries for row in summary["recipes"] if row["name"] not in summary["same"]]
    given = {row["name"] for row in rows if plainest(row["name"]) != plainest(row["recipe"]) != BASELINE}
    counts = Counter(row["name"] for row in rows)
    return {name for name in given if counts[name] > 1}


def _shared_name(row: Mapping[str, Any]) -> str:
    """What a row is called in all studies: where it stands for a grid of which each task chose its settings, by its
    name; else by its recipe, whatever it is called and in whichever order its methods are written."""
    if len({one["recipe"] for one in row.get("configurations") or ()}) > 1:
        return str(row["name"])
    try:
        methods = as_methods(plainest(row["recipe"]))
    except AttemperError:  # of another version, or of a package that is not here
        return str(row["recipe"])
    return render(sorted(methods, key=_kind))


def _kind(method: Method) -> int:
    """Methods of different kinds act in different places, in whichever order they are written."""
    return next((at for at, kind in enumerate(KINDS) if isinstance(method, kind)), len(KINDS))


def _cell(row: Mapping[str, Any], none: Mapping[str, Any]) -> dict[str, Any]:
    """One recipe on one task."""
    before = dict(zip(none["seeds"], none["test"], strict=True))
    changes = [
        value - before[seed]
        for seed, value in zip(row["seeds"], row["test"], strict=True)
        if value is not None and before.get(seed) is not None
    ]
    return {
        "recipe": row["recipe"],
        "mean": row["mean"],
        "difference": row["difference"],
        "decision": row["decision"],
        "changes": changes,
        "ratio": (row.get("cost") or {}).get("ratio"),
    }


def _whole(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe over all tasks that have it."""
    cells = [cell for cell in entry["cells"] if cell is not None and cell["changes"]]
    ratios = [cell["ratio"] for cell in cells if cell["ratio"] is not None]
    answers = [cell["decision"]["answer"] for cell in cells if cell["decision"]]
    return {
        **entry,
        "tasks": len(cells),
        "improvement": improvement([cell["changes"] for cell in cells]),
        "cost": statistics.median(ratios) if ratios else None,
        "answers": {answer: answers.count(answer) for answer in ("better", "equivalent", "undecided", "worse")},
        "rank": None,
    }


def improvement(changes: Sequence[Sequence[float]], seed: int = 0) -> dict[str, float | None] | None:
    """The probability that a recipe scores higher than none under one seed: the mean over tasks of the share of seeds,
    equal scores counting half. The interval comes from drawing tasks, and seeds within them, with replacement.

    With one task there is nothing to draw tasks from, and no interval.

    >>> improvement([[0.1, 0.2], [0.1, -0.1]])["mean"]
    0.75
    """
    tasks = [np.sign(np.asarray(each)) / 2 + 0.5 for each in changes if len(each)]
    if not tasks:
        return None
    mean = float(np.mean([each.mean() for each in tasks]))
    if len(tasks) == 1:
        return {"mean": mean, "low": None, "high": None}
    generator = np.random.default_rng(seed)
    # (resamples, tasks) means of every task with its seeds drawn anew, for each place that a task can be drawn to
    drawn = generator.integers(len(tasks), size=(RESAMPLES, len(tasks)))
    values = np.empty(drawn.shape)
    for at, wins in enumerate(tasks):
        here = drawn == at
        seeds = generator.integers(len(wins), size=(int(here.sum()), len(wins)))
        values[here] = wins[seeds].mean(1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values.mean(1), [tail, 100 - tail])
    return {"mean": mean, "low": float(low), "high": float(high)}


def _rank(recipes: Sequence[dict[str, Any]], baseline: Mapping[str, Any]) -> None:
    """The mean rank of each recipe over the tasks that it is on, none among the ranked, as a place from 0 to 1.

    Tasks have different numbers of recipes: a rank is the share of the others on the task that are above, ties half.
    """
    every = [*recipes, baseline]
    for row in recipes:
        places = []
        for at, cell in enumerate(row["cells"]):
            if cell is None or cell["mean"] is None:
                continue
            others = [o["cells"][at]["mean"] for o in every if o is not row and o["cells"][at] is not None]
            known = [value for value in others if value is not None]
            if known:
                above = sum((value > cell["mean"]) + 0.5 * (value == cell["mean"]) for value in known)
                places.append(1 + above * (len(every) - 1) / len(known))
        row["rank"] = statistics.fmean(places) if places else None
