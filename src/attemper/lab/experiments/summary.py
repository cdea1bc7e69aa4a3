"""What the runs of an experiment come to, arm by arm: means, medians, and differences with their intervals."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.experiments.catalogue import Arm, Experiment
from attemper.lab.experiments.gradients import POINTS
from attemper.lab.experiments.runs import ArmRun
from attemper.lab.study.statistics import paired_difference

Record = dict[str, Any]


def summarise(experiment: Experiment, found: Mapping[ArmRun, Record]) -> dict[str, Any]:
    """Plain data of whatever runs are there."""
    by_arm = {arm: {one.seed: record for one, record in found.items() if one.arm == arm} for arm in experiment.arms}
    rows = [_row(arm, records) for arm, records in by_arm.items() if records]
    summary = {
        "title": experiment.title,
        "measures": list(experiment.measures),
        "expected": experiment.expected,
        "versions": _versions(found.values()),
        "arms": rows,
    }
    if "gradients" in experiment.measures:
        summary["gradients"] = gradient_changes(experiment, by_arm)
    return summary


def _row(arm: Arm, records: Mapping[int, Record]) -> Record:
    """One arm; lists have one entry per seed."""
    runs = list(records.values())
    test = [run["test"] for run in runs if run["test"] is not None]
    row = {
        "name": arm.name,
        "model": arm.model,
        "recipe": arm.recipe,
        "seeds": list(records),
        "test": [run["test"] for run in runs],
        "train": [run["train"] for run in runs],
        "mean": statistics.fmean(test) if test else None,
        "deviation": statistics.stdev(test) if len(test) > 1 else None,
        "diverged": sum(run["status"] == "diverged" for run in runs),
        "parameters": runs[0]["parameters"],
        "flops": runs[0]["flops"],
        "seconds": [run["seconds"] for run in runs],
    }
    for name in ("entropy", "tokens"):
        if name in runs[0]:
            blocks = [list(values) for values in zip(*(run[name] for run in runs), strict=True)]
            row |= {"blocks": blocks, "median": [median(values) for values in blocks]}
    if "patches" in runs[0]:
        patches = [run["patches"] for run in runs]
        row |= {"patches": patches, "patches_median": median(patches)}
    if "branches" in runs[0]:
        row["branches"] = [_branch(parts) for parts in zip(*(run["branches"] for run in runs), strict=True)]
    return row


def _branch(runs: Sequence[Record]) -> Record:
    """One branch of one block over the seeds."""
    row = {name: runs[0][name] for name in ("block", "branch", "has_skip")}
    for name in (f"{way}{part}" for way in ("alone", "with_skip") for part in ("", "_lost", "_to_median")):
        values = [run[name] for run in runs]
        row |= {name: values, f"{name}_median": median(values)}
    return row


def median(values: Sequence[float | None]) -> float | None:
    """The median, where None is beyond every number.

    >>> median([3.0, None, 1.0]), median([3.0, None])
    (3.0, None)
    """
    found = statistics.median([math.inf if value is None else value for value in values])
    return found if math.isfinite(found) else None


def _versions(runs: Any) -> dict[str, str]:
    """What the runs were made with; where they differ, all of it."""
    seen: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in run["versions"].items():
            seen.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(values) for name, values in seen.items()}


# ----------------------------------------------------------------------------------------------------------- gradients
def gradient_changes(experiment: Experiment, by_arm: Mapping[Arm, Mapping[int, Record]]) -> list[Record]:
    """How much the gradient varies under each arm, against the first arm of the same seed.

    One row per arm, point of training and place: "same weights", those of the first arm, so that the difference is the
    method's own; "own training", each at its own weights.
    """
    first, *others = experiment.arms
    rows = []
    for place in ("same weights", "own training"):
        for arm in others:
            for point in POINTS:
                pairs = list(_pairs(by_arm[first], by_arm[arm], first, arm, point, place))
                rows.append({"arm": arm.name, "point": point, "at": place, **_changes(pairs)})
    return rows


def _pairs(
    baseline: Mapping[int, Record], own: Mapping[int, Record], first: Arm, arm: Arm, point: str, place: str
) -> Any:
    """(seed, noise of the arm, noise of the first arm) of every seed that has both."""
    measured = baseline if place == "same weights" else own
    for seed, record in baseline.items():
        ours = (measured.get(seed, {}).get("gradients", {}).get(point) or {}).get(arm.name)
        theirs = (record["gradients"].get(point) or {}).get(first.name)
        if ours and theirs and None not in (*ours.values(), *theirs.values()):
            yield seed, ours, theirs


def _changes(pairs: Sequence[tuple[int, Record, Record]]) -> Record:
    """Changes as shares of the first arm's value: −0.1 is a tenth less."""
    variance = [ours["variance"] / theirs["variance"] - 1 for _, ours, theirs in pairs]
    relative = [relative_variance(ours) / relative_variance(theirs) - 1 for _, ours, theirs in pairs]
    return {"seeds": [seed for seed, _, _ in pairs], "variance": _interval(variance), "relative": _interval(relative)}


def relative_variance(noise: Mapping[str, float]) -> float:
    """The variance in units of the squared mean gradient."""
    return noise["variance"] / noise["squared_mean"]


def _interval(changes: list[float]) -> Record:
    """Per seed, and their mean with a 95 % t interval over the seeds."""
    found = paired_difference(changes, [0.0] * len(changes))
    whole = {"mean": None, "low": None, "high": None} if found is None else dataclasses.asdict(found)
    return {"by_seed": changes, **{name: whole[name] for name in ("mean", "low", "high")}}
