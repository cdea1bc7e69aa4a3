"""What a plan is compared with: published figures by column, their settings, and ours as a summary has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attemper.errors import shown
from attemper.lab.errors import PlanError

Row = Mapping[str, Any]
Found = tuple[float | None, float | None]
"""Mean and deviation over seeds."""
MOST = 200
"""Settings and notes of a plan."""
ELSEWHERE = "elsewhere"
"""The metric of a column that no study measures; its condition says what does."""
STANDINGS = ("as printed", "other", "ours")
GAIN = "gain "
"""Before a metric: what a recipe has more of it than the baseline."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a published table, and what is done here."""

    name: str
    here: str
    printed: str = ""
    """Empty: the publication does not say, and what is done here is ours."""
    agrees: bool = False

    @property
    def standing(self) -> str:
        """In a word or two.

        >>> Setting(name="epochs", here="40", printed="300").standing
        'other'
        """
        return "ours" if not self.printed else "as printed" if self.agrees else "other"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The published table that a plan runs again."""

    table: str
    source: str
    another_task: str = ""
    """What the figures were published for, where this plan is on something else: no difference is taken then."""
    notes: tuple[str, ...] = ()
    """What to know before figures are compared."""
    settings: tuple[Setting, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As a plan has it."""
        whole = {**asdict(self), "notes": list(self.notes), "settings": [asdict(each) for each in self.settings]}
        return {name: value for name, value in whole.items() if value not in ("", [])}


def reference_for_readers(reference: Reference, task: str) -> dict[str, Any]:
    """The reference for readers: every setting with how it stands, and all of them in a sentence.

    task: of the plan.
    """
    settings = [{**asdict(each), "standing": each.standing} for each in reference.settings]
    by_standing = {word: [each.name for each in reference.settings if each.standing == word] for word in STANDINGS}
    parts = [f"{len(by_standing['as printed'])} as printed"]
    if others := by_standing["other"]:
        parts.append(f"{len(others)} other than printed ({', '.join(others)})")
    if ours := by_standing["ours"]:
        parts.append(f"{len(ours)} ours where the publication does not say ({', '.join(ours)})")
    other = reference.another_task
    apart = f"The figures were published for {other}, and this ran on {task}: no difference is taken." if other else ""
    added = {"settings": settings, "standing": f"Settings: {'; '.join(parts)}." if settings else "", "apart": apart}
    return {**reference.to_dict(), **added}


def read_reference(given: Any) -> Reference | None:
    """The `reference` of a plan; a mistake is a `PlanError` that knows where it is."""
    if given is None:
        return None
    path = ("reference",)
    if not isinstance(given, Mapping) or not {"table", "source"} <= set(given):
        raise PlanError(f"reference is {shown(given)}; it needs the table and the source of published figures.", path)
    known = Reference.__dataclass_fields__
    if unknown := [name for name in given if name not in known]:
        raise PlanError(f"reference has no {shown(unknown[0])}; it has: {', '.join(known)}.", path)
    texts = {name: given.get(name, "") for name in ("table", "source", "another_task")}
    notes, settings = given.get("notes", ()), given.get("settings", ())
    whole = isinstance(notes, list | tuple) and isinstance(settings, list | tuple)
    if not whole or len(notes) > MOST or len(settings) > MOST:
        raise PlanError(f"reference: notes and settings are lists of at most {MOST}.", path)
    if not all(isinstance(text, str) for text in (*texts.values(), *notes)):
        raise PlanError("reference: table, source, another_task and notes are texts.", path)
    return Reference(**texts, notes=tuple(notes), settings=tuple(map(_setting, settings)))


def _setting(given: Any) -> Setting:
    fits = isinstance(given, Mapping) and {"name", "here"} <= set(given) <= set(Setting.__dataclass_fields__)
    texts = [given.get(name, "") for name in ("name", "here", "printed")] if fits else [None]
    if not all(isinstance(text, str) for text in texts) or not isinstance(given.get("agrees", False), bool):
        raise PlanError(
            f"reference: {shown(given)} is no setting; it has name, here, printed and agrees.",
            ("reference", "settings"),
        )
    return Setting(**given)


BASE = re.compile(r"[^(]*")
WARM_UP = 5
"""A warm-up takes at most the epochs divided by it, where somebody changes the epochs; and is so long if unsaid."""


