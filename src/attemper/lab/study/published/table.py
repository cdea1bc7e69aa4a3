"""A published table as data, and as a plan that runs it again at one of three scales."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attemper.errors import ParameterError, suggestion

SCALES = {
    "smoke": "embedded data and a small model, a minute on a CPU: shows that everything runs, and nothing else",
    "small": "the published task with fewer epochs, seeds and configurations: about an hour on one large GPU",
    "full": "as published, as far as that is known",
}

STRENGTH = "λ"
"""Stands in a row's recipe for a strength that was searched for."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published row: how it is called, the recipe for it, and what was reported, in per cent."""

    name: str
    recipe: str
    """With λ where a strength was chosen from a list; the same λ everywhere in one recipe."""
    value: float | None = None
    """None: a row that the publication lacks."""
    deviation: float | None = None
    note: str = ""

    def configurations(self, strengths: tuple[str, ...]) -> list[str]:
        """The recipes that the row stands for, one per strength.

        >>> Row(name="V", recipe="explicit(v=λ, ff=λ)").configurations(("1e-3", "5e-4"))
        ['explicit(v=1e-3, ff=1e-3)', 'explicit(v=5e-4, ff=5e-4)']
        """
        if STRENGTH not in self.recipe:
            return [self.recipe]
        return [self.recipe.replace(STRENGTH, strength) for strength in strengths]

    def grid(self, strengths: tuple[str, ...]) -> str:
        """The same as one text of a plan: several recipes stand in braces, and validation chooses one."""
        found = self.configurations(strengths)
        return found[0] if len(found) == 1 else f"{{{', '.join(found)}}}"


@dataclass(frozen=True, kw_only=True)
class Size:
    """What one scale of a table runs."""

    task: str
    model: str
    seeds: int
    epochs: int
    lr: tuple[float, ...]
    strengths: tuple[str, ...] = ()
    """What λ may be; needed where a row has one."""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the budget says."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A published table: its rows, where they come from, what to know about them, and how to run them."""

    key: str
    title: str
    source: str
    caveats: tuple[str, ...]
    rows: tuple[Row, ...]
    sizes: Mapping[str, Size]
    """By the names of `SCALES`."""

    def plan(self, scale: str = "small") -> dict[str, Any]:
        """The table as a plan, in the form that `attemper.lab.study.plan.Plan.from_dict` reads.

        scale: one of `SCALES`. The smoke plan is run on another task, so it has no published figures beside it.
        """
        size, smoke = self._size(scale), scale == "smoke"
        plan: dict[str, Any] = {
            "title": f"{self.title}: smoke run on {size.task}" if smoke else self.title,
            "task": size.task,
            "model": size.model,
            "seeds": size.seeds,
            "budget": {"epochs": size.epochs, **size.budget},
            "lr": list(size.lr),
            "recipes": [self._entry(row, size) for row in self.rows],
        }
        published = [self._published(row) for row in self.rows if row.value is not None]
        return plan if smoke or not published else {**plan, "published": published}

    def runs(self, scale: str = "small") -> int:
        """How many runs the plan of this scale has: rows with their configurations × learning rates × seeds."""
        size = self._size(scale)
        return size.seeds * len(size.lr) * sum(len(row.configurations(size.strengths)) for row in self.rows)

    def _size(self, scale: str) -> Size:
        if scale not in SCALES:
            raise ParameterError(
                f"There is no scale '{scale}'.{suggestion(scale, SCALES)} It is one of {', '.join(SCALES)}."
            )
        return self.sizes[scale]

    def _entry(self, row: Row, size: Size) -> str | dict[str, str]:
        recipe = row.grid(size.strengths)
        return recipe if recipe == row.name else {"name": row.name, "recipe": recipe}

    def _published(self, row: Row) -> dict[str, Any]:
        spread = {} if row.deviation is None else {"deviation": row.deviation}
        return {"name": row.name, "value": row.value, **spread, "source": self.source}
