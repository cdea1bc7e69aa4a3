"""Summaries: the configuration is chosen on validation alone, and the tables say what was found."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attemper.lab.study.comparison import compare
from attemper.lab.study.costs import measure_costs, read_costs
from attemper.lab.study.export import to_csv, to_markdown
from attemper.lab.study.live import LiveView, PlainView, make_view, status_table, summary_table
from attemper.lab.study.plan import Plan
from attemper.lab.study.selection import choose
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study
from attemper.lab.study.summary import _others, summarise
from attemper.lab.training.spec import RunSpec
from study_fakes import FakeEngine, make_plan, make_result

Accuracies = Callable[[RunSpec], tuple[float | None, float | None] | None]
"""Of a run: validation and test, or None for a run that is missing."""


def study_with(folder: Path, plan: Plan, accuracies: Accuracies, **changes: Any) -> Study:
    study = Study(folder, plan, engine=FakeEngine())
    study.prepare()
    for key, spec in study.runs.items():
        found = accuracies(spec)
        if found is not None:
            parts = {"validation": {"accuracy": found[0]}, "test": {"accuracy": found[1]}}
            study.store.save(key, make_result(spec, **parts, **changes))
    return study


GRID = {"name": "dropkey", "recipe": "dropkey({0.1, 0.2, 0.3})"}


def rows_of(summary: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in summary["recipes"]}


def test_choosing_on_test_would_give_another_answer(tmp_path: Path) -> None:
    """The leak: 0.3 is by far the best on test and the worst on validation, for every learning rate."""
    validation = {0.1: 0.70, 0.2: 0.80, 0.3: 0.60}
    test = {0.1: 0.75, 0.2: 0.65, 0.3: 0.99}

    def accuracies(spec: RunSpec) -> tuple[float, float]:
        if spec.recipe == "none":
            return (0.7, 0.7) if spec.budget.lr == 1e-3 else (0.6, 0.9)
        rate = float(spec.recipe[8:-1])
        return validation[rate] + spec.budget.lr, test[rate]

    study = study_with(tmp_path, make_plan(["none", GRID], lr=[1e-3, 5e-4]), accuracies)
    rows = rows_of(summarise(study))
    assert (rows["dropkey"]["recipe"], rows["dropkey"]["lr"]) == ("dropkey(0.2)", 1e-3)
    assert rows["dropkey"]["test"] == [0.65] * 3
    assert (rows["none"]["lr"], rows["none"]["mean"]) == (1e-3, pytest.approx(0.7))
    assert rows["dropkey"]["difference"]["mean"] == pytest.approx(-0.05)
    chosen = [found["recipe"] for found in rows["dropkey"]["configurations"] if found["chosen"]]
    assert chosen == ["dropkey(0.2)"]
    assert len(rows["dropkey"]["configurations"]) == 6


def test_what_is_chosen_does_not_depend_on_test_at_all(tmp_path: Path) -> None:
    plan = make_plan(["none", GRID], lr=[1e-3, 5e-4])

    def chosen(folder: str, test: Callable[[RunSpec], float]) -> list[Any]:
        study = study_with(tmp_path / folder, plan, lambda spec: (hash_of(spec), test(spec)))
        return [(row["recipe"], row["lr"]) for row in summarise(study)["recipes"]]

    def hash_of(spec: RunSpec) -> float:
        return int(spec.key("")[:6], 16) / 16**6

    assert chosen("a", hash_of) == chosen("b", lambda spec: 1 - hash_of(spec)) == chosen("c", lambda spec: 0.5)


def test_of_equal_configurations_the_first_is_chosen(tmp_path: Path) -> None:
    study = study_with(tmp_path, make_plan(["none", GRID]), lambda spec: (0.5, 0.5))
    assert rows_of(summarise(study))["dropkey"]["recipe"] == "dropkey(0.1)"
    assert choose({("a", 1.0): {0: 0.1, 1: 0.2, 2: 0.3}, ("b", 1.0): {0: 0.3, 1: 0.2, 2: 0.1}}, [0, 1, 2]).chosen == (
        "a",
        1.0,
    )


def test_nothing_is_chosen_before_all_configurations_are_complete(tmp_path: Path) -> None:
    def accuracies(spec: RunSpec) -> tuple[float, float] | None:
        return None if (spec.recipe, spec.seed) == ("dropkey(0.3)", 2) else (0.5, 0.5)

    summary = summarise(study_with(tmp_path, make_plan(["none", GRID]), accuracies))
    row = rows_of(summary)["dropkey"]
    assert (row["lr"], row["mean"], row["difference"], row["missing"]) == (None, None, None, 1)
    assert row["test"] == [None] * 3
    assert not any(found["chosen"] for found in row["configurations"])
    assert not summary["complete"]
    assert summary["verdict"].startswith("Not complete: 1 run is missing")


def test_a_recipe_without_a_grid_shows_the_seeds_that_it_has(tmp_path: Path) -> None:
    def accuracies(spec: RunSpec) -> tuple[float, float] | None:
        return None if (spec.recipe, spec.seed) == ("cb(cb)", 1) else (0.5, 0.5 + spec.seed / 10)

    row = rows_of(summarise(study_with(tmp_path, make_plan(["none", "cb"]), accuracies)))["cb"]
    assert row["test"] == [0.5, None, 0.7]
    assert row["mean"] == pytest.approx(0.6)
    assert row["difference"]["seeds"] == 2


def test_a_diverged_configuration_loses_against_one_that_is_not(tmp_path: Path) -> None:
    def accuracies(spec: RunSpec) -> tuple[float | None, float | None]:
        return (None, None) if spec.recipe == "dropkey(0.1)" and spec.seed == 0 else (0.5, 0.5)

    study = study_with(tmp_path, make_plan(["none", GRID]), accuracies, status="diverged")
    row = rows_of(summarise(study))["dropkey"]
    assert row["recipe"] == "dropkey(0.2)"
    assert row["configurations"][0]["validation"] is None
    assert row["diverged"] == 3


def example(folder: Path) -> Study:
    gains = {"none": 0.0, "cb(cb)": 0.05, "dropkey(0.1, schedule=[0.1, 0.2])": 0.001}
    published = [{"name": "a | b", "value": 85.2, "deviation": 0.7, "source": "a paper"}]
    plan = make_plan(
        ["none", {"name": "a | b", "recipe": "cb"}, "dropkey(0.1, schedule=[0.1, 0.2])"], seeds=5, published=published
    )
    return study_with(
        folder,
        plan,
        lambda spec: (0.5, 0.8 + gains[spec.recipe] + 0.01 * math.sin(spec.seed + 10 * gains[spec.recipe])),
    )


def test_a_summary_is_plain_json_with_everything_the_report_needs(tmp_path: Path) -> None:
    study = example(tmp_path)
    measure_costs(study, ["none", "cb(cb)"])
    summary = summarise(study, command="attemper compare plan.yaml")
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    keys = {"margin", "same", "cautions", "reading", "missing", "failed"}
    keys |= {"title", "metric", "verdict", "plan", "versions", "command", "complete", "confidence", "notes", "recipes"}
    assert set(summary) == keys
    row = rows_of(summary)["a | b"]
    fields = "name recipe lr configurations seeds test validation train mean deviation difference rank diverged missing"
    assert set(row) == set(
        f"{fields} parameters flops cost decision sample chosen_epochs epochs curves probes rates "
        "published beside versions".split()
    )
    assert row["difference"]["adjusted"] < 0.05
    assert row["rank"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert row["cost"]["ratio"] == 1.5
    assert row["published"] == {"value": 85.2, "deviation": 0.7, "source": "a paper"}
    assert rows_of(summary)["none"]["difference"] is None
    assert summary["verdict"].startswith("a | b is better than the baseline `none` by +4.")
    assert Plan.from_dict(summary["plan"]) == study.plan


def test_csv_has_one_line_per_recipe_and_numbers_in_full(tmp_path: Path) -> None:
    summary = summarise(example(tmp_path))
    lines = list(csv.DictReader(io.StringIO(to_csv(summary))))
    assert [line["name"] for line in lines] == ["none", "a | b", "dropkey(0.1, schedule=[0.1, 0.2])"]
    assert float(lines[1]["mean"]) == summary["recipes"][1]["mean"]
    assert [float(lines[1][f"test_seed_{seed}"]) for seed in range(5)] == summary["recipes"][1]["test"]
    assert lines[0]["difference"] == ""


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-2+3", "@SUM(A1)"])
def test_no_cell_of_the_csv_is_a_formula(name: str, tmp_path: Path) -> None:
    plan = make_plan(["none", {"name": name, "recipe": "cb"}], seeds=1)
    study = Study(tmp_path, plan, engine=FakeEngine())
    for key, spec in study.runs.items():
        parts = {part: {"accuracy": value} for part, value in (("test", 0.5 if spec.recipe == "none" else 0.4),)}
        study.store.save(key, make_result(spec, **parts))
    lines = list(csv.reader(io.StringIO(to_csv(summarise(study)))))
    assert lines[2][0] == f"'{name}"
    assert float(lines[2][lines[0].index("difference")]) == pytest.approx(-0.1), "numbers stay numbers"
    assert not any(cell.startswith(tuple("=+@")) for line in lines for cell in line)


def test_markdown_is_one_table_that_names_cannot_break(tmp_path: Path) -> None:
    text = to_markdown(summarise(example(tmp_path)))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert all(line.replace("\\|", "").count("|") == 11 for line in table)
    assert "| a \\| b | " in text
    assert "| 85.20 ± 0.70 |" in text


def test_costs_are_measured_once_and_only_what_is_new(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine(tmp_path / "log"))
    study.prepare()
    for recipes in (["none", "cb(cb)"], ["none", "cb(cb)"], ["none", "cb(cb)", "blur(1.0)"]):
        measure_costs(study, recipes)
    assert (tmp_path / "log").read_text().splitlines() == ["costs none cb(cb)", "costs none blur(1.0)"]
    assert set(read_costs(study)) == {"none", "cb(cb)", "blur(1.0)"}
    assert {"machine", "date"} <= set(json.loads((tmp_path / "cost.json").read_text()))
    (tmp_path / "cost.json").write_text("{")
    assert read_costs(study) == {}


def test_a_finished_study_compares_again_without_a_worker(tmp_path: Path) -> None:
    study = example(tmp_path)
    summary = compare(study.plan, tmp_path, engine=FakeEngine(), command="again")
    assert summary["complete"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (tmp_path / "summary.csv").read_text() == to_csv(summary)
    assert (tmp_path / "summary.md").read_text() == to_markdown(summary)


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(["none", "dropkey(0.1, schedule=[0.1, 0.2])"], seeds=2), engine=FakeEngine())
    study.prepare()
    text = io.StringIO()
    view = make_view(Console(file=text))
    assert isinstance(view, PlainView)
    view.note("[bold] is not markup")
    view.show(status_of(study))
    study.work()
    view.show(status_of(study))
    view.close()
    lines = text.getvalue().splitlines()
    assert lines[0] == "[bold] is not markup"
    assert lines[2].startswith("4/4 · dropkey(0.1, schedule=[0.1, 0.2]) 2/2 · validation ")
    assert "\x1b" not in text.getvalue()


def test_on_a_terminal_one_table_shows_bars_and_who_is_at_work(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(["none", "dropkey(0.1, schedule=[0.1, 0.2])"], seeds=2), engine=FakeEngine())
    study.prepare()
    claim = study.claim()
    assert claim is not None
    text = io.StringIO()
    view = make_view(Console(file=text, force_terminal=True, width=120, _environ={"TERM": "xterm"}))
    assert isinstance(view, LiveView)
    view.show(status_of(study))
    view.close()
    claim.release()
    assert "dropkey(0.1, schedule=[0.1, 0.2])" in text.getvalue()
    assert "━" in text.getvalue()
    assert "none, seed 0: 0 %" in text.getvalue()
    assert "0 of 4 runs done, 1 running" in text.getvalue()


def test_the_final_table_shows_names_as_they_are(tmp_path: Path) -> None:
    study = example(tmp_path)
    text = io.StringIO()
    console = Console(file=text, width=160)
    console.print(summary_table(summarise(study)))
    console.print(status_table(status_of(study)))
    assert "dropkey(0.1, schedule=[0.1, 0.2])" in text.getvalue()
    assert "\na | b " in text.getvalue()
    assert "85.20 ± 0.70" in text.getvalue()
    assert "15 of 15 runs done" in text.getvalue()


def test_other_metrics_of_the_task_are_told_over_the_seeds_that_have_them() -> None:
    runs = [
        {"metric": "AP", "test": {"AP": 0.4, "AP50": 0.6, "AP small": None, "AP large": None, "loss": 1.0}},
        {"metric": "AP", "test": {"AP": 0.5, "AP50": 0.8, "AP small": 0.2, "AP large": None, "loss": 1.0}},
    ]
    found = _others(runs)
    assert list(found) == ["AP50", "AP small"], "not the metric itself, the loss, or what no seed has"
    assert found["AP50"] == {"mean": pytest.approx(0.7), "deviation": pytest.approx(math.sqrt(0.02))}
    assert found["AP small"]["mean"] == 0.2
    assert _others([{"metric": "accuracy", "test": {"accuracy": 0.9, "loss": 1.0}}]) == {}
