"""The page of a study: what was compared, the verdict, the table, the charts, and how to get all of it again."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.report import by_class, confusion, evaluation, published, rate_charts
from attemper.lab.report import probe_curves as probes
from attemper.lab.report import study_charts as figures
from attemper.lab.report import study_tables as tables
from attemper.lab.report.entries import Entry, entries, percent
from attemper.lab.report.markup import data_block, facts, paragraph
from attemper.lab.report.page import Section, page
from attemper.lab.report.scale import number
from attemper.lab.training.spec import Budget


def render(
    summary: Mapping[str, Any], *, kicker: str = "Attemper · comparison", first: str = "", after: Sequence[Section] = ()
) -> str:
    """One self-contained HTML page about a study, from what `attemper.lab.study.summary.summarise` says about it.

    kicker: the small line above the title. first: what stands before everything else, such as a recommendation.
    after: further sections, before the one that says how to get it again.

    It needs no network, holds its own style and script, and is the same text for the same summary. Runs that are
    missing or have diverged, single seeds and unknown costs are shown as what they are.
    """
    ranked = entries(summary)
    metric = str(summary.get("metric") or "accuracy")
    confidence = float(summary.get("confidence") or 0.95)
    sections = [
        tables.results(ranked, metric, confidence, str(summary.get("reading") or "")),
        figures.accuracy(ranked, metric, confidence, percent((summary.get("margin") or {}).get("value"))),
        confusion.classes(ranked),
        by_class.by_class(ranked),
        by_class.pictures(ranked),
        figures.curves(ranked, metric, str(summary.get("learning") or "accuracy")),
        probes.attention(ranked),
        figures.gap(ranked, metric),
        evaluation.calibration(ranked),
        evaluation.robustness(ranked),
        figures.cost(ranked, metric),
        *published.sections(ranked, metric, summary.get("reference") or {}),
        rate_charts.rates(ranked),
        rate_charts.over_time(ranked),
        tables.configurations(ranked, metric),
        *after,
        tables.reproduce(summary),
    ]
    title = str(summary.get("title") or "A study")
    data = {key: value for key, value in summary.items() if key != "recipes"}
    data["recipes"] = [_small(entry.raw) for entry in ranked]
    lead = paragraph(first, "verdict") if first else ""
    head = lead + (
        _cautions(summary)
        + _verdict(summary)
        + _notices(ranked, summary)
        + _facts(ranked, summary)
        + data_block("summary", data)
    )
    shown = [section for section in sections if section is not None]
    return page(title, shown, head=head, kicker=kicker)


def _small(row: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's data without its curves and pictures, which are in the page and in the study's own files."""
    found = {name: value for name, value in row.items() if name not in ("curves", "probes")}
    if isinstance(found.get("details"), Mapping):
        found["details"] = {name: value for name, value in found["details"].items() if name != "pictures"}
    return found


def _cautions(summary: Mapping[str, Any]) -> str:
    """What must be known before the verdict is read."""
    return "".join(paragraph(line, "notice") for line in summary.get("cautions") or ())


def _verdict(summary: Mapping[str, Any]) -> str:
    verdict = summary.get("verdict")
    return paragraph(verdict, "verdict") if verdict else ""


def _notices(ranked: list[Entry], summary: Mapping[str, Any]) -> str:
    notices = []
    missing = sum(entry.missing for entry in ranked)
    if not ranked:
        notices.append("There are no recipes in this study yet.")
    elif missing or not summary.get("complete", True):
        runs = f"{missing} {'run is' if missing == 1 else 'runs are'} missing" if missing else "some runs are missing"
        notices.append(f"This study is not complete: {runs}. What is below may change.")
    diverged = [f"{entry.name} ({entry.diverged})" for entry in ranked if entry.diverged]
    if diverged and "cautions" not in summary:  # of an older version, which did not say so before the verdict
        notices.append(f"Runs that diverged, with the number of them: {', '.join(diverged)}.")
    if ranked and max(len(entry.test) for entry in ranked) == 1:
        notices.append("One seed only: without a second one, nothing can be said about uncertainty.")
    notices += [str(note) for note in summary.get("notes") or ()]
    return "".join(paragraph(notice, "notice") for notice in notices)


def _facts(ranked: list[Entry], summary: Mapping[str, Any]) -> str:
    plan = summary.get("plan") or {}
    seeds = sorted({seed for entry in ranked for seed in entry.seeds})
    sizes = sorted({entry.parameters for entry in ranked if entry.parameters is not None})
    held_out = next((found for entry in ranked if (found := entry.items)), None)
    values = {
        "Task": plan.get("task"),
        "Model": plan.get("model"),
        "Parameters": " – ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1]))) if sizes else None,
        "Recipes": len(ranked) or None,
        "Seeds": len(seeds) or None,
        "Test items": f"{held_out:,}" if held_out else None,
        "Equivalent within": _margin(summary),
        "Budget": _budget(plan.get("budget") or {}) or None,
    }
    return facts({name: value for name, value in values.items() if value is not None})


def _margin(summary: Mapping[str, Any]) -> str | None:
    margin = summary.get("margin") or {}
    value = percent(margin.get("value"))
    if value is None:
        return None
    return f"±{number(value, 2)} points{'' if margin.get('given') else ' (the default)'}"


def _budget(given: Mapping[str, Any]) -> str:
    """Epochs and batch size, and of the rest what is not as usual."""
    usual = {field.name: field.default for field in dataclasses.fields(Budget)}
    shown = {
        name: value
        for name, value in given.items()
        if name in ("epochs", "batch_size") or name not in usual or value != usual[name]
    }
    words = (f"{name.replace('_', ' ')} {number(v) if isinstance(v, float) else v}" for name, v in shown.items())
    return ", ".join(words)
