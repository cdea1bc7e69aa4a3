"""The parts of a page about calibration and robustness."""

from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.evaluation.corruption_constants import EXTRA
from attemper.lab.report.charts import Curve, key, legend, lines
from attemper.lab.report.drawing import Axis
from attemper.lab.report.entries import Entry, percent
from attemper.lab.report.markup import Cell, Column, escape, facts, table
from attemper.lab.report.page import Section
from attemper.lab.report.reliability import reliability
from attemper.lab.report.scale import finite, number


def _evaluation(entry: Entry) -> Mapping[str, Any]:
    return entry.raw.get("evaluation") or {}


STUDY = (
    "Measured once, at the end of every run, on the same reading of the test set. Coloured figures differ from those "
    "of the baseline, paired by seed, with p ≤ 0.05 after a correction over the whole table."
)
LEVEL = 0.05


def calibration(ranked: Sequence[Entry], lead: str = STUDY) -> Section | None:
    """Every figure of the evaluation, and a reliability diagram per recipe. lead: how they were obtained."""
    known = [entry for entry in ranked if _evaluation(entry).get("figures")]
    if not known:
        return None
    diagrams = [
        reliability(_evaluation(entry)["bins"], title=entry.name, series=entry.series, note=_error_of(entry))
        for entry in known
        if _evaluation(entry).get("bins")
    ]
    reading = (
        " In a diagram, a mark below the dashed line is a group of predictions that were right less often than they "
        "were sure. Columns show how the predictions are spread, those of all seeds together; a hollow mark stands for "
        "less than 1 % of them, and may be chance."
    )
    return Section(
        heading="Evaluation",
        lead=lead + (reading if diagrams else ""),
        body=_figures(known) + (f'<div class="squares">{"".join(diagrams)}</div>' if diagrams else ""),
    )


def _error_of(entry: Entry) -> str:
    error = next((f for f in _evaluation(entry)["figures"] if f.get("name") == "ECE"), None)
    return f"expected calibration error {_figure(error)} %" if error else ""


def _figures(known: Sequence[Entry]) -> str:
    """A table, or for one recipe alone a list, which needs no scrolling."""
    if len(known) == 1:
        figures = _evaluation(known[0])["figures"]
        return facts({each["name"]: f"{_figure(each)}{' %' if each['share'] else ''}" for each in figures})
    by_name = {f["name"]: f for entry in known for f in _evaluation(entry)["figures"]}
    columns = [Column("recipe")]
    columns += [
        Column(f"{name}{', %' if by_name[name]['share'] else ''}", numeric=True, rising=by_name[name]["falling"])
        for name in by_name
    ]
    rows = []
    for entry in known:
        own = {f["name"]: f for f in _evaluation(entry)["figures"]}
        rows.append(
            [
                Cell(f"{key(entry.series)}{escape(entry.name)}", entry.name),
                *(
                    Cell(_narrow(own[name]), finite(own[name].get("mean")), _label(own[name]))
                    if name in own
                    else Cell("–")
                    for name in by_name
                ),
            ]
        )
    return table(columns, rows, caption="Calibration and robustness", sortable=True)


def _figure(figure: Mapping[str, Any]) -> str:
    factor, digits = (100, 2) if figure.get("share") else (1, 3)
    mean, deviation = finite(figure.get("mean")), finite(figure.get("deviation"))
    if mean is None:
        return "–"
    text = number(factor * mean, digits)
    return text if deviation is None else f"{text} ± {number(factor * deviation, digits)}"


def _label(figure: Mapping[str, Any]) -> str:
    """Colour only where the difference to the baseline would stand among all figures of the table."""
    difference = figure.get("difference") or {}
    mean, adjusted = finite(difference.get("mean")), finite(difference.get("adjusted"))
    if mean is None or adjusted is None or adjusted > LEVEL:
        return ""
    return "good" if (mean < 0) == bool(figure.get("falling")) else "bad"


def _narrow(figure: Mapping[str, Any]) -> str:
    """The same with the deviation below the mean: a table of many figures then needs no scrolling."""
    mean, _, deviation = _figure(figure).partition(" ± ")
    return f"{mean}<small>± {deviation}</small>" if deviation else mean


# ----------------------------------------------------------------------------------------------------------- robustness
PANELS = (
    ("Occlusion in the middle", "occlusion", "centre", "share", "covered, % of the area", 100.0),
    ("Occlusion anywhere", "occlusion", "random", "share", "covered, % of the area", 100.0),
    ("FGSM", "attacks", "fgsm", "epsilon", "ε, in 1/255", 255.0),
    ("PGD", "attacks", "pgd", "epsilon", "ε, in 1/255", 255.0),
)
"""Title, group, kind, what runs along x, its name and its unit."""


