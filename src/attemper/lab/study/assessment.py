"""From the rows of a summary to what they say: differences, decisions, cautions, the verdict.

Everything here is computed from the summary alone, so that a summary of an earlier version, such as one that travels
in a page, can be told again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from attemper.lab.study.cautions import cautions, items_of
from attemper.lab.study.decisions import Level, adjusted, decide, default_margin
from attemper.lab.study.evaluations import compare_figures
from attemper.lab.study.looks import level_at, schedule
from attemper.lab.study.sameness import originals
from attemper.lab.study.statistics import CONFIDENCE, paired_difference, ranks
from attemper.lab.study.verdict import verdict

Summary = dict[str, Any]
Row = dict[str, Any]


def assess(summary: Summary) -> Summary:
    """The summary with all that follows from its rows: in each row the difference to the baseline, the decision and the
    rank; in the whole the margin, the cautions, which recipes are the same thing, and the verdict."""
    rows: list[Row] = summary["recipes"]
    plan: Mapping[str, Any] = summary["plan"]
    metric = summary["metric"]
    baseline = next(row for row in rows if row["recipe"] == "none")
    given = plan.get("margin")
    margin = default_margin(metric, baseline["mean"]) if given is None else given / 100
    same = originals(rows)
    items = items_of(baseline)
    _compare(rows, baseline, same, margin, _level(plan), 1 / items if items else 0.0)
    compare_figures(rows, baseline)
    _sample(rows, baseline, metric)
    places = ranks({row["name"]: row["test"] for row in rows})
    for row in rows:
        place = places[row["name"]]
        row["rank"] = None if place is None else asdict(place)
        row.pop("right", None)
    seeds = max(len(row["test"]) for row in rows)
    found = {
        "margin": {"value": margin, "given": given is not None},
        "same": same,
        "cautions": cautions(rows, baseline, seeds, metric),
    }
    words = verdict(
        rows,
        seeds=seeds,
        missing=summary.get("missing", 0),
        failed=summary.get("failed", 0),
        margin=margin,
        same=same,
        looks=plan.get("until") == "decided",
    )
    return {**summary, **found, "verdict": words, "confidence": CONFIDENCE}


def _level(plan: Mapping[str, Any]) -> Level | None:
    """What may be spent at a number of seeds; None: everything, as there is one look."""
    if plan.get("until") != "decided":
        return None
    looks = schedule(len(plan["seeds"]), int(plan["max_seeds"]))
    return lambda seeds, share: level_at(seeds, share, looks)


def _compare(
    rows: Sequence[Row], baseline: Row, same: Mapping[str, str], margin: float | None, level: Level | None, step: float
) -> None:
    """Differences to the baseline, corrected over all recipes that are not the same thing as an earlier one.

    step: what one test item is worth.
    """
    counted = [row for row in rows if row is not baseline and row["name"] not in same]
    pairs = [_aligned(row, baseline) for row in counted]
    found = adjusted([paired_difference(*pair) for pair in pairs], level)
    known = {row["name"]: difference for row, difference in zip(counted, found, strict=True)}
    for row in rows:
        difference = None
        if row is not baseline:
            first = same.get(row["name"], row["name"])
            difference = known.get(first) if first != baseline["name"] else _none(row)
        row["difference"] = None if difference is None else dict(difference)
        seen = step if row["name"] not in same else 0.0
        row["decision"] = None if difference is None else asdict(decide(difference, margin, seen))


def _none(row: Row) -> dict[str, Any] | None:
    """The difference of a recipe that is the baseline under another name."""
    ends = dict.fromkeys(("low", "high", "p", "adjusted", "alone"))
    runs = [value for value in row["test"] if value is not None]
    return {"mean": 0.0, **ends, "spread": 0.0, "seeds": max(2, len(runs)), "level": 0.05} if runs else None


def _aligned(row: Row, baseline: Row) -> tuple[list[float | None], list[float | None]]:
    """Values of the same seeds beside each other."""
    theirs = dict(zip(baseline["seeds"], baseline["test"], strict=True))
    return list(row["test"]), [theirs.get(seed) for seed in row["seeds"]]


def _sample(rows: Sequence[Row], baseline: Row, metric: str) -> None:
    """What the test sample adds to the uncertainty of means and, where single samples are known, of differences."""
    before = _rights(baseline)
    for row in rows:
        if "sample" in row:  # of a summary that is told again, which has no single samples
            continue
        items, mean = items_of(row), row["mean"]
        if metric != "accuracy" or not items or mean is None:
            row["sample"] = None
            continue
        found: dict[str, Any] = {"items": items, "error": math.sqrt(mean * (1 - mean) / items), "difference": None}
        ours = _rights(row)
        both = [seed for seed in ours if seed in before] if row is not baseline else []
        if both:
            change = np.mean([ours[seed].astype(float) - before[seed] for seed in both], axis=0)
            found["difference"] = float(change.std(ddof=1) / math.sqrt(items)) if items > 1 else None
        row["sample"] = found


def _rights(row: Row) -> dict[Any, np.ndarray]:
    """Seed by seed, which test samples were right."""
    found = {seed: unpacked(text) for seed, text in zip(row["seeds"], row.get("right") or (), strict=False) if text}
    items = items_of(row)
    return {seed: right for seed, right in found.items() if len(right) == items}


def unpacked(text: str) -> np.ndarray:
    """What `lab.tasks.classification.packed` has packed.

    >>> unpacked("3:a0").tolist()
    [True, False, True]
    """
    count, _, letters = text.partition(":")
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(letters), dtype=np.uint8))
    return bits[: int(count)].astype(bool)
