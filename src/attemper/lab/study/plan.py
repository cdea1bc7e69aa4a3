"""A plan: what is compared with what, on which data, for how long. Small enough to be read at a glance."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from attemper.errors import AttemperError, quoted, shown, suggestion
from attemper.lab.call_syntax import parse_call, render_call
from attemper.lab.errors import PlanError
from attemper.lab.evaluation.suites import parse_suites
from attemper.lab.study.grids import expand
from attemper.lab.study.reference import Reference, check_metric, read_reference
from attemper.lab.study.sameness import plainest
from attemper.lab.training.schedule import schedule_notes
from attemper.lab.training.spec import Budget, RunSpec
from attemper.recipe import as_methods, render

BASELINE = "none"
MOST_SEEDS = 1_000
MAX_SEEDS = 40
"""Up to which seeds are added, unless the plan says otherwise."""
MOST_RECIPES = 1_000
MOST_RATES = 100
MOST_RUNS = 50_000
"""Of a plan. Results are files, and are looked at one by one."""
MOST_CHARACTERS = 1_000
"""Of a title, of a name, of a source."""
LARGEST_SEED = 2**63 - 1
LARGEST_NUMBER = 1e300
KEEP = ("best", "all", "none")
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
        plan |= {"lr": list(self.lr), "recipes": [_entry_dict(entry) for entry in self.recipes]}
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
        _check_keys("plan", given, [name for name in cls.__dataclass_fields__ if name != "notes"])
        for name in ("task", "model", "recipes"):
            if name not in given:
                raise PlanError(f"The plan has no '{name}'; it needs task, model and recipes.")
        entries, notes = _entries(given["recipes"])
        budget, lr = _budget_and_rates(given.get("budget"), given.get("lr"))
        seeds = _seeds(given.get("seeds", 5))
        until, most = _until(given.get("until"), given.get("max_seeds"), seeds)
        _refuse_many(entries, range(most or len(seeds)), lr)
        return cls(
            task=_text(given["task"], "task", "digits"),
            model=_model(given["model"]),
            recipes=entries,
            seeds=seeds,
            budget=budget,
            lr=lr,
            title=_title(given.get("title")),
            published=_published(given.get("published"), entries),
            reference=read_reference(given.get("reference")),
            evaluate=_evaluate(given.get("evaluate")),
            keep=_keep(given.get("keep", KEEP[0])),
            margin=_margin(given.get("margin")),
            until=until,
            max_seeds=most,
            more=_more(given.get("more"), entries, most),
            notes=(*notes, *schedule_notes(budget), *_same_things(entries)),
        )


def _refuse_many(entries: Sequence[Entry], seeds: Sequence[int], lr: Sequence[float]) -> None:
    tried = sum(len(entry.tried) or len(entry.configurations) * len(lr) for entry in entries)
    runs = tried * len(seeds)
    if runs > MOST_RUNS:
        raise PlanError(
            f"The plan stands for {runs:,} runs, recipes × seeds × learning rates; at most {MOST_RUNS:,} are run."
        )


def _check_keys(what: str, given: Mapping[Any, Any], known: Iterable[str], path: tuple[str | int, ...] = ()) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            near = suggestion(str(key), known)
            raise PlanError(f"A {what} has no {quoted(str(key))}.{near} It has: {', '.join(known)}.", (*path, key))


def _text(given: Any, name: str, example: str) -> str:
    if not isinstance(given, str) or not given.strip():
        raise PlanError(f"{name} is {shown(given)}; it must be a text such as '{example}'.", (name,))
    return _short(given.strip(), name, (name,))


def _short(given: str, what: str, path: tuple[str | int, ...]) -> str:
    if len(given) > MOST_CHARACTERS:
        raise PlanError(f"{what} has {len(given):,} characters; it must have at most {MOST_CHARACTERS:,}.", path)
    return given


def _title(given: Any) -> str:
    """On one line: YAML would fold others, also at breaks that no editor shows."""
    return " ".join(_text(given, "title", "Digits, five seeds").split()) if given else ""


def _model(given: Any) -> str:
    text = _text(given, "model", "vit-digits")
    try:
        return render_call(*parse_call(text))
    except AttemperError as error:
        raise PlanError(str(error), ("model",)) from None


def _whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and abs(given) <= LARGEST_NUMBER


def _seeds(given: Any) -> tuple[int, ...]:
    count = given if _whole(given) else len(given) if isinstance(given, list | tuple) else 0
    if count > MOST_SEEDS:
        what = f"is {shown(given)}" if _whole(given) else f"has {count:,} of them"
        raise PlanError(f"seeds {what}; a plan has at most {MOST_SEEDS:,} seeds.", ("seeds",))
    if _whole(given) and given >= 1:
        return tuple(range(given))
    if isinstance(given, list | tuple) and given and all(_whole(s) and 0 <= s <= LARGEST_SEED for s in given):
        if len(set(given)) == len(given):
            return tuple(given)
        raise PlanError(f"seeds names {next(s for s in given if given.count(s) > 1)} more than once.", ("seeds",))
    raise PlanError(
        f"seeds is {shown(given)}; it must be how many (at least 1, better 5), or a list such as [0, 1, 2].", ("seeds",)
    )


def _entries(given: Any) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise PlanError(
            f"recipes is {shown(given)}; it must be a list of recipes such as [none, dropkey(0.1)].", ("recipes",)
        )
    if len(given) > MOST_RECIPES:
        raise PlanError(f"recipes has {len(given):,} of them; a plan has at most {MOST_RECIPES:,}.", ("recipes",))
    entries = [_entry(item, ("recipes", index)) for index, item in enumerate(given)]
    names: set[str] = set()
    earlier: dict[frozenset[str], str] = {}
    for index, entry in enumerate(entries):
        path, same = ("recipes", index), frozenset(entry.configurations)
        if entry.name == BASELINE and not entry.is_baseline:
            raise PlanError(f"'{BASELINE}' names the recipe without any method; call '{entry.recipe}' otherwise.", path)
        if entry.name in names:
            raise PlanError(f"Two recipes are called '{entry.name}'; give one of them another name.", path)
        if same in earlier:
            raise PlanError(f"'{entry.name}' is the same recipe as '{earlier[same]}'; leave one of them out.", path)
        names.add(entry.name)
        earlier[same] = entry.name
    if any(entry.is_baseline for entry in entries):
        return tuple(entries), ()
    return (Entry(BASELINE), *entries), (f"added the baseline `{BASELINE}`: every recipe is compared with it",)


def _entry(given: Any, path: tuple[str | int, ...]) -> Entry:
    if isinstance(given, str):
        given = {"recipe": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("recipe", ""), str):
        raise PlanError(f"{shown(given)} is no recipe; write one such as dropkey(0.1), or a name and a recipe.", path)
    _check_keys("recipe of a plan", given, ["name", "recipe", "tried"], path)
    if "tried" in given:
        return _tried(given, path)
    if "recipe" not in given:
        raise PlanError(f"{shown(dict(given))} has no 'recipe'.", path)
    name = given.get("name", "")
    if not isinstance(name, str):
        raise PlanError(f"The name of a recipe is {shown(name)}; it must be a text.", path)
    name = _short(name.strip(), "The name of a recipe", path)
    try:
        return Entry(given["recipe"], name)
    except AttemperError as error:
        raise PlanError(str(error), path) from None


def _entry_dict(entry: Entry) -> dict[str, Any]:
    if not entry.tried:
        return {"name": entry.name, "recipe": entry.recipe}
    return {"name": entry.name, "tried": [{"recipe": recipe, "lr": lr} for recipe, lr in entry.tried]}


def _tried(given: Mapping[str, Any], path: tuple[str | int, ...]) -> Entry:
    """A row of single configurations, each with its own learning rate."""
    rows, name = given["tried"], given.get("name")
    fits = isinstance(rows, list | tuple) and rows and isinstance(name, str) and name and "recipe" not in given
    if not fits or not all(isinstance(row, Mapping) and set(row) == {"recipe", "lr"} for row in rows):
        raise PlanError(f"{shown(dict(given))}: tried is a list of recipe and lr, and its row has a name.", path)
    if not all(isinstance(row["recipe"], str) and _number(row["lr"]) and row["lr"] > 0 for row in rows):
        raise PlanError(f"{shown(dict(given))}: a recipe is a text and lr a number above 0.", path)
    try:
        pairs = dict.fromkeys((render(as_methods(row["recipe"])), float(row["lr"])) for row in rows)
        return row_of(_short(str(name).strip(), "The name of a recipe", path), list(pairs))
    except AttemperError as error:
        raise PlanError(str(error), path) from None


def row_of(name: str, tried: Sequence[tuple[str, float]]) -> Entry:
    """A row of single configurations."""
    recipes = list(dict.fromkeys(recipe for recipe, _ in tried))
    text = recipes[0] if len(recipes) == 1 else f"{{{', '.join(recipes)}}}"
    return Entry(text, name, tuple(tried))


def _budget_and_rates(budget: Any, lr: Any) -> tuple[Budget, tuple[float, ...]]:
    budget = {} if budget is None else budget
    if not isinstance(budget, Mapping):
        raise PlanError(f"budget is {shown(budget)}; it must be keys and values such as {{epochs: 20}}.", ("budget",))
    if lr is not None and "lr" in budget:
        raise PlanError("The learning rate stands twice: as lr, and in the budget. Keep one of them.", ("lr",))
    read = _budget(budget)
    if lr is None:
        return read, (read.lr,)
    rates = list(lr) if isinstance(lr, list | tuple) else [lr]
    if not rates or not all(_number(rate) and rate > 0 for rate in rates) or len(set(rates)) < len(rates):
        raise PlanError(f"lr is {shown(lr)}; it must be a number above 0, or a list of different ones.", ("lr",))
    if len(rates) > MOST_RATES:
        raise PlanError(f"lr has {len(rates):,} learning rates; a plan has at most {MOST_RATES:,}.", ("lr",))
    found = tuple(float(rate) for rate in rates)
    return dataclasses.replace(read, lr=found[0]), found


def _budget(given: Mapping[str, Any]) -> Budget:
    """The budget, with every number in the type that its field has: equal budgets must give equal keys."""
    hints = typing.get_type_hints(Budget)
    _check_keys("budget", given, hints, ("budget",))
    typed = {name: _typed(name, value, hints[name]) for name, value in given.items()}
    try:
        return Budget.from_dict(typed)
    except AttemperError as error:
        name = str(error).partition(" ")[0]  # what a budget complains about comes first, and so has its line
        raise PlanError(str(error), ("budget", *([name] if name in typed else []))) from None


def _typed(name: str, value: Any, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    if float in kinds and _number(value):
        return float(value)
    if int in kinds and _whole(value):
        return value
    if bool in kinds and isinstance(value, bool):
        return value
    if (str in kinds or typing.get_origin(hint) is typing.Literal) and isinstance(value, str):
        return value
    words = {float: "a number", int: "a whole number", bool: "true or false", type(None): "none"}
    allowed = " or ".join(dict.fromkeys(words.get(kind, "a word") for kind in kinds))
    raise PlanError(f"{name} is {shown(value)}; it must be {allowed}.", ("budget", name))


def _evaluate(given: Any) -> tuple[str, ...]:
    """Suites in their shortest form, in one order: equal evaluations must give equal keys."""
    if given is None or given == []:
        return ()
    if not isinstance(given, str) and not (isinstance(given, list | tuple) and all(isinstance(s, str) for s in given)):
        raise PlanError(
            f"evaluate is {shown(given)}; it must be suites such as [calibration, robustness].", ("evaluate",)
        )
    try:
        return tuple(suite.text for suite in parse_suites(given))
    except AttemperError as error:
        raise PlanError(str(error), ("evaluate",)) from None


def _keep(given: Any) -> str:
    if given not in KEEP:
        raise PlanError(f"keep is {shown(given)}; it must be one of {', '.join(KEEP)}.", ("keep",))
    return str(given)


def _until(until: Any, most: Any, seeds: Sequence[int]) -> tuple[Literal["decided"] | None, int | None]:
    """Whether seeds are added, and up to how many."""
    if until is None:
        if most is not None:
            raise PlanError("max_seeds says nothing without until: decided.", ("max_seeds",))
        return None, None
    if until != "decided":
        raise PlanError(f"until is {shown(until)}; it can be: decided.", ("until",))
    most = MAX_SEEDS if most is None else most
    if not _whole(most) or not len(seeds) < most <= MOST_SEEDS:
        raise PlanError(
            f"max_seeds is {shown(most)}; it must be more than the {len(seeds)} seeds that the study begins with, "
            "and at "
            f"most {MOST_SEEDS:,}.",
            ("max_seeds",),
        )
    if len(seeds) < 2:
        raise PlanError("until: decided needs at least two seeds to begin with, better three.", ("seeds",))
    if max(seeds) + most > LARGEST_SEED:
        raise PlanError("seeds must leave room for those that until: decided adds behind them.", ("seeds",))
    return "decided", most


def _more(given: Any, entries: Sequence[Entry], most: int | None) -> tuple[More, ...]:
    if given is None:
        return ()
    known = {entry.name: entry for entry in entries}
    if most is None or not isinstance(given, list | tuple):
        raise PlanError("more is what a study with until: decided has added so far; leave it out.", ("more",))
    found = []
    for index, row in enumerate(given):
        path: tuple[str | int, ...] = ("more", index)
        if not isinstance(row, Mapping) or set(row) != {"name", "recipe", "lr", "seeds"} or row["name"] not in known:
            raise PlanError(f"{shown(row)} adds to no recipe of this plan: name, recipe, lr and seeds.", path)
        fits = row["recipe"] in known[row["name"]].configurations
        if not fits or not _number(row["lr"]) or not _whole(row["seeds"]) or not 0 < row["seeds"] <= most:
            raise PlanError(f"{shown(row)} adds to no recipe of this plan: name, recipe, lr and seeds.", path)
        found.append(More(row["name"], row["recipe"], float(row["lr"]), row["seeds"]))
    return tuple(found)


def _margin(given: Any) -> float | None:
    if given is None:
        return None
    if not _number(given) or not 0 < given < 100:
        raise PlanError(
            f"margin is {shown(given)}; it must be a number of points above 0, such as 0.5: differences that small do "
            "not matter.",
            ("margin",),
        )
    return float(given)


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


def _published(given: Any, entries: tuple[Entry, ...]) -> tuple[Published, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise PlanError(f"published is {shown(given)}; it must be a list of rows with name and value.", ("published",))
    return tuple(_published_row(row, entries, ("published", index)) for index, row in enumerate(given))


def _published_row(given: Any, entries: tuple[Entry, ...], path: tuple[str | int, ...]) -> Published:
    if not isinstance(given, Mapping) or not {"name", "value"} <= set(given):
        raise PlanError(f"{shown(given)} is no published row; it needs a name and a value in per cent.", path)
    _check_keys("published row", given, Published.__dataclass_fields__, path)
    names = [entry.name for entry in entries]
    name, value, deviation, source = (given.get(key) for key in ("name", "value", "deviation", "source"))
    if name not in names:
        raise PlanError(f"No recipe is called '{name}'.{suggestion(str(name), names)}", (*path, "name"))
    if not _number(value) or not (deviation is None or _number(deviation)):
        raise PlanError(f"The published value and deviation of '{name}' must be numbers, in per cent.", path)
    words = {key: given.get(key, "") for key in PUBLISHED_LATER}
    if not all(isinstance(word, str) for word in words.values()):
        raise PlanError(f"The column, metric and condition of '{name}' must be texts.", path)
    check_metric(words["metric"])
    return Published(
        name=str(name),
        value=float(typing.cast(float, value)),
        deviation=None if deviation is None else float(deviation),
        source=_short(str(source or ""), "The source of a published value", path),
        **words,
    )
