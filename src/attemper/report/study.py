"""The page of a study: what was compared, the verdict, the table, the charts, and how to get all of it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attemper.report import evaluation, figures, tables
from attemper.report.markup import data_block, escape
from attemper.report.page import page
from attemper.report.recipes import Entry, entries
from attemper.report.scale import number

__all__ = ["render"]


def render(summary: Mapping[str, Any]) -> str:
    """One self-contained HTML page about a study, from what `attemper.study.summarise` says about it.

    It needs no network, holds its own style and script, and is the same text for the same summary. Runs that are
    missing or have diverged, single seeds and unknown costs are shown as what they are.
    """
    ranked = entries(summary)
    metric = str(summary.get("metric") or "accuracy")
    sections = [
        tables.results(ranked, metric, float(summary.get("confidence") or 0.95)),
        figures.accuracy(ranked, metric, float(summary.get("confidence") or 0.95)),
        figures.curves(ranked, metric),
        figures.gap(ranked, metric),
        evaluation.calibration(ranked),
        evaluation.robustness(ranked),
        figures.cost(ranked, metric),
        figures.published(ranked, metric),
        figures.rates(ranked),
        tables.configurations(ranked, metric),
        tables.reproduce(summary),
    ]
    title = str(summary.get("title") or "A study")
    data = {key: value for key, value in summary.items() if key != "recipes"}
    # The curves are in the charts and in the study's own files; without them the data stay small.
    data["recipes"] = [{k: v for k, v in entry.raw.items() if k != "curves"} for entry in ranked]
    head = _verdict(summary) + _notices(ranked, summary) + _facts(ranked, summary) + data_block("summary", data)
    shown = [section for section in sections if section is not None]
    return page(title, shown, head=head, kicker="Attemper · comparison")


def _verdict(summary: Mapping[str, Any]) -> str:
    verdict = summary.get("verdict")
    return f'<p class="verdict">{escape(verdict)}</p>' if verdict else ""


def _notices(ranked: list[Entry], summary: Mapping[str, Any]) -> str:
    notices = []
    missing = sum(entry.missing for entry in ranked)
    if not ranked:
        notices.append("There are no recipes in this study yet.")
    elif missing or not summary.get("complete", True):
        runs = f"{missing} {'run is' if missing == 1 else 'runs are'} missing" if missing else "some runs are missing"
        notices.append(f"This study is not complete: {runs}. What is below may change.")
    diverged = [f"{entry.name} ({entry.diverged})" for entry in ranked if entry.diverged]
    if diverged:
        notices.append(f"Runs that diverged, with the number of them: {', '.join(diverged)}.")
    if ranked and max(len(entry.test) for entry in ranked) == 1:
        notices.append("One seed only: without a second one, nothing can be said about uncertainty.")
    notices += [str(note) for note in summary.get("notes") or ()]
    return "".join(f'<p class="notice">{escape(notice)}</p>' for notice in notices)


def _facts(ranked: list[Entry], summary: Mapping[str, Any]) -> str:
    plan = summary.get("plan") or {}
    budget = plan.get("budget") or {}
    seeds = sorted({seed for entry in ranked for seed in entry.seeds})
    sizes = sorted({entry.parameters for entry in ranked if entry.parameters is not None})
    facts = {
        "Task": plan.get("task"),
        "Model": plan.get("model"),
        "Parameters": " – ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1]))) if sizes else None,
        "Recipes": len(ranked) or None,
        "Seeds": len(seeds) or None,
        "Budget": ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in budget.items()) or None,
    }
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    return f'<dl class="facts">{items}</dl>' if items else ""


def _short(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)
