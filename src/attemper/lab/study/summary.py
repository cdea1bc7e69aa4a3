"""The summary of a study: everything that the table and the report show, as plain data."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from attemper.lab.evaluation.key_figures import over_seeds
from attemper.lab.study.assessment import assess
from attemper.lab.study.costs import cost_problem, read_costs
from attemper.lab.study.export import how
from attemper.lab.study.notices import notices, row_versions
from attemper.lab.study.plan import Plan
from attemper.lab.study.plan_rows import Entry
from attemper.lab.study.reference import compared_cell, reference_for_readers
from attemper.lab.study.selection import Choice, choose, validation_of
from attemper.lab.study.statistics import CONFIDENCE, deviation, mean
from attemper.lab.study.store import Result
from attemper.lab.study.study import Study

Summary = dict[str, Any]
METRIC = "accuracy"


def summarise(study: Study, *, command: str = "attemper compare") -> Summary:
    """Choose configurations, compare them on the test set and say what was found, from whatever results are there.

    command: how this study was started, for the report.
    """
    plan, results = study.plan, study.results()
    rows = [_row(study, entry, results) for entry in plan.recipes]
    missing, failed = len(study.runs) - len(results), study.failed()
    summary = {
        "title": plan.title or f"{plan.task} · {plan.model}",
        "metric": next((result["metric"] for result in results.values()), METRIC),
        **_learning(results),
        "plan": plan.to_dict(),
        "versions": _versions(results),
        "command": command,
        "complete": not missing,
        "missing": missing,
        "failed": len(failed),
        "confidence": CONFIDENCE,
        "notes": [
            *plan.notes,
            *_data_notes(results),
            *_cost_notes(study),
            *(_failure_note(study, key) for key in failed),
            *notices(study, results.values()),
        ],
        "recipes": rows,
    }
    if plan.reference is not None:
        summary["reference"] = reference_for_readers(plan.reference, plan.task)
    if plan.published:
        _put_beside(rows, plan)
    found = assess(summary)
    return {**found, "reading": how(found)}


def _row(study: Study, entry: Entry, results: dict[str, Result]) -> dict[str, Any]:
    """One recipe: its configurations, the chosen one, and what that reached on every seed."""
    seeds, keys = study.plan.seeds, study.keys_of(entry)
    choice = choose(
        {
            configuration: {
                seed: validation_of(results[key]) for seed, key in zip(seeds, of, strict=True) if key in results
            }
            for configuration, of in keys.items()
        },
        seeds,
    )
    added = study.more_of(entry)
    every = {key for of in keys.values() for key in of} | set(added)
    runs = [results.get(key) for key in [*keys[choice.chosen], *added]] if choice.chosen else []
    seeds = study.plan.every_seed
    runs += [None] * (len(seeds) - len(runs))
    test = [_metric(run, "test") for run in runs]
    there = [run for run in runs if run is not None]
    values = [value for value in test if value is not None]
    recipe, lr = choice.chosen or (entry.recipe, None)
    evaluated = bool(study.plan.evaluate)
    row = {
        "name": entry.name,
        "recipe": recipe,
        "lr": lr,
        "configurations": _configurations(choice),
        "seeds": list(seeds),
        "test": test,
        "validation": [_metric(run, "validation") for run in runs],
        "train": [_metric(run, "train") for run in runs],
        "mean": mean(values),
        "deviation": deviation(values),
        "difference": None,
        "rank": None,
        "diverged": sum(run["status"] == "diverged" for run in there),
        "missing": sum(key not in results for key in every),
        "parameters": there[0].get("parameters") if there else None,
        "flops": there[0].get("flops") if there else None,
        "cost": read_costs(study).get(recipe),
        "chosen_epochs": [run.get("chosen_epoch") if run is not None else None for run in runs],
        "epochs": [_last_epoch(run) if run is not None else None for run in runs],
        "right": [_right(run) for run in runs],
        "curves": [run["curve"] if run is not None else [] for run in runs],
        "probes": [run.get("probes", []) if run is not None else [] for run in runs],
        "rates": there[0].get("rates", []) if there else [],
        "published": _published(study.plan, entry),
        "versions": row_versions(results[key] for key in sorted(every) if key in results),
    }
    if evaluated:
        row["evaluation"] = over_seeds([run and run.get("evaluation") for run in runs])
    if others := _others(there):
        row["others"] = others
    details = details_over_seeds(there)
    return row if details is None else {**row, "details": details}


def _others(runs: Sequence[Result]) -> dict[str, dict[str, float | None]]:
    """The task's other metrics on the test set: mean and deviation over the seeds that have them."""
    names = dict.fromkeys(name for run in runs for name in run["test"] if name not in (run["metric"], "loss"))
    values = {name: [value for run in runs if (value := run["test"].get(name)) is not None] for name in names}
    return {name: {"mean": mean(of), "deviation": deviation(of)} for name, of in values.items() if of}


