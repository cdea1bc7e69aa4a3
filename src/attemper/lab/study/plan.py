"""A plan: what is compared with what, on which data, for how long. Small enough to be read at a glance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attemper.errors import shown
from attemper.lab.errors import PlanError
from attemper.lab.study.plan_budget import read_budget, read_seeds, read_until
from attemper.lab.study.plan_checks import MOST_RUNS, check_keys, checked_text
from attemper.lab.study.plan_fields import KEEP, read_evaluate, read_keep, read_margin, read_model, read_title
from attemper.lab.study.plan_recipes import read_entries, read_more, read_published
from attemper.lab.study.plan_rows import Entry, More, Published
from attemper.lab.study.reference import Reference, read_reference
from attemper.lab.study.sameness import plainest
from attemper.lab.training.schedule import schedule_notes
from attemper.lab.training.spec import Budget, RunSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Recipes × seeds on one task, with one model and one budget.

    >>> plan = Plan.from_dict({"task": "digits", "model": "vit-digits", "seeds": 2, "recipes": ["dropkey(0.1)"]})
    >>> [(run.recipe, run.seed) for run in plan.runs()]
    [('none', 0), ('dropkey(0.1)', 0), ('none', 1), ('dropkey(0.1)', 1)]
    >>> plan.notes
    ('added the baseline `none`: every recipe is compared with it',)
    """

    task: str
    model: str
    recipes: tuple[Entry, ...]
    seeds: tuple[int, ...]
    budget: Budget
    """Its learning rate is the first of `lr`."""
    lr: tuple[float, ...]
    """Tried for every recipe, the one that is kept chosen on validation."""
    title: str = ""
    """Empty: the task and the model."""
    published: tuple[Published, ...] = ()
    reference: Reference | None = None
    """The published table that this plan runs again."""
    evaluate: tuple[str, ...] = ()
    """What every run measures at its end beside accuracy: suites of `attemper.lab.evaluation`."""
    keep: str = dataclasses.field(default="best", compare=False)
    """Whose weights the study keeps: those of the best run of every recipe, of "all" runs, or "none"."""
    margin: float | None = None
    """In points: a difference that does not matter; none: as `decisions.default_margin` has it."""
    until: Literal["decided"] | None = None
    """decided: recipes that are not get more seeds, until they are or have `max_seeds`."""
    max_seeds: int | None = None
    more: tuple[More, ...] = ()
    """What was added so far."""
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What was added or changed while reading, for people to read."""

    @property
    def baseline(self) -> Entry:
        return next(entry for entry in self.recipes if entry.is_baseline)

    @property
    def every_seed(self) -> tuple[int, ...]:
        """The plan's own seeds, and behind them those that some row got beside."""
        return self.first_seeds(max([len(self.seeds), *(more.seeds for more in self.more)]))

    def first_seeds(self, count: int) -> tuple[int, ...]:
        """So many seeds: the plan's own, and then the numbers behind the largest of them."""
        after = max(self.seeds) + 1
        return (*self.seeds, *range(after, after + count - len(self.seeds)))[: max(count, len(self.seeds))]

    def more_of(self, entry: Entry) -> More | None:
        """What a row got beyond the plan's own seeds."""
        return next((more for more in self.more if more.name == entry.name), None)

    def configurations(self, entry: Entry) -> list[tuple[str, float]]:
        """The pairs of recipe and learning rate among which validation chooses."""
        return list(entry.tried) or [(recipe, lr) for recipe in entry.configurations for lr in self.lr]

    def spec(self, recipe: str, lr: float, seed: int, task: str | None = None) -> RunSpec:
        """One run of the plan. task: the name that the opened task gives itself, where it is known."""
        budget = dataclasses.replace(self.budget, lr=lr)
        return RunSpec(
            task=task or self.task, model=self.model, recipe=recipe, seed=seed, budget=budget, evaluate=self.evaluate
        )

    def runs(self, task: str | None = None) -> list[RunSpec]:
        """Every run, once, seed by seed: a study that was stopped early has whole seeds to compare."""
        every = [
            self.spec(recipe, lr, seed, task)
            for seed in self.seeds
            for entry in self.recipes
            for recipe, lr in self.configurations(entry)
        ]
        added = [
            self.spec(more.recipe, more.lr, seed, task)
            for at, seed in enumerate(self.every_seed)
            for more in self.more
            if len(self.seeds) <= at < more.seeds
        ]
        return list(dict.fromkeys([*every, *added]))

    def to_dict(self) -> dict[str, Any]:
        """The plan as its file says it, with every default written out."""
        budget = {name: value for name, value in self.budget.to_dict().items() if name != "lr"}
        plan: dict[str, Any] = {"title": self.title} if self.title else {}
        plan |= {"task": self.task, "model": self.model, "seeds": list(self.seeds), "budget": budget}
        plan |= {"lr": list(self.lr), "recipes": [entry.to_dict() for entry in self.recipes]}
        if self.published:
            plan["published"] = [row.to_dict() for row in self.published]
        if self.reference is not None:
            plan["reference"] = self.reference.to_dict()
        if self.evaluate:
            plan["evaluate"] = list(self.evaluate)
        if self.keep != KEEP[0]:
            plan["keep"] = self.keep
        if self.margin is not None:
            plan["margin"] = self.margin
        if self.until is not None:
            plan |= {"until": self.until, "max_seeds": self.max_seeds}
        if self.more:
            plan["more"] = [dataclasses.asdict(more) for more in self.more]
        return plan

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Plan:
        """The plan that a file says; a mistake is a `PlanError` that knows where it is."""
        if not isinstance(given, Mapping):
            raise PlanError(f"A plan is a list of keys and values, such as 'task: digits'; got {shown(given)}.")
        check_keys("plan", given, [name for name in cls.__dataclass_fields__ if name != "notes"])
        for name in ("task", "model", "recipes"):
            if name not in given:
                raise PlanError(f"The plan has no '{name}'; it needs task, model and recipes.")
        entries, notes = read_entries(given["recipes"])
        budget, lr = read_budget(given.get("budget"), given.get("lr"))
        seeds = read_seeds(given.get("seeds", 5))
        until, most = read_until(given.get("until"), given.get("max_seeds"), seeds)
        _refuse_many(entries, range(most or len(seeds)), lr)
        return cls(
            task=checked_text(given["task"], "task", "digits"),
            model=read_model(given["model"]),
            recipes=entries,
            seeds=seeds,
            budget=budget,
            lr=lr,
            title=read_title(given.get("title")),
            published=read_published(given.get("published"), entries),
            reference=read_reference(given.get("reference")),
            evaluate=read_evaluate(given.get("evaluate")),
            keep=read_keep(given.get("keep", KEEP[0])),
            margin=read_margin(given.get("margin")),
            until=until,
            max_seeds=most,
            more=read_more(given.get("more"), entries, most),
            notes=(*notes, *schedule_notes(budget), *_same_things(entries)),
        )


def _refuse_many(entries: Sequence[Entry], seeds: Sequence[int], lr: Sequence[float]) -> None:
    tried = sum(len(entry.tried) or len(entry.configurations) * len(lr) for entry in entries)
    runs = tried * len(seeds)
    if runs > MOST_RUNS:
        raise PlanError(
            f"The plan stands for {runs:,} runs, recipes × seeds × learning rates; at most {MOST_RUNS:,} are run."
        )


def _same_things(entries: Sequence[Entry]) -> tuple[str, ...]:
    """A note for every recipe that computes what an earlier one does."""
    found, notes = dict[str, str](), []
    for entry in entries:
        if len(entry.configurations) == 1:
            plain = plainest(entry.recipe)
            if plain in found:
                notes.append(
                    f"'{entry.name}' is the same thing as '{found[plain]}': they are counted once, and one can be "
                    "left out"
                )
            found.setdefault(plain, entry.name)
    return tuple(notes)
