"""What it takes to see a difference: seeds by the spread of a pilot, time by a probe."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from attemper.errors import ParameterError
from attemper.lab.errors import StudyError
from attemper.lab.study.decisions import LEVEL
from attemper.lab.study.estimate import estimate
from attemper.lab.study.plan import Plan
from attemper.lab.study.plan_checks import MOST_SEEDS
from attemper.lab.study.power import POWER, seeds_to_decide, smallest_difference
from attemper.lab.study.probing import Probe
from attemper.lab.study.status import duration
from attemper.lab.study.summary_files import read_summary

KNOWN = {
    "digits": (0.00714, "docs/results/rates-digits.md, three seeds, 20 epochs"),
    "cifar10": (0.00274, "docs/results/cifar10.md, three seeds, 40 epochs"),
    "mel": (0.02674, "docs/results/gtzan.md, five seeds, 20 epochs"),
    "actions": (0.01878, "docs/results/thumos14.md, three seeds, 8 epochs"),
}
"""By task: the deviation of paired differences over seeds (pooled over recipes), and where it was seen."""


@dataclass(frozen=True)
class Spread:
    """How far the differences of a recipe to the baseline are apart from seed to seed."""

    deviation: float
    source: str


@dataclass(frozen=True)
class Price:
    """What a difference costs to see."""

    difference: float
    spread: Spread
    comparisons: int
    seeds: int | None
    """That find it in 80 of 100 studies, after correction; None: more than a plan may have."""
    seconds: float | None
    """On this machine, with as many workers as were probed."""
    planned: int
    """Seeds of the plan as it is, with those that may be added, and the difference that they see."""
    seen: float | None
    growing: bool = False
    """Whether seeds are added until decided."""

    def lines(self) -> list[str]:
        """The price in words."""
        points = f"{100 * self.difference:.2f} points"
        found = [
            f"spread of differences: {100 * self.spread.deviation:.2f} points from seed to seed ({self.spread.source})"
        ]
        times = f"{self.comparisons} comparison{'s' if self.comparisons > 1 else ''}"
        if self.seeds is None or self.seconds is None:
            found.append(f"to see {points} would take more than {MOST_SEEDS:,} seeds ({times})")
        else:
            found.append(
                f"to see {points} in {100 * POWER:.0f} of 100 studies: {self.seeds} seeds ({times}), "
                f"{duration(self.seconds)} here"
            )
        if self.seen is not None:
            most = "at most " if self.growing else ""
            found.append(f"the plan's {most}{self.planned} seeds see {100 * self.seen:.2f} points or more")
        return found


def known_spread(task: str) -> Spread:
    """What is known of a task."""
    name = task.partition("(")[0].partition(":")[0]
    if name not in KNOWN:
        raise ParameterError(
            f"Nothing is known of how far seeds are apart on '{task}': run a pilot of three to five seeds, and give "
            "its "
            f"folder as --pilot. Known are: {', '.join(KNOWN)}."
        )
    return Spread(*KNOWN[name])


def spread_of(pilot: Path, root: Path | None = None) -> Spread:
    """The deviation of differences in a study, pooled over its recipes."""
    summary = read_summary(pilot, root)
    found = [
        (row["difference"]["spread"], row["difference"]["seeds"] - 1)
        for row in summary["recipes"]
        if row["difference"] and row["difference"]["p"] is not None and row["name"] not in summary["same"]
    ]
    if not found:
        raise StudyError(
            f"{pilot} has no recipe with two seeds or more beside its baseline, so that it shows no spread."
        )
    freedom = sum(df for _, df in found)
    pooled = math.sqrt(sum(df * spread**2 for spread, df in found) / freedom)
    return Spread(pooled, f"{pilot.name}, {len(found)} recipe{'s' if len(found) > 1 else ''}, pooled")


def price_of(plan: Plan, found: Probe, spread: Spread, difference: float) -> Price:
    """Seeds and time to see a difference with a plan's recipes, where each must pass the strictest step of Holm's."""
    comparisons = max(1, len(plan.recipes) - 1)
    level = LEVEL / comparisons
    seeds = seeds_to_decide(difference, spread.deviation, level, most=MOST_SEEDS)
    planned = plan.max_seeds or len(plan.seeds)
    seconds = None
    if seeds is not None:
        longer = dataclasses.replace(plan, seeds=tuple(range(seeds)), until=None, max_seeds=None, more=())
        seconds = estimate(longer, found).here.seconds
    return Price(
        difference=difference,
        spread=spread,
        comparisons=comparisons,
        seeds=seeds,
        seconds=seconds,
        planned=planned,
        seen=smallest_difference(planned, spread.deviation, level),
        growing=plan.until is not None,
    )