def robustness(ranked: Sequence[Entry]) -> Section | None:
    """Accuracy as images get harder: one panel per way of making them so, a line per recipe."""
    known = [entry for entry in ranked if _evaluation(entry).get("robustness")]
    if not known:
        return None
    drawn = []
    for title, group, kind, fact, label, unit in PANELS:
        found = [_curve(entry, group, kind, fact, unit) for entry in known]
        if any(len(curve.x) > 1 for curve in found):
            drawn.append(lines(found, title=title, x=Axis(label=label), y=Axis(label="%"), digits=4))
    means = [_severity_curve(entry) for entry in known]
    if any(len(curve.x) > 1 for curve in means):
        drawn.append(lines(means, title="Corruptions, mean", x=Axis(label="severity"), y=Axis(label="%"), digits=4))
    switches = legend([(entry.name, entry.series) for entry in known], switches=True) if len(known) > 1 else ""
    return Section(
        heading="Robustness",
        lead=(
            "Test accuracy as images get harder; the left end is the plain test set. Where there are several seeds, "
            "bands reach from the lowest to the highest. Attacks move pixels, which run from 0 to 1, before "
            "normalisation."
        ),
        body=f'<div data-group>{switches}<div class="panels">{"".join(drawn)}</div></div>{_corruptions(known)}',
    )


def _curve(entry: Entry, group: str, kind: str, fact: str, unit: float) -> Curve:
    points = [one for one in _evaluation(entry)["robustness"].get(group) or () if one.get("kind") == kind]
    points = sorted((one for one in points if finite(one.get(fact))), key=lambda one: float(one[fact]))
    clean = percent(_evaluation(entry).get("accuracy"))
    return Curve(
        label=entry.name,
        series=entry.series,
        x=[0.0, *(unit * float(one[fact]) for one in points)],
        y=[clean, *(percent(one.get("accuracy")) for one in points)],
        low=[clean, *(percent(one.get("low")) for one in points)],
        high=[clean, *(percent(one.get("high")) for one in points)],
    )


def _severity_curve(entry: Entry) -> Curve:
    by_severity: dict[float, list[float]] = {}
    for one in _corrupted(entry):
        if one["kind"] in EXTRA:
            continue
        severity, value = finite(one.get("severity")), percent(one.get("accuracy"))
        if severity is not None and value is not None:
            by_severity.setdefault(severity, []).append(value)
    severities = sorted(by_severity)
    return Curve(
        label=entry.name,
        series=entry.series,
        x=[0.0, *severities],
        y=[percent(_evaluation(entry).get("accuracy")), *(_mean(by_severity[s]) for s in severities)],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _corruptions(known: Sequence[Entry]) -> str:
    """Accuracy corruption by corruption: by severity for one recipe, as the mean over severities for several."""
    kinds = list(dict.fromkeys(one["kind"] for entry in known for one in _corrupted(entry)))
    if not kinds:
        return ""
    if len(known) == 1:
        caption = "Accuracy under each corruption by severity, in per cent"
        severities = sorted({one["severity"] for one in _corrupted(known[0])})
        columns = [Column("corruption"), *(Column(str(severity), numeric=True) for severity in severities)]
        values = {(one["kind"], one["severity"]): percent(one.get("accuracy")) for one in _corrupted(known[0])}
        rows = [
            [Cell(escape(_words(kind)), kind), *(_per_cent(values.get((kind, severity))) for severity in severities)]
            for kind in kinds
        ]
    else:
        caption = "Accuracy under each corruption, in per cent, mean over the severities"
        columns = [Column("recipe"), *(Column(_words(kind), numeric=True) for kind in kinds)]
        rows = [
            [
                Cell(f"{key(entry.series)}{escape(entry.name)}", entry.name),
                *(_per_cent(_mean_of(entry, kind)) for kind in kinds),
            ]
            for entry in known
        ]
    return f"<h3>{caption}</h3><p>{escape(_constants(known[0]))}</p>" + table(
        columns, rows, caption=caption, sortable=True
    )


def _constants(entry: Entry) -> str:
    """Which published figures these may stand beside."""
    found = _evaluation(entry).get("corruption_constants")
    if not isinstance(found, Mapping):
        return "These corruptions are not the published ones: they were made by an earlier version."
    about = f"Definitions and constants of {found.get('set')}"
    if found.get("exact"):
        return f"{about}. A published mean over all corruptions has frost among them, which is not here."
    size = f"{found.get('side')} × {found.get('side')}"
    return (
        f"{about}, which has {size} images in colour; for these there are none. They stand beside no published figures."
    )


def _corrupted(entry: Entry) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = _evaluation(entry)["robustness"].get("corruptions") or ()
    return found


def _mean_of(entry: Entry, kind: str) -> float | None:
    values = [percent(one.get("accuracy")) for one in _corrupted(entry) if one["kind"] == kind]
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _per_cent(value: float | None) -> Cell:
    return Cell(number(value, 1), value)


def _words(kind: object) -> str:
    return str(kind).replace("-", " ")
