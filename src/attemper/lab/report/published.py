"""The parts of a study's page about published figures: theirs beside ours, and whether the settings agree."""

from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.report.charts import Row, dots, key
from attemper.lab.report.drawing import Axis
from attemper.lab.report.entries import Entry
from attemper.lab.report.markup import Cell, Column, escape, paragraph, table
from attemper.lab.report.page import Section
from attemper.lab.report.scale import finite, number, signed

Found = Mapping[str, Any]
Reference = Mapping[str, Any]
NOTHING = "No figure was published for these rows, or none can be read in our copy."
LEAD = "Other people's results, from their own code and splits. They stand beside ours, never instead of them."


def sections(ranked: Sequence[Entry], metric: str, reference: Reference) -> list[Section | None]:
    """Published figures, and behind them the settings that they were made with.

    reference: the published table that the study runs again, as its summary has it; empty where there is none.
    """
    return [_figures(ranked, metric, reference), _settings(reference)]


def _cells(entry: Entry) -> list[Found]:
    """The published cells of a recipe; a summary of an older version has one at most."""
    if "beside" in entry.raw:
        return [cell for cell in entry.raw["beside"] or () if finite(cell.get("published")) is not None]
    value = finite(entry.published.get("value"))
    if value is None:
        return []
    deviation, source = entry.published.get("deviation"), entry.published.get("source")
    ours = {"ours": entry.mean, "ours_deviation": entry.deviation, "unit": "%"}
    difference = None if entry.mean is None else entry.mean - value
    return [{"published": value, "deviation": deviation, "source": source, **ours, "difference": difference}]


def _figures(ranked: Sequence[Entry], metric: str, reference: Reference) -> Section | None:
    by_column: dict[str, list[tuple[Entry, Found]]] = {}
    for entry in sorted(ranked, key=lambda entry: entry.series):  # as the publication has them
        for cell in _cells(entry):
            by_column.setdefault(str(cell.get("column") or ""), []).append((entry, cell))
    if not by_column and not reference:
        return None
    ordered = sorted(by_column.items(), key=lambda item: item[0] != "")  # the task's own metric first, the others as is
    apart = str(reference.get("apart") or "") if by_column else ""
    body = paragraph(apart, "notice") if apart else ""
    body += f"<p>{escape(reference['standing'])}</p>" if reference.get("standing") else ""
    body += "" if by_column else f"<p>{escape(NOTHING)}</p>"
    for title, found in ordered:
        name = title or f"test {metric}, %"
        body += f"<h3>{escape(name)}</h3>" if len(ordered) > 1 else ""
        body += _about(found) + ("" if title or apart else _chart(found, metric)) + _table(found, name, not apart)
    return Section(heading="Published figures", lead=LEAD, body=body + _notes(reference))


def _chart(found: Sequence[tuple[Entry, Found]], metric: str) -> str:
    """The task's own metric, ours and theirs on one axis."""
    rows = []
    for entry, cell in found:
        value, ours = float(cell["published"]), finite(cell.get("ours"))
        low, high = _around(ours, finite(cell.get("ours_deviation")))
        other_low, other_high = _around(value, finite(cell.get("deviation")))
        rows.append(
            Row(
                label=entry.name,
                series=entry.series,
                value=ours,
                low=low,
                high=high,
                other=value,
                other_low=other_low,
                other_high=other_high,
                note=f"{number(ours, 2)} / {number(value, 2)}",
            )
        )
    return dots(
        rows,
        title="Ours and published",
        axis=Axis(label=f"test {metric}, %"),
        note="Filled, and the first figure: ours. Hollow, and the second: published. Bars: ± one standard deviation.",
    )


def _around(value: float | None, spread: float | None) -> tuple[float | None, float | None]:
    return (None, None) if value is None or spread is None else (value - spread, value + spread)


def _about(found: Sequence[tuple[Entry, Found]]) -> str:
    """Where a column stands, and how ours is measured."""
    first = found[0][1]
    condition = f" Ours: {first['condition']}." if first.get("condition") else ""
    sources = "; ".join(dict.fromkeys(str(cell.get("source") or "") for _, cell in found))
    return f"<p>{escape(f'Source: {sources}.' if sources else '')}{escape(condition)}</p>"


def _table(found: Sequence[tuple[Entry, Found]], title: str, compared: bool) -> str:
    """One published column. compared: it is the published task, so that differences count."""
    rows = []
    for entry, cell in found:
        ours, difference = finite(cell.get("ours")), finite(cell.get("difference"))
        rows.append(
            [
                Cell(f"{key(entry.series)}{escape(entry.name)}", entry.name),
                Cell(_spread(finite(cell["published"]), finite(cell.get("deviation"))), finite(cell["published"])),
                Cell(_spread(ours, finite(cell.get("ours_deviation"))), ours),
                Cell("–" if difference is None else signed(difference), difference),
            ][: 4 if compared else 3]
        )
    columns = [
        Column("recipe"),
        Column("theirs", numeric=True, hint="published"),
        Column("ours", numeric=True),
        Column("diff.", numeric=True, hint="ours less what was published"),
    ][: 4 if compared else 3]
    return table(columns, rows, caption=f"Ours and published: {title}", sortable=True)


def _spread(value: float | None, spread: float | None) -> str:
    if value is None:
        return "–"
    return number(value, 2) if spread is None else f"{number(value, 2)}<small>± {number(spread, 2)}</small>"


def _notes(reference: Reference) -> str:
    lines = "".join(f"<li>{escape(note)}</li>" for note in reference.get("notes") or ())
    return f"<h3>Before figures are compared</h3><ul>{lines}</ul>" if lines else ""


MARKS = {"as printed": "good", "other": "bad", "ours": ""}


def _settings(reference: Reference) -> Section | None:
    """Every setting: what is done here, what was printed, whether they agree."""
    settings = reference.get("settings") or ()
    if not settings:
        return None
    rows = [_setting(each) for each in settings]
    columns = [Column("setting"), Column("standing"), Column("here"), Column("printed")]
    return Section(
        heading="Settings beside those printed",
        lead=str(reference.get("standing") or ""),
        body=table(columns, rows, caption="Settings here and as printed", sortable=True),
    )


STANDINGS = {"as printed": "as printed", "other": "other than printed", "ours": "our choice"}


def _setting(each: Found) -> list[Cell]:
    printed, standing = each.get("printed") or None, str(each["standing"])
    return [
        Cell(escape(each["name"]), each["name"]),
        Cell(escape(STANDINGS.get(standing, standing)), standing, MARKS.get(standing, "")),
        Cell(escape(each["here"]), each["here"]),
        Cell(escape(printed or "not said"), printed),
    ]