def with_changes(plan: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A published table's plan with another task, model, number of seeds or of epochs, and its settings noted anew.

    A part of the same data is still the published task; other data are another one, and no difference is taken.
    """
    changed = {**plan, "budget": dict(plan["budget"])}
    if "epochs" in changes and changed["budget"].get("warmup_epochs", WARM_UP) > changes["epochs"] / WARM_UP:
        changes = {**changes, "warmup_epochs": changes["epochs"] / WARM_UP}
    for name, value in changes.items():
        (changed["budget"] if name.endswith("epochs") else changed)[name] = value
    reference = dict(plan["reference"])
    settings = {each["name"]: each for each in reference["settings"]}
    for name, value in changes.items():
        shown_as, here = name.replace("_", " "), str(value)
        before = settings.get(shown_as, {"name": shown_as, "here": ""})
        settings[shown_as] = {**before, "here": here, "agrees": before.get("agrees", False) and before["here"] == here}
    reference["settings"] = list(settings.values())
    if "task" in changes and _base(changes["task"]) != _base(plan["task"]) and not reference.get("another_task"):
        reference["another_task"] = settings["task"].get("printed") or str(plan["task"])
    if "task" in changes:
        changed["title"] = f"{str(plan['title']).partition(': ')[0]}: on {changes['task']}"
    return {**changed, "reference": reference}


def _base(task: str) -> str:
    """A task without its options."""
    found = BASE.match(task)
    return found[0].strip() if found else task


# ------------------------------------------------------------------------------------------------- ours, by column
METRICS: Mapping[str, tuple[str, str]] = {
    "": ("test metric", "%"),
    "top-5": ("top-5 accuracy", "%"),
    "ECE": ("expected calibration error, 15 bins", "%"),
    "parameters": ("parameters", "M"),
    "operations": ("multiply-adds of a forward pass", "G"),
    "operations added": ("multiply-adds beyond the baseline's", "M"),
    "step time": ("time of a training step, ratio to the baseline", "×"),
    ELSEWHERE: ("not measured by a study", ""),
}
"""What a column may be measured by, with its unit; beside `FGSM EPSILON`, `PGD EPSILON`, `occluded SHARE`, and `test
METRIC`, another metric of the task's own, such as AP50."""
OTHER = "test "
"""Before the name of another metric of the task's own."""
CONDITION = re.compile(r"(FGSM|PGD|occluded) ([0-9]+(?:\.[0-9]+)?)(?:/([0-9]+))?")
NEAR = 1e-6


def check_metric(metric: str) -> None:
    """Raise unless a column can be measured by it."""
    plain = metric.removeprefix(GAIN)
    if plain not in METRICS and not CONDITION.fullmatch(plain) and not plain.startswith(OTHER):
        known = ", ".join(name for name in METRICS if name)
        raise PlanError(
            f"No column is measured by '{metric}'. There are: {known}, and such as 'FGSM 8/255', 'PGD 8/255', "
            "'occluded 0.25', 'test AP50'.",
            ("published",),
        )


def unit(metric: str) -> str:
    """What a column's figures are in.

    >>> unit("top-5"), unit("gain FGSM 1/255"), unit("operations")
    ('%', 'points', 'G')
    """
    plain = metric.removeprefix(GAIN)
    known = METRICS[plain][1] if plain in METRICS else "%"
    return "points" if known == "%" and plain != metric else known


def measured(row: Row, baseline: Row, metric: str) -> Found:
    """What a recipe of a summary came to, in the column's unit; None where it was not measured."""
    if metric.startswith(GAIN):
        (ours, _), (base, _) = (measured(each, baseline, metric.removeprefix(GAIN)) for each in (row, baseline))
        return (None if ours is None or base is None else ours - base), None
    if metric == "":
        return _percent(row.get("mean")), _percent(row.get("deviation"))
    if metric.startswith(OTHER):
        other = (row.get("others") or {}).get(metric.removeprefix(OTHER)) or {}
        return _percent(other.get("mean")), _percent(other.get("deviation"))
    if found := CONDITION.fullmatch(metric):
        return _condition(row, found[1], float(found[2]) / float(found[3] or 1))
    readers: dict[str, Callable[[], Found]] = {
        "top-5": lambda: _figure(row, "top-5"),
        "ECE": lambda: _figure(row, "ECE"),
        "parameters": lambda: (_scaled(row.get("parameters"), 1e-6), None),
        "operations": lambda: (_scaled(_forward(row), 0.5e-9), None),
        "operations added": lambda: (_scaled(_less(_forward(row), _forward(baseline)), 0.5e-6), None),
        "step time": lambda: ((row.get("cost") or {}).get("ratio"), None),
    }
    return readers[metric]() if metric in readers else (None, None)


def _percent(value: float | None) -> float | None:
    return _scaled(value, 100)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _forward(row: Row) -> float | None:
    found: float | None = (row.get("flops") or {}).get("forward")
    return found


def _figure(row: Row, name: str) -> Found:
    figures = (row.get("evaluation") or {}).get("figures", ())
    found = next((figure for figure in figures if figure["name"] == name), None)
    return (None, None) if found is None else (_percent(found["mean"]), _percent(found["deviation"]))


def _condition(row: Row, kind: str, amount: float) -> Found:
    """Accuracy under an attack, or with the middle of the image covered."""
    conditions = (row.get("evaluation") or {}).get("robustness") or {}
    group, name, fact = ("occlusion", "centre", "share") if kind == "occluded" else ("attacks", kind.lower(), "epsilon")
    near = [one for one in conditions.get(group, ()) if one["kind"] == name and abs(one[fact] - amount) < NEAR]
    return (_percent(near[0]["accuracy"]) if near else None), None


# ------------------------------------------------------------------------------------------- beside what was printed
@dataclass(frozen=True, kw_only=True)
class ComparedCell:
    """One published cell and ours."""

    column: str
    metric: str
    condition: str
    published: float
    deviation: float | None
    ours: float | None
    ours_deviation: float | None
    difference: float | None
    """Ours less what was published; None where either is missing, or where this is another task."""
    unit: str
    source: str


def compared_cell(published: Row, row: Row, baseline: Row, reference: Reference | None) -> dict[str, Any]:
    """A published cell of a plan with what this row came to, as plain data."""
    ours, deviation = measured(row, baseline, published["metric"])
    other = reference is not None and bool(reference.another_task)
    known = ours is not None and not other
    return asdict(
        ComparedCell(
            column=published["column"],
            metric=published["metric"],
            condition=published["condition"],
            published=published["value"],
            deviation=published["deviation"],
            ours=ours,
            ours_deviation=deviation,
            difference=ours - published["value"] if known and ours is not None else None,
            unit=unit(published["metric"]),
            source=published["source"],
        )
    )
