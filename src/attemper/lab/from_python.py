"""`attemper.compare`: a comparison from Python, with models and data of one's own."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from attemper.errors import ParameterError
from attemper.files import atomic_write
from attemper.lab.errors import FolderError
from attemper.lab.folders import study_folder
from attemper.lab.own_code import GIVEN, hand_over
from attemper.lab.report.study import render as render_page
from attemper.lab.study.comparison import compare as run_comparison
from attemper.lab.study.defaults import completed
from attemper.lab.study.engine import Training
from attemper.lab.study.executor import Executor
from attemper.lab.study.export import to_markdown
from attemper.lab.study.in_process import InProcess
from attemper.lab.study.live import SilentView, View, make_view
from attemper.lab.study.processes import Processes
from attemper.lab.study.settings import Settings
from attemper.lab.study.summary import Summary
from attemper.lab.tasks.notifications import listening
from attemper.lab.tasks.own.opening import text_of
from attemper.lab.tasks.own.parts import take_apart
from attemper.recipe import as_methods
from attemper.recipe import render as render_recipe

REPORT = "report.html"


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to. In a notebook it shows itself as a table."""

    summary: Summary
    """All of it, as plain data; the same as summary.json."""
    folder: Path
    """Where the results of all runs are."""
    page: Path
    """The page, to be opened in a browser."""

    @property
    def verdict(self) -> str:
        """What was found, in a sentence."""
        return str(self.summary["verdict"])

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row per recipe: the metric on test from 0 to 1, mean and deviation, and the difference to the baseline."""
        return [
            {
                "name": row["name"],
                "recipe": row["recipe"],
                "lr": row["lr"],
                "mean": row["mean"],
                "deviation": row["deviation"],
                "difference": (row["difference"] or {}).get("mean"),
                "p": (row["difference"] or {}).get("adjusted"),
                "validation": _mean(row["validation"]),
                "step_time": (row["cost"] or {}).get("ratio"),
            }
            for row in self.summary["recipes"]
        ]

    @property
    def best(self) -> str | None:
        """The recipe that is best on validation, whether or not the difference is more than chance: see the verdict."""
        there = [row for row in self.table if row["validation"] is not None]
        return max(there, key=lambda row: row["validation"])["recipe"] if there else None

    def to_markdown(self) -> str:
        """Table and verdict for a text."""
        return to_markdown(self.summary)

    def __str__(self) -> str:
        return self.to_markdown()

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.table)} recipes on {self.summary['plan']['task']}: {self.verdict}>"

    def _repr_html_(self) -> str:
        titles = ("recipe", f"test {self.summary['metric']} %", "difference", "p", "step time")
        head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in self.table
        )
        link = html.escape(self.page.absolute().as_uri(), quote=True)
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f"<p>{html.escape(self.verdict)}</p><p><a href='{link}'>{html.escape(str(self.page))}</a></p>"
        )


def compare(
    model: str | nn.Module | Callable[..., nn.Module],
    data: Any,
    recipes: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    lr: float | Sequence[float] | None = None,
    metric: str | Callable[..., float] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    classes: Sequence[str] | None = None,
    size: int | None = None,
    folder: str | Path | None = None,
    workers: int | None = None,
    device: str | None = None,
    title: str = "",
    evaluate: Sequence[str] = (),
    costs: bool = True,
    track: Sequence[str] = (),
    probe_every: int | None = None,
    change_plan: bool = False,
    root: str | Path | None = None,
    progress: bool = True,
    **budget: Any,
) -> Comparison:
    """See `attemper.compare`."""
    plan: dict[str, Any] = {"model": _model_text(model), "task": _task_text(data, metric, collate, classes, size)}
    plan |= {} if recipes is None else {"recipes": _recipes(recipes)}
    plan |= {} if seeds is None else {"seeds": seeds if isinstance(seeds, int) else list(seeds)}
    plan |= {} if lr is None else {"lr": [lr] if isinstance(lr, int | float) else list(lr)}
    names = " · ".join(plan[each].removeprefix(f"{GIVEN}:") for each in ("task", "model"))
    plan |= {"title": title or names}
    plan |= {"evaluate": list(evaluate)} if evaluate else {}
    place = None if root is None else Path(root)
    view: View = make_view() if progress else SilentView()
    with listening(_Notes(view)):
        whole = completed({**plan, "budget": budget}, place)
        where = study_folder(whole.task, whole.model, evaluated=bool(evaluate), mark=_mark(whole, place))
        where = where if folder is None else Path(folder)
        summary = run_comparison(
            whole,
            where,
            executor=_executor(workers, device, whole.task, whole.model),
            root=place,
            view=view,
            costs=costs,
            change_plan=change_plan,
            command="attemper.compare(…)",
            settings=Settings(probe_every, tuple(track)),
        )
    return Comparison(summary, where, write_page(summary, where / REPORT))


def write_page(summary: Summary, path: Path) -> Path:
    """The page of a summary, whole or not at all."""
    try:
        atomic_write(path, render_page(summary))
    except OSError as error:
        raise FolderError(f"The report {path} cannot be written: {error.strerror or error}.") from None
    return path


@dataclass(frozen=True)
class _Notes:
    """Shows what tasks and checks have to say, each line once."""

    view: View

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None:
        self.view.note(f"note: {text}")


def _model_text(model: Any) -> str:
    if isinstance(model, str):
        return model
    if not callable(model):
        raise ParameterError(f"model is {model!r}; it must be a name, a function that returns a module, or a module.")
    return hand_over(model, _name(model))


def _task_text(data: Any, metric: Any, collate: Any, classes: Any, size: int | None) -> str:
    more = {"metric": metric, "collate": collate, "classes": classes}
    more = {name: value for name, value in more.items() if value is not None}
    if isinstance(data, str | Path):
        if more:
            raise ParameterError(f"{next(iter(more))} goes with data that is handed over, and data is '{data}'.")
        text = text_of(data)
    else:
        if more:
            parts = take_apart(data)
            named = {"train": parts.train, "validation": parts.validation, "test": parts.test}
            data = {name: part for name, part in named.items() if part is not None} | more
        text = hand_over(data, _name(data))
    if size is None:
        return text
    from attemper.lab.call_syntax import parse_call, render_call

    name, options = parse_call(text)
    return render_call(name, {**options, "size": size})


def _name(thing: Any) -> str:
    """What something that was handed over is called in tables."""
    name = getattr(thing, "__name__", type(thing).__name__)
    name = "".join(sign if sign.isalnum() else "_" for sign in name).strip("_").lower() or "own"
    return "data" if name in ("tuple", "list", "dict") else name if not name[0].isdigit() else f"own_{name}"


def _recipes(given: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    if isinstance(given, str):
        raise ParameterError(f"recipes is {given!r}; it must be a list of recipes, such as ['dropkey(0.1)', 'cb'].")
    if isinstance(given, Mapping):
        return [{"name": str(name), "recipe": _recipe(recipe)} for name, recipe in given.items()]
    return [_recipe(recipe) for recipe in given]


def _recipe(given: Any) -> str:
    """A text as it is, which may be a grid; methods as a text."""
    return given if isinstance(given, str) else render_recipe(as_methods(given))


def _mark(plan: Any, root: Path | None) -> str:
    """Tells apart comparisons of models and data with the same names; empty where names say it all."""
    if not any(":" in each for each in (plan.task, plan.model)):
        return ""
    engine = Training()
    task = engine.open_task(plan.task, root)
    budget = engine.with_hashes(plan.budget, task, plan.model)
    whole = f"{task.fingerprint} {budget.init_hash} {budget.code_hash}"
    return hashlib.sha256(whole.encode()).hexdigest()[:8]


def _executor(workers: int | None, device: str | None, *names: str) -> Executor:
    if workers is None:
        return InProcess(device)
    for name in names:
        if name.startswith(f"{GIVEN}:"):
            raise ParameterError(
                f"workers is {workers}, and '{name.partition(':')[2]}' is known in this process alone: others could "
                "not import it. Write it as a function of a module of its own, or leave workers out."
            )
    return Processes(workers)


def _cells(row: Mapping[str, Any]) -> list[str]:
    def per_cent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.2f}"

    mean = per_cent(row["mean"]) + ("" if row["deviation"] is None else f" ± {per_cent(row['deviation'])}")
    difference = "–" if row["difference"] is None else f"{100 * row['difference']:+.2f}"
    p = "–" if row["p"] is None else f"{row['p']:.3f}"
    return [row["name"], mean, difference, p, "–" if row["step_time"] is None else f"{row['step_time']:.2f} ×"]


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
