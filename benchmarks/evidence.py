"""Writes what our studies found, recipes × studies, from the results that are committed; nothing is trained.

    python benchmarks/evidence.py

Fills docs/results/index.md and the tables of studies' pages between their markers, and draws evidence.png; a test fails
where they differ. A marker names what stands behind it: <!-- evidence: real --> … <!-- /evidence -->, or on the page of
one study the file that its table is from: <!-- study: cifar10.html --> … <!-- /study -->.

Pages of studies hold their summary, and experiments the accuracy of every arm under every seed. Verdicts are computed
anew from those by `attemper.lab.study.assessment`, so that all are told by the same rules.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attemper.lab.report.png import Interval, intervals
from attemper.lab.study.assessment import assess
from attemper.lab.study.export import markdown_table
from attemper.lab.study.published import find_table
from attemper.lab.study.sameness import plainest
from attemper.lab.study.summary_files import read_summary, reassessed
from attemper.lab.study.verdict import answer_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
EVIDENCE = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- /evidence -->)", re.DOTALL)
STUDY = re.compile(r"(<!-- study: (\S+) -->\n).*?(<!-- /study -->)", re.DOTALL)
ANSWERS = ("better", "worse", "equivalent", "undecided")
Summary = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A study whose results are kept.

    file: a page with its summary in it, a summary, or what an experiment found. page: what is written about it.
    published: row → the published table and its row that come nearest; the page says what differs.
    """

    name: str
    file: str
    page: str
    date: str
    published: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    digits: bool = False
    rerun: str = ""
    """The command, where the summary does not have it."""


KEPT = (
    Kept(
        name="CIFAR-10, 7 blocks, 40 epochs",
        file="cifar10.html",
        page="cifar10.md",
        date="2026-11-15",
        published={"explicit V + FF": ("explicit-cifar10", "explicit V + explicit FF")},
        rerun="attemper compare docs/results/cifar10.yaml",
    ),
    Kept(
        name="GTZAN",
        file="gtzan.html",
        page="gtzan.md",
        date="2026-11-15",
        published={
            "explicit K + FF": ("explicit-gtzan", "explicit K + explicit FF"),
            "arora FF": ("explicit-gtzan", "Arora FF"),
        },
        rerun="attemper compare docs/results/gtzan.yaml",
    ),
    Kept(
        name="THUMOS14",
        file="thumos14.html",
        page="thumos14.md",
        date="2026-11-15",
        published={"explicit V + FF": ("explicit-thumos", "explicit V + explicit FF")},
        rerun="attemper compare docs/results/thumos14.yaml",
    ),
    Kept(
        name="CIFAR-10, ViT-Ti, 12 epochs",
        file="cifar10-skips/skips.json",
        page="cifar10-skips/README.md",
        date="2026-11-18, 2026-11-19",
        rerun="attemper experiment skips --task cifar10",
    ),
    Kept(
        name="CIFAR-10, ViT-Ti, 6 epochs",
        file="cifar10-graying/graying.json",
        page="cifar10-graying/README.md",
        date="2026-11-19",
        rerun="attemper experiment graying --task cifar10",
    ),
    Kept(
        name="CIFAR-10, ViT-Ti, 8 epochs",
        file="cifar10-gradient-variance/gradient-variance.json",
        page="cifar10-gradient-variance/README.md",
        date="2026-11-19",
        rerun="attemper experiment gradient-variance --task cifar10",
    ),
    Kept(
        name="easy-vqa",
        file="easy-vqa.html",
        page="easy-vqa.md",
        date="2026-11-19",
        rerun="attemper compare plans/easy-vqa.yaml",
    ),
    Kept(
        name="CIFAR-100, 5,000 labels",
        file="few-labels.html",
        page="mae-cifar100.md",
        date="2026-11-19",
        rerun="attemper compare plans/few-labels.yaml",
    ),
    Kept(
        name="CIFAR-100, 5,000 labels, pre-trained",
        file="few-labels-init.html",
        page="mae-cifar100.md",
        date="2026-11-19",
        rerun="attemper compare plans/few-labels.yaml --init STUDY/weights/KEY --layer-decay 0.75",
    ),
    Kept(name="BCCD", file="bccd.html", page="boxes.md", date="2026-11-19", rerun="attemper compare plans/bccd.yaml"),
    Kept(
        name="CamVid",
        file="camvid.html",
        page="camvid.md",
        date="2026-11-19",
        rerun="attemper compare plans/camvid.yaml",
    ),
    Kept(
        name="CIFAR-10, 7 blocks, 9 epochs",
        file="recommend-cifar10.html",
        page="recommend-cifar10.md",
        date="2026-11-19",
        rerun="attemper recommend plans/recommend-cifar10.yaml --recipes dropkey explicit cb --minutes 9",
    ),
    Kept(
        name="digits, rates",
        file="rates-digits.json",
        page="rates-digits.md",
        date="2026-11-18",
        digits=True,
        rerun="attemper compare docs/results/rates-digits.yaml",
    ),
    Kept(
        name="digits, skips",
        file="skips.json",
        page="README.md#skips",
        date="2026-11-18",
        digits=True,
        rerun="attemper experiment skips",
    ),
    Kept(
        name="digits, graying",
        file="graying.json",
        page="README.md#graying-over-ε",
        date="2026-11-18",
        digits=True,
        rerun="attemper experiment graying",
    ),
    Kept(
        name="digits, gradients",
        file="gradient-variance.json",
        page="README.md#variance-of-gradients",
        date="2026-11-18",
        digits=True,
        rerun="attemper experiment gradient-variance",
    ),
)


