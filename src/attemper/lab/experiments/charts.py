"""What an experiment found, as one picture: curves over blocks, or over the points of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attemper.lab.experiments.gradients import POINTS
from attemper.lab.report.png import above, curves

if TYPE_CHECKING:
    from PIL.Image import Image

Found = Mapping[str, Any]
Lines = dict[str, list[float | None]]
STRENGTH = ", ε = "
"""What stands between an arm's kind and its strength, in the name of an arm that has one."""


def chart(found: Found) -> Image:
    """All panels below each other."""
    return above(list(panels(found)))


def panels(found: Found) -> Iterator[Image]:
    """One per question that the experiment asks."""
    measures, task = found["measures"], found["task"]
    if "entropy" in measures:
        lines = {arm["name"]: arm["median"] for arm in found["arms"]}
        yield curves(lines, title=f"Attention entropy after training, {task}", y="share of its maximum")
    if "tokens" in measures:
        for title, lines in token_lines(found).items():
            yield curves(
                lines,
                title=f"Condition number of tokens after training, {title}, {task}",
                y="κ, before the first block and behind every block",
                x="blocks passed",
                log=True,
            )
    if strength_names(found):
        yield from _strength_panels(found)
    if "branches" in measures and any(arm["branches"] for arm in found["arms"]):
        for title, lines in branch_lines(found).items():
            if lines:
                y = f"κ of the Jacobian after training, over what is not lost, {task}"
                yield curves(lines, title=title, y=y, log=True)
    for place in ("same weights", "own training") if "gradients" in found else ():
        y = f"times that of {found['arms'][0]['name']}, mean over seeds"
        title = f"Variance of the gradient, {place}, {task}"
        yield curves(gradient_lines(found, place), title=title, y=y, x="of training", log=True, names=POINTS)


def token_lines(found: Found) -> dict[str, Lines]:
    """κ over blocks, in as many panels as there are kinds of arms."""
    groups: dict[str, Lines] = {}
    for arm in found["arms"]:
        for title in _groups(arm):
            groups.setdefault(title, {})[arm["name"]] = arm["median"]
    return groups


def _groups(arm: Found) -> list[str]:
    """The panels that an arm is drawn in: with its own kind; what all are compared with, in each."""
    if arm["model"] != "VIT":
        return ["convolutions"]
    where = [word for word in ("patches", "tokens") if f"where={word}" in arm["recipe"]]
    if where:
        return [f"graying {where[0]}"]
    return ["graying patches", "graying tokens"] if arm["name"] == "none" else ["transformer"]


def _strength_panels(found: Found) -> Iterator[Image]:
    """Accuracy, and κ where tokens go in and where they come out, over ε."""

    def accuracy(arm: Found) -> float | None:
        return None if arm["mean"] is None else 100 * arm["mean"]

    def entering(arm: Found) -> float | None:
        condition: float | None = arm["median"][0]
        return condition

    def leaving(arm: Found) -> float | None:
        condition: float | None = arm["median"][-1]
        return condition

    names, task = strength_names(found), found["task"]
    title = f"Test {found['metric']} over ε, {task}"
    yield curves(strength_lines(found, accuracy), title=title, y="%, mean over seeds", x="ε", names=names)
    for where, condition in (("going in", entering), ("behind the last block", leaving)):
        title = f"Condition number of tokens {where} over ε, {task}"
        lines = strength_lines(found, condition)
        yield curves(lines, title=title, y="κ, median over seeds", x="ε", log=True, names=names)


def strength_names(found: Found) -> list[str]:
    """The arm without a method, then every ε that arms have, from the weakest; nothing in other experiments."""
    given = {arm["name"].partition(STRENGTH)[2] for arm in found["arms"]} - {""}
    return [found["arms"][0]["name"], *sorted(given, key=float, reverse=True)] if given else []


def strength_lines(found: Found, value: Callable[[Found], float | None]) -> Lines:
    """What every kind comes to at each ε, beginning with the arm without a method."""
    names = strength_names(found)
    plain, *others = found["arms"]
    lines: Lines = {}
    for arm in others:
        kind, _, eps = arm["name"].partition(STRENGTH)
        lines.setdefault(kind, [value(plain), *[None] * (len(names) - 1)])[names.index(eps)] = value(arm)
    return lines


def branch_lines(found: Found) -> dict[str, Lines]:
    """κ(J) over blocks: of the branches alone, with their skips, and of networks that were trained without them."""
    alone: Lines = {}
    joined: Lines = {}
    bare: Lines = {}
    for arm in found["arms"]:
        whole = all(row["has_skip"] for row in arm["branches"])
        for branch in dict.fromkeys(row["branch"] for row in arm["branches"]):
            rows = [row for row in arm["branches"] if row["branch"] == branch]
            label = f"{branch} ({arm['name']})"
            if whole:
                alone[label] = _by_block(rows, "alone_median")
                joined[label] = _by_block(rows, "with_skip_median")
            elif not rows[0]["has_skip"]:
                bare[label] = _by_block(rows, "alone_median")
    return {
        "Branches alone, in networks with all skips": alone,
        "Branches with their skips, in networks with all skips": joined,
        "Branches that were trained without their skip": bare,
    }


def _by_block(rows: Sequence[Mapping[str, Any]], quantity: str) -> list[float | None]:
    """A value for every block; None for those that were not measured."""
    known = {int(row["block"]): row[quantity] for row in rows}
    return [known.get(block) for block in range(max(known) + 1)]


def gradient_lines(found: Found, place: str) -> Lines:
    """The variance as a multiple of the first arm's, over the points of training."""
    lines: Lines = {}
    for row in found["gradients"]:
        if row["at"] == place:
            mean = row["variance"]["mean"]
            lines.setdefault(row["arm"], []).append(None if mean is None else 1 + mean)
    return lines
