"""Rows of a plan: recipes, grids of recipes, what others reported for them, seeds that were added."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from attemper.lab.errors import PlanError
from attemper.lab.study.grids import expand
from attemper.recipe import as_methods, render

BASELINE = "none"
PUBLISHED_LATER = ("column", "metric", "condition")
"""Words of a published figure that are left out where they say nothing."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of a comparison: a recipe, or a grid of recipes of which validation chooses one.

    >>> Entry("explicit(v={1e-4, 5e-4})").configurations
    ('explicit(v=0.0001)', 'explicit(v=0.0005)')
    """

    recipe: str
    """As `attemper.render` writes it; a grid as it was given."""
    name: str = ""
    """Empty: the recipe as it was given."""
    tried: tuple[tuple[str, float], ...] = ()
    """Single pairs of recipe and learning rate among which validation chooses; empty: every recipe at every rate."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or " ".join(self.recipe.split()))
        if len(self.configurations) == 1:
            object.__setattr__(self, "recipe", self.configurations[0])

    @cached_property
    def configurations(self) -> tuple[str, ...]:
        """The recipes behind the row, each in the form that `attemper.render` gives."""
        found = tuple(render(as_methods(text)) for text in expand(self.recipe.strip()))
        for text, count in Counter(found).items():
            if count > 1:
                raise PlanError(f"'{self.recipe}' stands for '{text}' more than once; leave the double value out")
        return found

    @property
    def is_baseline(self) -> bool:
        """Whether this is the row that all others are compared with."""
        return self.configurations == (BASELINE,)

    def to_dict(self) -> dict[str, Any]:
        """As a plan has it."""
        if not self.tried:
            return {"name": self.name, "recipe": self.recipe}
        return {"name": self.name, "tried": [{"recipe": recipe, "lr": lr} for recipe, lr in self.tried]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """What others reported for a row, in per cent."""

    name: str
    value: float
    deviation: float | None = None
    source: str = ""
    column: str = ""
    """Of another figure than the task's own metric: what it is called."""
    metric: str = ""
    """By what ours is measured, as `attemper.lab.study.reference` has it; empty: the task's own metric."""
    condition: str = ""
    """How, where that needs saying."""

    def to_dict(self) -> dict[str, Any]:
        """As a plan has it; of a figure of the task's own metric in the four words that were always there."""
        whole = dataclasses.asdict(self)
        return {name: value for name, value in whole.items() if value or name not in PUBLISHED_LATER}


@dataclasses.dataclass(frozen=True)
class More:
    """Seeds that a row got beyond the plan's own, because it was not decided."""

    name: str
    recipe: str
    lr: float
    """Of the configuration that validation chose over the plan's own seeds."""
    seeds: int
    """In all."""


def row_of(name: str, tried: Sequence[tuple[str, float]]) -> Entry:
    """A row of single configurations."""
    recipes = list(dict.fromkeys(recipe for recipe, _ in tried))
    text = recipes[0] if len(recipes) == 1 else f"{{{', '.join(recipes)}}}"
    return Entry(text, name, tuple(tried))
