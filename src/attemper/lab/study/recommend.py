"""`recommend`: explore recipes and settings with equal budgets, then confirm the best on seeds that exploration never
saw.

Everything is a study in a folder of its own: explore-1, explore-2 … for the stages of exploration, confirm for the
end. So it is stopped, resumed and shared like a study, by the same workers. Which trials there are follows from the
settings and from results on disk, so that whoever goes on comes to the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attemper.errors import MissingFileError, ParameterError, UnreadableError
from attemper.files import atomic_write, read_json_object
from attemper.lab.errors import StudyError
from attemper.lab.folders import folder_errors, unreadable
from attemper.lab.study.cautions import rates_at_the_edge
from attemper.lab.study.comparison import compare
from attemper.lab.study.engine import Engine, Training
from attemper.lab.study.executor import Executor, work
from attemper.lab.study.exploring import (
    Configuration,
    Family,
    Proposer,
    best_of,
    expected_best,
    families,
    fitting,
    kept,
    rungs,
)
from attemper.lab.study.live import SilentView, View
from attemper.lab.study.plan import Plan
from attemper.lab.study.plan_rows import row_of
from attemper.lab.study.selection import validation_of
from attemper.lab.study.study import Study
from attemper.lab.threads import cores
from attemper.lab.training.ranks import current
from attemper.lab.training.spec import RunSpec, lacks_hashes

FILE = "recommend.json"
EXPLORING = 0.5
"""The share of the time that is for exploration."""
OVERHEAD = 0.8
"""The share of the time in which runs go on: workers have to be started, too."""
FEWEST, MOST = 2, 40
"""Trials per recipe."""
FEWEST_SEEDS, MOST_SEEDS = 3, 40
"""To confirm with."""
CONFIRMED = 3
"""Recipes beside `none` that are confirmed; two where time is short."""
EXPLORED_SEED = 0
DIVERGED = "diverged"
"""What stands in the place of a verdict where `none` could not be trained."""

Recommendation = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What fits into the time."""

    trials: int
    """Of every recipe."""
    confirmed: int
    seeds: int
    minutes: float
    """That it will take, by what the first trials took."""


def recommend(
    base: Mapping[str, Any],
    folder: str | Path,
    *,
    minutes: float = 5.0,
    recipes: Sequence[str] = (),
    workers: int | None = None,
    executor: Executor | None = None,
    root: Path | None = None,
    view: View | None = None,
    command: str = "attemper recommend",
    engine: Engine | None = None,
) -> Recommendation:
    """Explore, confirm, and say what to use.

    base: task, model, budget and learning rate, as in a plan; its recipes and seeds are not looked at.
    folder: where everything is kept; the same call goes on where it was.
    minutes: how long it may take, about.
    recipes: names of families (`exploring.SPACES`), recipes or grids; none: the usual ones.
    workers, executor, root, view, engine: as in `compare`.

    Returns "answer" (recipe, lr, verdict, cost), "explored" (all trials of every recipe), "confirmation" (the summary
    of the confirming study), "sizes", "misfits" and the settings.
    """
    if not minutes > 0:
        raise ParameterError(f"--minutes is {minutes:g}; it must be above 0.")
    if not current().alone:
        raise StudyError("recommend does not run under torchrun; start it once, and it starts workers of its own.")
    return _Search(base, Path(folder), minutes, recipes, workers, executor, root, view, engine).run(command)


