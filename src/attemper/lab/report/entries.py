"""The recipes of a summary, in the order and the colours in which the whole page shows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attemper.lab.report.scale import finite

ANSWER_LABELS = {"better": "good", "worse": "bad"}
"""The class of a cell that holds a decision, where it has a colour."""


@dataclass(frozen=True)
class Entry:
    """One recipe of a study; shares and differences are in per cent here."""

    raw: Mapping[str, Any]
    series: int
    """Its colour and mark: by its place in the plan, the baseline's being 0."""

    @property
    def name(self) -> str:
        return str(self.raw.get("name") or self.raw.get("recipe") or "?")

    @property
    def recipe(self) -> str:
        return str(self.raw.get("recipe") or "")

    @property
    def baseline(self) -> bool:
        return self.series == 0

    @property
    def seeds(self) -> list[Any]:
        return list(self.raw.get("seeds") or ())

    @property
    def test(self) -> list[float]:
        """Per seed, of those that have one."""
        return [value for _, value in self.by_seed("test")]

    def by_seed(self, part: str) -> list[tuple[Any, float]]:
        """(seed, per cent) of the runs that have a value for this part: "train", "validation" or "test"."""
        pairs = zip(self.seeds, self.raw.get(part) or (), strict=False)
        return [(seed, 100 * known) for seed, value in pairs if (known := finite(value)) is not None]

    @property
    def mean(self) -> float | None:
        return percent(self.raw.get("mean"))

    @property
    def deviation(self) -> float | None:
        """None with one seed, however the summary puts it."""
        return percent(self.raw.get("deviation")) if len(self.test) > 1 else None

    @property
    def difference(self) -> dict[str, float | None] | None:
        """The paired difference to the baseline, in points; p-values as they are."""
        given = self.raw.get("difference")
        if not isinstance(given, Mapping):
            return None
        points = {key: percent(given.get(key)) for key in ("mean", "low", "high")}
        return {**points, **{key: finite(given.get(key)) for key in ("p", "adjusted", "level")}}

    @property
    def alone(self) -> tuple[float, float] | None:
        """The interval of the difference without any correction, in points."""
        given = (self.raw.get("difference") or {}).get("alone") or (None, None)
        low, high = map(percent, given)
        return None if low is None or high is None else (low, high)

    @property
    def decision(self) -> Mapping[str, Any]:
        return self.raw.get("decision") or {}

    @property
    def sample(self) -> Mapping[str, Any]:
        """What the test sample adds: how many items it has, and the errors of mean and difference that come of it."""
        return self.raw.get("sample") or {}

    @property
    def items(self) -> int | None:
        """How many samples the test set has, where that is known."""
        found = self.sample.get("items") or (self.raw.get("details") or {}).get("items")
        return int(found) if found else None

    def mean_of(self, part: str) -> float | None:
        values = [value for _, value in self.by_seed(part)]
        return sum(values) / len(values) if values else None

    @property
    def gap(self) -> float | None:
        """Train less test, over the seeds that have both."""
        train, test = dict(self.by_seed("train")), dict(self.by_seed("test"))
        both = [train[seed] - test[seed] for seed in test if seed in train]
        return sum(both) / len(both) if both else None

    @property
    def rank(self) -> Mapping[str, Any]:
        return self.raw.get("rank") or {}

    @property
    def cost(self) -> Mapping[str, Any]:
        return self.raw.get("cost") or {}

    @property
    def flops(self) -> Mapping[str, Any]:
        """Operations of a sample's forward pass and of a training step; empty for results of older versions."""
        return self.raw.get("flops") or {}

    @property
    def published(self) -> Mapping[str, Any]:
        return self.raw.get("published") or {}

    @property
    def diverged(self) -> int:
        return int(self.raw.get("diverged") or 0)

    @property
    def missing(self) -> int:
        return int(self.raw.get("missing") or 0)

    @property
    def parameters(self) -> int | None:
        known = finite(self.raw.get("parameters"))
        return None if known is None else int(known)


def entries(summary: Mapping[str, Any]) -> list[Entry]:
    """The recipes, the most accurate first and those without a result last."""
    given = list(summary.get("recipes") or ())
    baseline = next((at for at, raw in enumerate(given) if raw.get("recipe") == "none"), None)
    others = iter(range(1, len(given) + 1))
    found = [Entry(raw, 0 if at == baseline else next(others)) for at, raw in enumerate(given)]
    return sorted(found, key=lambda entry: -1e9 if entry.mean is None else entry.mean, reverse=True)


def percent(value: object) -> float | None:
    """A share as per cent."""
    known = finite(value)
    return None if known is None else 100 * known
