"""The page of many studies: recipes × tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.report.charts import Row, dots, key
from attemper.lab.report.drawing import Axis
from attemper.lab.report.entries import ANSWER_LABELS, percent
from attemper.lab.report.markup import Cell, Column, code_block, data_block, escape, paragraph, prose, table
from attemper.lab.report.page import Section, page
from attemper.lab.report.scale import finite, number, probability, signed


def render(overview: Mapping[str, Any], command: str = "attemper report") -> str:
    """One self-contained HTML page, from what `attemper.lab.study.many.overview` says."""
    tasks, recipes = list(overview["tasks"]), list(overview["recipes"])
    head = paragraph(_findings(tasks, recipes), "verdict") + data_block("overview", _small(overview))
    cautions = [f"{task['title']}: {' '.join(task['cautions'])}" for task in tasks if task["cautions"]]
    head = "".join(paragraph(line, "notice") for line in cautions) + head
    sections = [_matrix(tasks, recipes), _whole(recipes), _charts(tasks, recipes), _studies(tasks, command)]
    return page(f"{len(recipes)} recipes on {len(tasks)} tasks", sections, head=head, kicker="Attemper · tasks")


def _small(overview: Mapping[str, Any]) -> dict[str, Any]:
    return {"tasks": overview["tasks"], "recipes": overview["recipes"]}


def _findings(tasks: Sequence[Mapping[str, Any]], recipes: Sequence[Mapping[str, Any]]) -> str:
    """What holds over tasks, in two sentences."""
    counts = {answer: sum(row["answers"][answer] for row in recipes) for answer in ("better", "worse", "equivalent")}
    open_ = sum(row["answers"]["undecided"] for row in recipes)
    decided = ", ".join(f"{count} {answer}" for answer, count in counts.items() if count) or "none"
    text = f"Of {sum(counts.values()) + open_} comparisons with none, decided are: {decided}; {open_} are undecided."
    wide = [row for row in recipes if (row["improvement"] or {}).get("low") is not None]
    clear = [row for row in wide if row["improvement"]["low"] > 0.5]
    if len(tasks) > 1 and clear:
        names = ", ".join(f"{row['name']} ({probability(row['improvement']['mean'])})" for row in clear)
        return f"{text} Over tasks, more likely than not to score higher than none: {names}."
    if len(tasks) > 1 and wide:
        text += " Over tasks, no recipe can be told from none: every interval of its probability reaches one half."
    return text


def _matrix(tasks: Sequence[Mapping[str, Any]], recipes: Sequence[Mapping[str, Any]]) -> Section:
    columns = [Column("recipe")]
    columns += [Column(str(task["title"]), numeric=True, hint=_hint(task)) for task in tasks]
    rows = [
        [Cell(f"{key(at)}{escape(row['name'])}", row["name"]), *(_cell(cell) for cell in row["cells"])]
        for at, row in enumerate(recipes, 1)
    ]
    return Section(
        heading="Differences",
        lead=(
            "In points, each recipe against none on the same task and seeds, with its interval, adjusted within the "
            "study. "
            "A dash: the study does not have the recipe. Type into the field to show some recipes only."
        ),
        body=_filter() + table(columns, rows, caption="Recipes by tasks", sortable=True),
    )


def _filter() -> str:
    return (
        '<p class="filter"><label>Show recipes with <input type="search" data-filter '
        'autocomplete="off" spellcheck="false"></label></p>'
    )


def _hint(task: Mapping[str, Any]) -> str:
    baseline = percent(task["baseline"])
    return f"{task['task']} · {task['model']} · {task['metric']}, none {number(baseline, 2)}"


def _cell(cell: Mapping[str, Any] | None) -> Cell:
    found = None if cell is None else cell["difference"]
    if cell is None or found is None or finite(found["mean"]) is None:
        return Cell("–")
    mean, low, high = (percent(found[part]) for part in ("mean", "low", "high"))
    text = signed(mean)
    if low is not None and high is not None:
        text += f"<small>{signed(low)} to {signed(high)}</small>"
    answer = str((cell["decision"] or {}).get("answer") or "")
    return Cell(f"{text}<small>{escape(answer)}</small>", mean, ANSWER_LABELS.get(answer, ""))


def _whole(recipes: Sequence[Mapping[str, Any]]) -> Section:
    columns = [
        Column("recipe"),
        Column("mean rank", numeric=True, rising=True, hint="1 is the best; none is ranked among them"),
        Column("P(improvement)", numeric=True, hint="to score higher than none under one seed"),
        Column("better · equivalent · undecided · worse", hint="on how many tasks"),
        Column("step time", numeric=True, rising=True, hint="median ratio to none"),
        Column("tasks", numeric=True),
    ]
    rows = []
    for at, row in enumerate(recipes, 1):
        found = row["improvement"] or {}
        mean, low, high = (finite(found.get(part)) for part in ("mean", "low", "high"))
        below = "" if low is None or high is None else f"<small>{100 * low:.0f} to {100 * high:.0f} %</small>"
        rows.append(
            [
                Cell(f"{key(at)}{escape(row['name'])}", row["name"]),
                Cell(number(row["rank"], 2), finite(row["rank"])),
                Cell("–" if mean is None else f"{100 * mean:.0f} %{below}", mean),
                Cell(" · ".join(str(row["answers"][a]) for a in ("better", "equivalent", "undecided", "worse"))),
                Cell(number(row["cost"], 2), finite(row["cost"])),
                Cell(str(row["tasks"]), row["tasks"]),
            ]
        )
    return Section(
        heading="Over tasks",
        lead=(
            "Probability of improvement: the share of seeds with a higher score than none, the mean over tasks. Its "
            "interval "
            "draws tasks, and seeds within them, anew; of few tasks it is wide, as it should be. A recipe that "
            "stands on few "
            "tasks has met other opponents than one that stands on all."
        ),
        body=table(columns, rows, caption="Recipes over all tasks", sortable=True, sorted_by=1),
    )


def _charts(tasks: Sequence[Mapping[str, Any]], recipes: Sequence[Mapping[str, Any]]) -> Section:
    parts = []
    for at, task in enumerate(tasks):
        rows = []
        for series, row in enumerate(recipes, 1):
            found = (row["cells"][at] or {}).get("difference") or {}
            mean, low, high = (percent(found.get(part)) for part in ("mean", "low", "high"))
            if mean is not None:
                rows.append(Row(label=row["name"], series=series, value=mean, low=low, high=high, note=signed(mean)))
        margin = percent((task["margin"] or {}).get("value"))
        parts.append(dots(rows, title=str(task["title"]), axis=Axis(label="points", rule=0.0, zone=margin)))
    return Section(
        heading="Task by task",
        lead="Differences to none with their adjusted intervals; within the shaded zone a difference does not matter.",
        body=f'<div class="pair">{"".join(parts)}</div>',
    )


def _studies(tasks: Sequence[Mapping[str, Any]], command: str) -> Section:
    items = "".join(
        f"<h3>{escape(task['title'])}</h3><p>{escape(task['task'])} · {escape(task['model'])}, from "
        f"{escape(task['source'])}{'' if task['complete'] else ' (not complete)'}.</p><p>{prose(task['verdict'])}</p>"
        for task in tasks
    )
    return Section(heading="The studies", body=f"{items}<h3>Command</h3>{code_block(command)}")