class _Search:
    """One search, from whatever is in its folder."""

    def __init__(
        self,
        base: Mapping[str, Any],
        folder: Path,
        minutes: float,
        recipes: Sequence[str],
        workers: int | None,
        executor: Executor | None,
        root: Path | None,
        view: View | None,
        engine: Engine | None,
    ) -> None:
        kept_keys = {name: base[name] for name in ("task", "model", "budget", "lr", "margin") if name in base}
        self.base = Plan.from_dict({**kept_keys, "recipes": ["none"], "seeds": [EXPLORED_SEED]})
        self.folder, self.minutes, self.recipes = folder, minutes, tuple(recipes)
        self.executor, self.root, self.view = executor, root, view or SilentView()
        self.engine = engine or Training()
        if lacks_hashes(self.base.budget, self.base.model):  # as studies do: what a run is called depends on them
            task = self.engine.open_task(self.base.task, root)
            budget = self.engine.with_hashes(self.base.budget, task, self.base.model)
            self.base = dataclasses.replace(self.base, budget=budget)
        self.workers = self._held() or workers or getattr(executor, "workers", None) or _workers_here(executor)
        self.given_workers = workers
        self.stages = rungs(self.base.budget.epochs)
        self.seconds: dict[tuple[int, str, Configuration], float] = {}
        """What each explored run took, by stage and recipe."""

    def _asked(self) -> dict[str, Any]:
        return {"plan": self.base.to_dict(), "minutes": self.minutes, "recipes": list(self.recipes)}

    def _held(self) -> int | None:
        """How many workers the folder's search has, which the first one said; None where there is no search yet."""
        path = self.folder / FILE
        try:
            held = read_json_object(path)
            other = [name for name, value in self._asked().items() if held[name] != value]
            if other:
                raise StudyError(
                    f"{self.folder} holds a recommendation with another {' and another '.join(other)}: choose another "
                    "folder, or ask for the same."
                )
            return int(held["workers"])
        except MissingFileError:
            return None
        except (UnreadableError, ValueError, KeyError, TypeError) as error:
            raise unreadable(path, error) from None

    def _settle(self) -> None:
        """Write down what was asked for, once it is known to work."""
        path = self.folder / FILE
        if not path.exists():
            with folder_errors(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                atomic_write(path, json.dumps({**self._asked(), "workers": self.workers}, indent=1) + "\n")
        self.workers = self._held() or self.workers  # another process may have been first

    def run(self, command: str) -> Recommendation:
        task = self.engine.open_task(self.base.task, self.root)

        def check(recipe: str) -> None:
            self.engine.check(self.base.spec(recipe, self.base.lr[0], EXPLORED_SEED, task.name), task)

        found, misfits = fitting(families(self.recipes), check)
        for name, problem in misfits.items():
            self.view.note(f"left out: {name} does not fit {self.base.model}: {problem}")
        if len(found) < 2:
            raise StudyError(f"No recipe fits {self.base.model}, so that there is nothing to explore.")
        self._settle()
        proposers = [Proposer(family, self.base.lr[0], seed) for seed, family in enumerate(found)]
        self._stage(0, {p.family.name: p.trials[:1] for p in proposers})
        sizes = self._sizes(found, sum(self.seconds.values()))
        self.view.note(
            f"{sizes.trials} trials of each of {len(found)} recipes, then {sizes.confirmed} of them and none on "
            f"{sizes.seeds} fresh seeds: about {sizes.minutes:.1f} minutes with {self.workers} workers"
        )
        if sizes.minutes > 1.2 * self.minutes:
            self.view.note(
                f"that is more than the {self.minutes:g} minutes that were asked for, and the least that can tell "
                "anything: "
                "fewer recipes or epochs, or more workers, take less"
            )
        trials = self._first_stage(proposers, sizes)
        stages = [trials]
        for at, count in enumerate(kept(sizes.trials, len(self.stages))[1:], 1):
            going_on = {name: best_of(values, count) for name, values in stages[-1].items()}
            stages.append(self._stage(at, going_on))
        best = {name: best_of(values, 1)[0] for name, values in stages[-1].items()}
        reached = {name: stages[-1][name][configuration] for name, configuration in best.items()}
        names = [name for name in best_of_names(reached) if name != "none"][: sizes.confirmed]
        sizes = self._with_what_is_left(sizes, names)
        summary = self._confirm({name: best[name] for name in ["none", *names]}, sizes, command)
        explored = [self._trials_of(family, stages, best, names) for family in found]
        summary["cautions"] = [*summary.get("cautions", ()), *rates_at_the_edge(explored)]
        return {
            "title": f"What to use: {self.base.task} · {self.base.model}",
            "answer": answer(summary),
            "explored": explored,
            "epochs": self.stages,
            "sizes": dataclasses.asdict(sizes),
            "misfits": misfits,
            "minutes": self.minutes,
            "workers": self.workers,
            "confirmation": summary,
        }

    def _first_stage(self, proposers: Sequence[Proposer], sizes: Sizes) -> dict[str, dict[Configuration, float | None]]:
        """All trials at the shortest budget, in two waves, so that the second knows what came of the first."""
        more = sizes.trials - 1
        waves = [more] if more < 4 else [more // 2, more - more // 2]
        values: dict[str, dict[Configuration, float | None]] = {}
        for wave in waves:
            for proposer in proposers:
                proposer.propose(wave)
            values = self._stage(0, {p.family.name: p.trials for p in proposers})
            for proposer in proposers:
                proposer.tell(values[proposer.family.name])
        return values

    def _stage(
        self, at: int, tried: Mapping[str, Sequence[Configuration]]
    ) -> dict[str, dict[Configuration, float | None]]:
        """Do the runs of a stage: validation of every trial."""
        budget = dataclasses.replace(
            self.base.budget,
            epochs=self.stages[at],
            warmup_epochs=self.base.budget.warmup_epochs * self.stages[at] / self.stages[-1],
        )
        rates = sorted({lr for pairs in tried.values() for _, lr in pairs})
        plan = dataclasses.replace(
            self.base,
            title=f"Exploration, {self.stages[at]} epochs",
            keep="none",
            budget=budget,
            lr=tuple(rates),
            recipes=tuple(row_of(name, pairs) for name, pairs in tried.items()),
        )
        plan = Plan.from_dict(plan.to_dict())  # as it will be read from its folder
        folder = self.folder / f"explore-{at + 1}"
        study = self._opened(folder, plan)
        if study.missing():
            work(study, workers=self.given_workers, view=self.view, executor=self.executor)
        results = study.results()
        values: dict[str, dict[Configuration, float | None]] = {}
        for name, pairs in tried.items():
            keys = {pair: study.key(self.base_spec(plan, pair)) for pair in pairs}
            there = {pair: results[key] for pair, key in keys.items() if key in results}
            values[name] = {pair: validation_of(there[pair]) if pair in there else None for pair in pairs}
            for pair, result in there.items():
                self.seconds[at, name, pair] = float(result.get("timing", {}).get("seconds") or 0.0)
        return values

    def _opened(self, folder: Path, plan: Plan) -> Study:
        """The stage's study; a plan that has grown further already, by another process or before, stays."""
        if (folder / "plan.yaml").exists():
            held = Study(folder, root=self.root, engine=self.engine)
            if set(plan.runs()) <= set(held.plan.runs()):
                return held
        return Study(folder, plan, self.root, engine=self.engine)

    def base_spec(self, plan: Plan, pair: Configuration) -> RunSpec:
        """The run of one trial."""
        return plan.spec(*pair, EXPLORED_SEED, self.engine.open_task(plan.task, self.root).name)

    @property
    def budget(self) -> float:
        """The seconds of all workers in which runs go on."""
        return 60 * self.minutes * self.workers * OVERHEAD

    def _sizes(self, found: Sequence[Family], seconds: float) -> Sizes:
        """How many trials and seeds fit into the time, by what the first trials of all recipes took together."""
        short, whole = self.stages[0], self.stages[-1]
        epoch = seconds / short  # of all recipes, one after another
        one = epoch * whole / len(found)  # a whole run

        def exploring(trials: int) -> float:
            return sum(n * epoch * e for n, e in zip(kept(trials, len(self.stages)), self.stages, strict=True))

        fitting_ = [n for n in range(FEWEST, MOST + 1) if exploring(n) <= EXPLORING * self.budget]
        trials = max(fitting_, default=FEWEST)
        confirmed = min(CONFIRMED, len(found) - 1)
        left = self.budget - exploring(trials)
        if left < FEWEST_SEEDS * (confirmed + 1) * one:
            confirmed = min(2, confirmed)
        seeds = seeds_within(left, (confirmed + 1) * one)
        total = (exploring(trials) + seeds * (confirmed + 1) * one) / (OVERHEAD * self.workers)
        return Sizes(trials, confirmed, seeds, total / 60)

    def _with_what_is_left(self, sizes: Sizes, names: Sequence[str]) -> Sizes:
        """The seeds that fit after exploration, by what whole runs of these recipes took.

        First trials pay for what is done once on a machine, so that less time seems to be left than is.
        """
        last = len(self.stages) - 1
        row = 0.0  # of one seed, none included
        for name in ["none", *names]:
            whole = [took for (at, family, _), took in self.seconds.items() if (at, family) == (last, name)]
            row += sum(whole) / len(whole) if whole else 0.0
        spent = sum(self.seconds.values())
        seeds = seeds_within(self.budget - spent, row)
        total = (spent + seeds * row) / (OVERHEAD * self.workers)
        return dataclasses.replace(sizes, seeds=seeds, minutes=total / 60)

    def _confirm(self, chosen: Mapping[str, Configuration], sizes: Sizes, command: str) -> dict[str, Any]:
        first = min(sizes.seeds, 5 if sizes.seeds >= 8 else sizes.seeds if sizes.seeds <= 4 else 3)
        rows = tuple(row_of(name, [pair]) for name, pair in chosen.items())
        plan = dataclasses.replace(
            self.base,
            title=f"Confirmation on fresh seeds: {self.base.task} · {self.base.model}",
            recipes=rows,
            lr=tuple(sorted({lr for _, lr in chosen.values()})),
            seeds=tuple(range(EXPLORED_SEED + 1, EXPLORED_SEED + 1 + first)),
            until="decided" if sizes.seeds > first else None,
            max_seeds=sizes.seeds if sizes.seeds > first else None,
        )
        names = ", ".join(name for name in chosen if name != "none")
        most = f"up to {sizes.seeds}" if sizes.seeds > first else f"{sizes.seeds}"
        self.view.note(f"confirming {names} on {most} fresh seeds: about {sizes.minutes:.1f} minutes in all")
        return compare(
            Plan.from_dict(plan.to_dict()),
            self.folder / "confirm",
            workers=self.given_workers,
            executor=self.executor,
            root=self.root,
            view=self.view,
            command=command,
            engine=self.engine,
        )

    def _trials_of(
        self,
        family: Family,
        stages: Sequence[Mapping[str, Mapping[Configuration, float | None]]],
        best: Mapping[str, Configuration],
        confirmed: Sequence[str],
    ) -> dict[str, Any]:
        """What was tried of one recipe, and what came of it."""
        trials = [
            {"recipe": pair[0], "lr": pair[1], "validation": [values[family.name].get(pair) for values in stages]}
            for pair in stages[0][family.name]
        ]
        known = [value for value in stages[0][family.name].values() if value is not None]
        chosen = best[family.name]
        return {
            "name": family.name,
            "trials": trials,
            "best": {"recipe": chosen[0], "lr": chosen[1], "validation": stages[-1][family.name][chosen]},
            "expected_best": expected_best(known) if known else [],
            "confirmed": family.name in confirmed or family.name == "none",
        }


def seeds_within(seconds: float, row: float) -> int:
    """How many seeds fit, of which each takes `row` seconds."""
    fitting_ = math.floor(seconds / row) if row > 0 else FEWEST_SEEDS
    return min(MOST_SEEDS, max(FEWEST_SEEDS, fitting_))


def best_of_names(reached: Mapping[str, float | None]) -> list[str]:
    """The highest validation first, those without any last."""
    return sorted(reached, key=lambda name: -math.inf if reached[name] is None else reached[name], reverse=True)  # type: ignore[arg-type,return-value]


def answer(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What to use: the best recipe that was confirmed to be better, or none."""
    rows = list(summary["recipes"])
    none = next(row for row in rows if row["recipe"] == "none")
    better = [row for row in rows if row["decision"] and row["decision"]["answer"] == "better"]
    open_ = [row for row in rows if row["decision"] and row["decision"]["answer"] == "undecided"]
    open_ = [row for row in open_ if row["difference"]["mean"] > 0]
    best = max(better, key=lambda row: row["difference"]["mean"], default=none)
    reached = [value for value in none["test"] if value is not None]
    verdict = (best["decision"] or {}).get("answer", "baseline")
    if best is not none:
        text = (
            f"Use {best['recipe']} with a learning rate of {best['lr']:g}: better than none, each at its best settings."
        )
    elif none["diverged"] and none["diverged"] >= len(reached):
        verdict = DIVERGED
        text = (
            f"No answer: every run of none diverged, with a learning rate of {none['lr']:g}. Try a smaller one, and "
            "see that data and model give numbers."
        )
    elif open_:
        likely = max(open_, key=lambda row: row["difference"]["mean"])
        text = (
            f"Use none with a learning rate of {none['lr']:g}: nothing was confirmed to be better in this time. Most "
            f"likely to be is {likely['recipe']}, lr {likely['lr']:g}; more minutes would tell."
        )
    else:
        alike = any(row["decision"]["answer"] == "equivalent" for row in rows if row["decision"])
        why = "nothing is better than it by what matters" if alike else "nothing scores higher than it on fresh seeds"
        text = f"Use none with a learning rate of {none['lr']:g}: {why}."
    return {
        "recipe": best["recipe"],
        "lr": best["lr"],
        "verdict": verdict,
        "difference": best["difference"],
        "cost": best["cost"],
        "text": text,
    }


def _workers_here(executor: Executor | None) -> int:
    """About how many runs go on side by side on this machine, or on the cluster's machines like it."""
    import torch

    per_gpu = getattr(executor, "per_gpu", None) or 1
    return torch.cuda.device_count() * per_gpu if torch.cuda.is_available() else cores()