# ----------------------------------------------------------------------------------------------------------- summaries
@functools.cache
def summary_of(file: str) -> Summary:
    """What a study's results come to, by today's rules."""
    path = RESULTS / file
    if path.suffix == ".html":
        return read_summary(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    return assess(of_arms(found)) if "arms" in found else reassessed(completed(found))


def of_arms(found: Mapping[str, Any]) -> dict[str, Any]:
    """What an experiment found as a summary: the arms that are one model under several recipes."""
    first = found["arms"][0]
    arms = [arm for arm in found["arms"] if arm["model"] == first["model"]]
    seeds = max((arm["seeds"] for arm in arms), key=len)
    plan = {"task": found["task"], "model": found["models"][first["model"]], "seeds": seeds, "budget": found["budget"]}
    rows = [row_of(arm, first) for arm in arms]
    return {**{name: found[name] for name in ("title", "metric", "versions")}, "plan": plan, "recipes": rows}


def row_of(arm: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """An arm as a row. What it costs is its operations: runs beside each other say little about time."""
    same = ("name", "recipe", "seeds", "test", "train", "mean", "deviation", "diverged", "flops")
    ratio = arm["flops"]["step"] / first["flops"]["step"]
    unknown = [None] * len(arm["test"])
    more = {"validation": unknown, "missing": 0, "published": None, "lr": None, "cost": {"ratio": ratio}}
    return {**{name: arm[name] for name in same}, **more}


def completed(found: dict[str, Any]) -> dict[str, Any]:
    """A summary with the columns that its record left out."""
    rows = [{"published": None, "missing": 0, "lr": None, **row} for row in found["recipes"]]
    return {"metric": "accuracy", **found, "recipes": rows}


# -------------------------------------------------------------------------------------------------------------- tables
def line_of(kept: Kept, row: Mapping[str, Any]) -> list[str]:
    """One recipe of a study: recipe, study, difference, verdict, cost, ours, published."""
    published = "–"
    if row["name"] in kept.published:
        key, name = kept.published[row["name"]]
        cell = next(each for each in find_table(key).rows if each.name == name)
        published = f"{cell.value:.2f} ± {cell.deviation:.2f}"
    return [
        f"`{plainest(row['recipe'])}`",
        f"[{kept.name}]({kept.page})",
        points(row["difference"]),
        answer_text(row["decision"]),
        f"× {cost_of(kept, row):.2f}",
        f"{100 * row['mean']:.2f} ± {100 * row['deviation']:.2f}",
        published,
    ]


def cost_of(kept: Kept, row: Mapping[str, Any]) -> float:
    """What a recipe costs against none: its time, or its operations where other work on the GPU made times useless."""
    if row["cost"] is not None:
        return float(row["cost"]["ratio"])
    none = next(each for each in summary_of(kept.file)["recipes"] if each["recipe"] == "none")
    return float(row["flops"]["step"] / none["flops"]["step"])


def points(difference: Mapping[str, Any]) -> str:
    """A difference in points with its interval."""
    text = f"{100 * difference['mean']:+.2f}"
    if difference["low"] is not None:
        text += f" ({100 * difference['low']:+.2f} to {100 * difference['high']:+.2f})"
    return text.replace("-", "−")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


HEADER = ("recipe", "study", "difference, points (adjusted interval)", "verdict", "cost", "ours, %", "published, %")


def recipes(digits: bool) -> str:
    """All recipes of the studies on real data, or of those on digits."""
    return table(HEADER, sorted((line_of(kept, row) for kept, row in compared(digits)), key=lambda line: line[0]))


def studies() -> str:
    """What each study is, how large, what it could see, and how to run it again."""
    rows = []
    for kept in KEPT:
        summary = summary_of(kept.file)
        rows_here = [row for name, row in compared(kept.digits) if name is kept]
        seen = [row["decision"]["smallest"] for row in rows_here if row["decision"]["smallest"] is not None]
        plan, versions = summary["plan"], summary["versions"]
        seeds = sorted({len(row["seeds"]) for row in summary["recipes"]})
        size = f"{len(rows_here)} × {seeds[0]}" if len(seeds) == 1 else f"{len(rows_here)} × {seeds[0]} to {seeds[-1]}"
        rows.append(
            [
                f"[{kept.name}]({kept.page})",
                f"`{plan['model']}`, {plan['budget']['epochs']} epochs",
                size,
                f"{100 * statistics.median(seen):.1f}" if seen else "–",
                f"[{Path(kept.file).name}]({kept.file})",
                f"`{kept.rerun}`",
                f"{versions['device']}, torch {versions['torch'].partition('+')[0]}, {kept.date}",
            ]
        )
    header = ("study", "model", "recipes × seeds", "could see, points", "results", "command, in short", "machine, date")
    return table(header, rows)


def compared(digits: bool) -> Iterator[tuple[Kept, Mapping[str, Any]]]:
    """Every recipe of every study, once where two are the same thing, on real data or on digits."""
    for kept in KEPT:
        if kept.digits == digits:
            summary = summary_of(kept.file)
            rows = (row for row in summary["recipes"] if row["decision"] and row["name"] not in summary["same"])
            yield from ((kept, row) for row in rows)


def counts(digits: bool) -> str:
    answers = [row["decision"]["answer"] for _, row in compared(digits)]
    words = [f"{answers.count(answer)} {answer}" for answer in ANSWERS]
    return f"{len(answers)} comparisons with `none`: **{', '.join(words)}**"


def tally() -> str:
    """How many comparisons were decided which way, on real data and on digits."""
    return f"On real data, {counts(digits=False)}.\n\nOn digits, {counts(digits=True)}."


def headline() -> str:
    """The same in a sentence, with what is better."""
    better = [
        f"`{plainest(row['recipe'])}` on {kept.name}, {points(row['difference'])} points at "
        f"× {cost_of(kept, row):.2f} the cost"
        for kept, row in compared(digits=False)
        if row["decision"]["answer"] == "better"
    ]
    found = f" Better: {'; '.join(better)}." if better else ""
    return (
        f"**Does it help?** [Our studies](docs/results/index.md) on real data so far, {counts(digits=False)}.{found} "
        "Most are short and have three seeds, and say what they could not see."
    )


PARTS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "tally": tally,
    "real": lambda: recipes(digits=False),
    "digits": lambda: recipes(digits=True),
    "studies": studies,
}


def fill(page: str) -> str:
    """The page with what is between its markers made anew."""

    def evidence(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n\n{match[3]}"

    def one(match: re.Match[str]) -> str:
        return f"{match[1]}\n{markdown_table(dict(summary_of(match[2])))}\n\n{match[3]}"

    return STUDY.sub(one, EVIDENCE.sub(evidence, page))


def pages() -> list[Path]:
    """The pages that show something of this."""
    found = [ROOT / "README.md", *sorted(RESULTS.rglob("*.md"))]
    return [path for path in found if re.search(r"<!-- (evidence|study): ", path.read_text(encoding="utf-8"))]


# ---------------------------------------------------------------------------------------------------------------- chart
def marks() -> list[Interval]:
    """Every comparison on real data, from the largest gain to the largest loss."""
    found = [
        Interval(
            name=f"{plainest(row['recipe'])}  ·  {kept.name}",
            value=100 * row["difference"]["mean"],
            low=100 * row["difference"]["low"],
            high=100 * row["difference"]["high"],
            strong=row["decision"]["answer"] in ("better", "worse"),
        )
        for kept, row in compared(digits=False)
        if "skipless" not in row["recipe"]  # fifty points to the left of all others
    ]
    return sorted(found, key=lambda mark: -mark.value)


if __name__ == "__main__":
    for path in pages():
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    title = "Test accuracy, mAP, AP or mIoU against no regularisation, points, with adjusted intervals"
    intervals(marks(), title=title, reach=12.0).save(RESULTS / "evidence.png")