def _configurations(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "recipe": recipe,
            "lr": lr,
            "validation": value,
            "runs": choice.runs[recipe, lr],
            "chosen": (recipe, lr) == choice.chosen,
        }
        for (recipe, lr), value in choice.means.items()
    ]


def _metric(run: Result | None, part: str) -> float | None:
    return None if run is None else run[part][run["metric"]]


def _last_epoch(run: Result) -> int | None:
    return run["curve"][-1]["epoch"] if run["curve"] else None


def _right(run: Result | None) -> str | None:
    """Which test samples the run got right, as its result packs them."""
    found: str | None = (run or {}).get("test_details", {}).get("right")
    return found


def details_over_seeds(runs: Sequence[Result]) -> dict[str, Any] | None:
    """What several seeds say beyond their metrics; None where no run says anything, as those of older versions.

    Confusion matrices are added up, metrics by class are averaged, and pictures are those of the first seed.
    """
    found = [run["test_details"] for run in runs if run.get("test_details")]
    if not found:
        return None
    details: dict[str, Any] = {"runs": len(found)}
    matrices = [one["confusion"] for one in found if "confusion" in one]
    if len(matrices) == len(found):
        confusion = [[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
        details |= {"classes": found[0]["classes"], "confusion": confusion}
    tables = [one["table"] for one in found if "table" in one]
    if len(tables) == len(found):
        rows = zip(*(table["rows"] for table in tables), strict=True)
        details["table"] = {**tables[0], "rows": [_mean_row(row) for row in rows]}
    return details | {name: found[0][name] for name in ("items", "pictures") if name in found[0]}


def _mean_row(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One class under several seeds."""
    return {**rows[0], "value": mean([row["value"] for row in rows if row["value"] is not None])}


def _published(plan: Plan, entry: Entry) -> dict[str, Any] | None:
    rows = [row for row in plan.published if row.name == entry.name and not row.metric]
    return {"value": rows[0].value, "deviation": rows[0].deviation, "source": rows[0].source} if rows else None


def _put_beside(rows: list[dict[str, Any]], plan: Plan) -> None:
    """Give every row its published cells, column by column, with what it came to itself."""
    baseline = next(row for row in rows if row["name"] == plan.baseline.name)
    for row in rows:
        cells = [asdict(each) for each in plan.published if each.name == row["name"]]
        row["beside"] = [compared_cell(cell, row, baseline, plan.reference) for cell in cells]


def _versions(results: dict[str, Result]) -> dict[str, str]:
    """What the runs were made with; where machines differ, all of it."""
    seen: dict[str, dict[str, None]] = defaultdict(dict)
    for result in results.values():
        for name, value in result.get("versions", {}).items():
            seen[name][str(value)] = None
    return {name: ", ".join(values) for name, values in seen.items()}


def _learning(results: dict[str, Result]) -> dict[str, str]:
    """What the share of training batches that is right is called, where it is no accuracy."""
    found = next((result["learning"] for result in results.values() if "learning" in result), None)
    return {} if found is None else {"learning": str(found)}


def _data_notes(results: dict[str, Result]) -> list[str]:
    """What the runs say about their data, each thing once."""
    return list(dict.fromkeys(note for result in results.values() for note in result.get("notes", ())))


def _cost_notes(study: Study) -> list[str]:
    problem = cost_problem(study)
    return [] if problem is None else [problem]


def _failure_note(study: Study, key: str) -> str:
    attempts = study.store.failures(key)
    return f"{study.describe(key)} was given up after {len(attempts)} attempts: {attempts[-1]['error']}"
