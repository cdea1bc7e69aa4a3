"""The page of a recommendation: the answer, its confirmation, and apart from it what was explored."""

from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.report.charts import Curve, key, lines
from attemper.lab.report.drawing import Axis
from attemper.lab.report.entries import percent
from attemper.lab.report.markup import Cell, Column, escape, table
from attemper.lab.report.page import Section
from attemper.lab.report.scale import finite, number
from attemper.lab.report.study import render as render_study


def render(found: Mapping[str, Any]) -> str:
    """One self-contained HTML page about what `attemper.lab.study.recommend.recommend` has found."""
    summary = {**found["confirmation"], "title": found["title"]}
    text = str(found["answer"]["text"])
    more = [_exploration(found), _trials(found)]
    return render_study(summary, kicker="Attemper · recommendation", first=text, after=more)


def _exploration(found: Mapping[str, Any]) -> Section:
    explored: Sequence[Mapping[str, Any]] = found["explored"]
    epochs = list(found["epochs"])
    columns = [
        Column("recipe"),
        Column("trials", numeric=True, hint="the same number for every recipe, learning rates included"),
        Column("best settings"),
        Column("learning rate", numeric=True),
        Column(f"validation, {epochs[-1]} epochs, %", numeric=True, hint="of the best trial, on one seed"),
        Column(
            f"expected best of all, {epochs[0]} epochs, %", numeric=True, hint="what so many trials reach on average"
        ),
        Column("confirmed on fresh seeds"),
    ]
    rows = []
    for at, row in enumerate(explored):
        best, expected = row["best"], row["expected_best"]
        reached, usual = percent(best["validation"]), percent(expected[-1] if expected else None)
        rows.append(
            [
                Cell(f"{key(at)}{escape(row['name'])}", row["name"]),
                Cell(str(len(row["trials"])), len(row["trials"])),
                Cell(escape(best["recipe"]), best["recipe"]),
                Cell(number(best["lr"], significant=2), finite(best["lr"])),
                Cell(number(reached, 2), reached),
                Cell(number(usual, 2), usual),
                Cell("yes" if row["confirmed"] else "no", "yes" if row["confirmed"] else "no"),
            ]
        )
    curves = [
        Curve(
            label=row["name"],
            x=list(range(1, len(row["expected_best"]) + 1)),
            y=[percent(value) for value in row["expected_best"]],
            series=at,
        )
        for at, row in enumerate(explored)
    ]
    chart = lines(
        curves,
        title="Expected best of k trials",
        x=Axis(label="trials"),
        y=Axis(label=f"validation after {epochs[0]} epochs, %"),
        note="The best validation that k of a recipe's trials have on average: what more searching would bring it.",
    )
    left = "".join(f"<p>{escape(name)} was left out: {escape(why)}</p>" for name, why in found["misfits"].items())
    stages = " → ".join(str(each) for each in epochs)
    return Section(
        heading="Exploration",
        lead=(
            "Every recipe had the same number of trials, on one seed and by validation alone; the test set was not "
            "looked "
            f"at. Of each recipe's trials the best third went on ({stages} epochs). The best of many trials looks "
            "better "
            "than it is, which is why the figures here are no evidence, and the confirmation above has other seeds."
        ),
        body=table(columns, rows, caption="What was explored", sortable=True) + chart + left,
    )


def _trials(found: Mapping[str, Any]) -> Section:
    epochs = list(found["epochs"])
    columns = [Column("settings"), Column("learning rate", numeric=True)]
    columns += [Column(f"{each} epochs, %", numeric=True, hint="validation") for each in epochs]
    parts = []
    for at, row in enumerate(found["explored"]):
        cells = [
            [
                Cell(escape(trial["recipe"]), trial["recipe"]),
                Cell(number(trial["lr"], significant=2), finite(trial["lr"])),
                *(Cell(number(percent(value), 2), percent(value)) for value in trial["validation"]),
            ]
            for trial in row["trials"]
        ]
        inner = table(columns, cells, caption=f"Trials of {row['name']}", sortable=True)
        title = f"{key(at)}{escape(row['name'])} <small>{len(cells)} trials</small>"
        parts.append(f"<details><summary>{title}</summary>{inner}</details>")
    return Section(
        heading="Everything that was tried",
        lead="Validation at each stage; a dash is a trial that did not go on, or diverged.",
        body="".join(parts),
    )
