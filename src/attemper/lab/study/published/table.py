"""A published table that can be run again: rows that are recipes, columns that are metrics, settings, three scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attemper.errors import ParameterError, suggestion
from attemper.lab.study.published.cells import Cell, Printed, read_printed
from attemper.lab.training.spec import Budget

SCALES = {
    "smoke": "embedded data and a small model, a minute on a CPU: shows that everything runs, and nothing else",
    "small": "less of it, or a smaller task of the same kind: about an hour on one large GPU",
    "full": "as published, as far as that is known",
}

STRENGTH = "λ"
"""Stands in a row's recipe for a strength that was searched for."""
BLANK = Cell()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: how it is called, the recipe for it, and what was published, a cell for each column of its table."""

    name: str
    recipe: str
    """With λ where a strength was chosen from a list; the same λ everywhere in one recipe."""
    cells: tuple[Cell, ...] = ()
    """None: a row that the publication lacks."""
    note: str = ""

    @property
    def value(self) -> float | None:
        """Of the first column; None: a row that the publication lacks, or a dash."""
        return self.cells[0].value if self.cells else None

    @property
    def deviation(self) -> float | None:
        return self.cells[0].deviation if self.cells else None

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
class Column:
    """One column: what it is called, and by what ours is measured."""

    title: str
    metric: str = ""
    """As `attemper.lab.study.reference` has it; empty: the task's own metric."""
    condition: str = ""
    """How ours is measured, where that is not the metric of every study."""
    printed: str = ""
    """The printed table that it stands in, where that is not the first of its table."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A setting that the publication gives."""

    name: str
    """A field of a plan or of its budget, or a word of its own."""
    printed: str
    value: Any = None
    """What a plan that agrees has there."""
    also: tuple[Any, ...] = ()
    """Other values that agree, as a rule may have them."""
    here: str = "as printed"
    """Of a setting that is no field: what is done here."""
    agrees: bool = True
    """Of a setting that is no field: whether that is as printed."""
    scales: tuple[str, ...] = ("full", "small")
    """Of a setting that is no field: where it is done at all."""


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
    evaluate: tuple[str, ...] = ()
    """What is measured beside the metric."""
    stands_for: str = ""
    """What the figures were published for, where this is another task."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A published table: its rows and columns, where they come from, what to know about them, and how to run them."""

    key: str
    title: str
    printed: tuple[str, ...] = ()
    """Tables of `attemper.lab.study.published.cells` with its cells; the first is its source."""
    origin: str = ""
    """The source of a table that we have no figures of; what is printed then are other facts."""
    caveats: tuple[str, ...] = ()
    columns: tuple[Column, ...] = (Column(title="accuracy, %"),)
    rows: tuple[Row, ...] = ()
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """By the names of `SCALES`; empty for a table that cannot be run."""
    stated: tuple[Stated, ...] = ()
    waits_for: str = ""
    """Of a table that cannot be run: what there would have to be, or which command measures it."""

    @property
    def figures(self) -> tuple[Printed, ...]:
        """The printed tables behind it."""
        return tuple(map(read_printed, self.printed))

    @property
    def source(self) -> str:
        """Paper and table in a line; † marks figures from third-party notes."""
        return self.origin or self.figures[0].source

    @property
    def paper(self) -> str:
        return self.origin.partition(",")[0] or self.figures[0].paper.short

    @property
    def where(self) -> str:
        """Page or section."""
        return "" if self.origin else self.figures[0].where

    @property
    def can_run(self) -> bool:
        return bool(self.sizes)

    def plan(self, scale: str = "small") -> dict[str, Any]:
        """The table as a plan, in the form that `attemper.lab.study.plan.Plan.from_dict` reads.

        scale: one of `SCALES`. Where it runs on another task, published figures stand beside ours without a difference.
        """
        size = self.size(scale)
        title = self.title if not size.stands_for else f"{self.title}: {scale} run on {size.task}"
        plan: dict[str, Any] = {
            "title": title,
            "task": size.task,
            "model": size.model,
            "seeds": size.seeds,
            "budget": {"epochs": size.epochs, **size.budget},
            "lr": list(size.lr),
            "recipes": [self._entry(row, size) for row in self.rows],
            "reference": self._reference(scale),
        }
        plan |= {"evaluate": list(size.evaluate)} if size.evaluate else {}
        published = [cell for row in self.rows for cell in self._published(row)]
        return {**plan, "published": published} if published else plan

    def runs(self, scale: str = "small") -> int:
        """How many runs the plan of this scale has: rows with their configurations × learning rates × seeds."""
        size = self.size(scale)
        return size.seeds * len(size.lr) * sum(len(row.configurations(size.strengths)) for row in self.rows)

    def size(self, scale: str) -> Size:
        """What a scale runs."""
        if scale not in SCALES:
            raise ParameterError(
                f"There is no scale '{scale}'.{suggestion(scale, SCALES)} It is one of {', '.join(SCALES)}."
            )
        if not self.can_run:
            raise ParameterError(f"The table '{self.key}' cannot be run: {self.waits_for}.")
        return self.sizes[scale]

    def settings(self, scale: str) -> list[dict[str, Any]]:
        """Every setting of a scale: what is done here, what was printed, and whether they agree."""
        size = self.size(scale)
        here = {"task": size.task, "model": size.model, "seeds": size.seeds, "epochs": size.epochs, "lr": list(size.lr)}
        here |= {"λ": list(size.strengths)} if size.strengths else {}
        here |= size.budget
        stated = {each.name: each for each in self.stated}
        usual = asdict(Budget())
        here |= {name: usual[name] for name in stated if name in usual and name not in here}
        rows = [_setting(name, value, stated.pop(name, None)) for name, value in here.items()]
        return rows + [_word(each, scale) for each in stated.values()]

    def _entry(self, row: Row, size: Size) -> str | dict[str, str]:
        recipe = row.grid(size.strengths)
        return recipe if recipe == row.name else {"name": row.name, "recipe": recipe}

    def _reference(self, scale: str) -> dict[str, Any]:
        size = self.size(scale)
        other = {"another_task": size.stands_for} if size.stands_for else {}
        by_note: dict[str, list[str]] = {}
        for row in self.rows:
            by_note.setdefault(row.note, []).append(row.name)
        notes = [*self.caveats, *(f"{', '.join(names)}: {note}." for note, names in by_note.items() if note)]
        copies = list(dict.fromkeys(f"{each.paper.short}: we have {each.paper.copy}." for each in self.figures))
        return {
            "table": self.key,
            "source": self.source,
            **other,
            "notes": [*notes, *copies],
            "settings": self.settings(scale),
        }

    def _published(self, row: Row) -> list[dict[str, Any]]:
        found = []
        for at, (column, cell) in enumerate(zip(self.columns, row.cells, strict=False)):
            if cell.value is None:
                continue
            spread = {} if cell.deviation is None else {"deviation": cell.deviation}
            more = {"column": column.title, "metric": column.metric, "condition": column.condition} if at else {}
            more = {name: value for name, value in more.items() if value}
            source = read_printed(column.printed).source if column.printed else self.source
            found.append({"name": row.name, "value": cell.value, **spread, "source": source, **more})
        return found


def _setting(name: str, value: Any, stated: Stated | None) -> dict[str, Any]:
    here = ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
    found: dict[str, Any] = {"name": name.replace("_", " "), "here": here}
    if stated is None:
        return found
    return {**found, "printed": stated.printed, "agrees": value in (stated.value, *stated.also)}


def _word(stated: Stated, scale: str) -> dict[str, Any]:
    """A setting that is no field of a plan."""
    done = scale in stated.scales
    here = stated.here if done else "not at this scale"
    return {"name": stated.name, "here": here, "printed": stated.printed, "agrees": done and stated.agrees}


def rows_of(printed: str, columns: tuple[str, ...], rows: Mapping[str, tuple[str, str]]) -> tuple[Row, ...]:
    """Rows out of a printed table. rows: by what they are called there, what they are called here and their recipe."""
    table = read_printed(printed)
    return tuple(
        Row(name=name, recipe=recipe, cells=tuple(table.cell(label, column) for column in columns))
        for label, (name, recipe) in rows.items()
    )


def added(name: str, recipe: str, note: str = "our addition") -> Row:
    """A row that the publication lacks."""
    return Row(name=name, recipe=recipe, note=note)
