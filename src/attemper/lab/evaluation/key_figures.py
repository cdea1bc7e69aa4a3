"""The few figures that stand for an evaluation, and what they come to over seeds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from attemper.lab.evaluation.corruption_constants import EXTRA
from attemper.lab.evaluation.metrics import Bin

Evaluation = Mapping[str, Any]


class Figure(TypedDict):
    """One number of a table."""

    name: str
    share: bool
    """Whether it is a share, which people read in per cent."""
    falling: bool
    """Whether smaller is better."""
    value: float | None


def headline(evaluation: Evaluation) -> list[Figure]:
    """The figures of an evaluation that a table has room for, in their order.

    Of attacks the strongest is shown; of occlusions and corruptions the mean accuracy over all of them, but for the
    corruptions that are published for validation alone.
    """
    found = []
    calibration = evaluation.get("calibration")
    if calibration:
        found.append(Figure(name="NLL", share=False, falling=True, value=evaluation["nll"]))
        found.append(Figure(name="Brier", share=False, falling=True, value=calibration["brier"]))
        found.append(_share("ECE", calibration["ece"], falling=True))
    if evaluation.get("gap"):
        found.append(_share("gap", evaluation["gap"]["accuracy"], falling=True))
    if evaluation.get("robustness"):
        found += _robustness(evaluation["robustness"])
    if stochastic := evaluation.get("stochastic"):
        passes = f"{stochastic['passes']} passes"
        found.append(_share(f"accuracy, {passes}", stochastic["accuracy"]))
        if calibration:
            found.append(_share(f"ECE, {passes}", stochastic["ece"], falling=True))
    if evaluation.get("top5") is not None:
        found.append(_share("top-5", evaluation["top5"]))
    return found


def _robustness(given: Mapping[str, Any]) -> list[Figure]:
    found = []
    for group, name in (("occlusion", "occluded"), ("corruptions", "corrupted")):
        if counted := [one["accuracy"] for one in given[group] if one["kind"] not in EXTRA]:
            found.append(_share(name, _mean(counted)))
    for kind in ("fgsm", "pgd"):
        attacks = [one for one in given["attacks"] if one["kind"] == kind]
        if attacks:
            strongest = max(attacks, key=lambda one: one["epsilon"])
            found.append(_share(f"{kind.upper()} {epsilon_text(strongest['epsilon'])}", strongest["accuracy"]))
    return found


def _share(name: str, value: float | None, *, falling: bool = False) -> Figure:
    return Figure(name=name, share=True, falling=falling, value=value)


def epsilon_text(epsilon: float) -> str:
    """An ε as people write it.

    >>> epsilon_text(8 / 255), epsilon_text(0.3)
    ('8/255', '0.3')
    """
    levels = 255 * epsilon
    return f"{levels:.0f}/255" if epsilon and abs(levels - round(levels)) < 1e-6 else f"{epsilon:g}"


def over_seeds(evaluations: Sequence[Evaluation | None]) -> dict[str, Any] | None:
    """What several runs of one recipe come to: means and deviations of the figures, one pooled reliability diagram.

    evaluations: one per seed, None where a run is missing; all of the same suites.
    """
    known = [each for each in evaluations if each]
    if not known:
        return None
    found: dict[str, Any] = {"suites": known[0]["suites"], "figures": _figures(evaluations)}
    found["accuracy"] = _mean([each["accuracy"] for each in known])
    if all("calibration" in each for each in known):
        found["bins"] = pooled([each["calibration"]["bins"] for each in known])
    if all("robustness" in each for each in known):
        found["robustness"] = {
            group: [_over_seeds(same) for same in zip(*(each["robustness"][group] for each in known), strict=True)]
            for group in ("occlusion", "attacks", "corruptions")
        }
        found["corruption_constants"] = known[0].get("corruption_constants")
    return found


def _figures(evaluations: Sequence[Evaluation | None]) -> list[dict[str, Any]]:
    by_seed = [{figure["name"]: figure for figure in headline(each)} if each else {} for each in evaluations]
    first = {name: figure for figures in reversed(by_seed) for name, figure in figures.items()}
    order = [figure["name"] for each in evaluations if each for figure in headline(each)]
    found = []
    for name in dict.fromkeys(order):
        values = [figures[name]["value"] if name in figures else None for figures in by_seed]
        numbers = [value for value in values if value is not None]
        facts = {"name": name, "share": first[name]["share"], "falling": first[name]["falling"]}
        found.append({**facts, "mean": _mean(numbers), "deviation": _deviation(numbers), "values": values})
    return found


def pooled(diagrams: Sequence[Sequence[Bin]]) -> list[Bin]:
    """One reliability diagram of all predictions, out of several with the same bins."""
    found = []
    for same in zip(*diagrams, strict=True):
        count = sum(part["count"] for part in same)
        confidence, accuracy = (
            sum(part["count"] * (part[name] or 0.0) for part in same) / count if count else None
            for name in ("confidence", "accuracy")
        )
        found.append(
            Bin(low=same[0]["low"], high=same[0]["high"], count=count, confidence=confidence, accuracy=accuracy)
        )
    return found


def _over_seeds(same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One condition over seeds."""
    facts = {name: value for name, value in same[0].items() if name not in ("accuracy", "nll")}
    accuracies = [one["accuracy"] for one in same]
    return {
        **facts,
        "accuracy": _mean(accuracies),
        "low": min((a for a in accuracies if a is not None), default=None),
        "high": max((a for a in accuracies if a is not None), default=None),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
