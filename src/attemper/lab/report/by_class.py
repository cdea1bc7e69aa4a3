"""What a metric is class by class, and pictures of predictions: the baseline, and the best of the others."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.report.charts import Row, dots, key
from attemper.lab.report.drawing import Axis
from attemper.lab.report.entries import Entry, percent
from attemper.lab.report.markup import Cell, Column, escape, table
from attemper.lab.report.page import Section
from attemper.lab.report.scale import number, signed

CHARTED = 30
"""Classes up to which a chart of all of them can be read."""


def pair_with(ranked: Sequence[Entry], part: str) -> list[Entry]:
    """The baseline and the best other recipe, of those whose details have a part."""
    known = [entry for entry in ranked if (entry.raw.get("details") or {}).get(part)]
    pair = [next((e for e in known if e.baseline), None), next((e for e in known if not e.baseline), None)]
    return [entry for entry in pair if entry is not None]


def by_class(ranked: Sequence[Entry]) -> Section | None:
    """A chart and a table of a metric, class by class."""
    pair = pair_with(ranked, "table")
    if not pair:
        return None
    tables = [entry.raw["details"]["table"] for entry in pair]
    first, last = tables[0], tables[-1]
    names = [row["name"] for row in first["rows"]]
    if [row["name"] for row in last["rows"]] != names:
        return None
    metric, two = str(first["metric"]), len(pair) > 1
    rows, cells = [], []
    for before, after in zip(first["rows"], last["rows"], strict=True):
        values = [percent(row["value"]) for row in ((before, after) if two else (after,))]
        rows.append(_dot(str(after["name"]), values, pair[-1].series))
        figures = [Cell(number(value, 1), value) for value in values]
        cells.append(
            [Cell(escape(after["name"]), str(after["name"])), Cell(f"{after['count']:,}", after["count"]), *figures]
        )
    columns = [Column("class"), Column(str(first["counted"]), numeric=True)]
    columns += [Column(f"{entry.name}, {metric}, %", numeric=True) for entry in pair]
    hollow = f"Filled: {pair[-1].name}. Hollow: {pair[0].name}." if two else ""
    chart = dots(rows, title=f"{metric} by class", axis=Axis(label=f"{metric}, %"), note=hollow)
    body = table(columns, cells, caption=f"{metric} by class", sortable=True, sorted_by=0)
    over = ", the mean over seeds" if any(entry.raw["details"].get("runs", 1) > 1 for entry in pair) else ""
    whose = ": the baseline, and the best of the others" if two else ""
    return Section(
        heading="Classes",
        lead=(
            f"{metric} class by class on the test set{over}{whose}. Classes with few samples are less sure than the "
            "whole."
        ),
        body=(chart if len(rows) <= CHARTED else "") + body,
    )


def _dot(name: str, values: Sequence[float | None], series: int) -> Row:
    after, before = values[-1], values[0] if len(values) > 1 else None
    both = before is not None and after is not None
    return Row(
        label=name,
        series=series,
        value=after,
        other=before,
        low=min(before, after) if before is not None and after is not None else None,
        high=max(before, after) if before is not None and after is not None else None,
        note=f"{number(after, 1)} %" + (f" ({signed(after - before, 1)})" if both else ""),  # type: ignore[operator]
    )


def pictures(ranked: Sequence[Entry]) -> Section | None:
    """The same test samples as two recipes see them, those of a recipe below its name."""
    parts = []
    for entry in pair_with(ranked, "pictures"):
        shown = "".join(map(picture, entry.raw["details"]["pictures"]))
        if shown:
            parts.append(f'<h3>{key(entry.series)}{escape(entry.name)}</h3><div class="panels">{shown}</div>')
    if not parts:
        return None
    lead = "Test samples that were chosen before any model saw them."
    if len(ranked) > 1:
        lead = f"Of the first seed. {lead} All recipes have the same ones."
    return Section(heading="Pictures", lead=lead, body="".join(parts))


def picture(given: Mapping[str, Any]) -> str:
    """A figure; nothing where the bytes are no image that a page shows."""
    try:
        data = base64.b64decode(given["data"], validate=True)
    except (KeyError, TypeError, binascii.Error):
        return ""
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg" if data.startswith(b"\xff\xd8\xff") else None
    if kind is None:
        return ""
    caption, text = escape(given.get("caption", "")), base64.b64encode(data).decode()
    return (
        f'<figure class="shown"><img class="picture" alt="{caption}" src="data:image/{kind};base64,{text}">'
        f'<figcaption><span class="note">{caption}</span></figcaption></figure>'
    )
