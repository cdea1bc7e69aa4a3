"""Seeds until decided: recipes stop when they are, a study can be stopped and goes on, and looking stays honest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attemper.lab.errors import PlanError
from attemper.lab.study.assessment import assess
from attemper.lab.study.comparison import compare
from attemper.lab.study.held_plan import read_held_plan
from attemper.lab.study.looks import schedule
from attemper.lab.study.plan import Plan
from attemper.lab.study.planfile import dump_plan, load_plan
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise
from attemper.lab.study.until import going_on, longer_plan, what_is_added
from attemper.lab.training.spec import RunSpec
from study_fakes import FakeEngine, make_plan, make_result

EFFECTS = {"none": 0.0, "dropkey(0.1)": 0.05, "cb(cb)": 0.0, "blur(1.0)": 0.004}


def accuracy(spec: RunSpec, spread: float = 0.01) -> float:
    rng = np.random.default_rng([spec.seed, sum(map(ord, spec.recipe))])
    return float(0.7 + 0.02 * np.sin(spec.seed) + EFFECTS[spec.recipe] + rng.normal(0, spread))


def finished(folder: Path, plan: Plan) -> Study:
    """A study with a result for every run of the plan."""
    study = Study(folder, plan, engine=FakeEngine())
    study.prepare()
    for key in study.missing():
        spec = study.runs[key]
        value = accuracy(spec)
        study.store.save(key, make_result(spec, validation={"accuracy": value}, test={"accuracy": value}))
    return study


def plan_until(most: int = 20, **more: Any) -> Plan:
    return make_plan(["none", "dropkey(0.1)", "cb", "blur"], seeds=3, until="decided", max_seeds=most, **more)


def test_a_clear_recipe_stops_early_and_the_others_go_on_to_the_end(tmp_path: Path) -> None:
    plan, looks = plan_until(margin=0.2), 0
    while True:
        study = finished(tmp_path, plan)
        longer = longer_plan(study)
        if longer is None:
            break
        assert "going on with" in what_is_added(longer)
        assert set(plan.runs()) < set(longer.runs())
        plan, looks = longer, looks + 1
    counts = {more.name: more.seeds for more in plan.more}
    assert looks == len(schedule(3, 20)) - 1
    assert counts["cb"] == counts["blur"] == counts["none"] == 20
    assert counts["dropkey(0.1)"] < 12
    rows = {row["name"]: row for row in summarise(study)["recipes"]}
    assert rows["dropkey(0.1)"]["decision"]["answer"] == "better"
    assert rows["dropkey(0.1)"]["difference"]["seeds"] == counts["dropkey(0.1)"]
    assert rows["dropkey(0.1)"]["missing"] == 0
    assert len(rows["dropkey(0.1)"]["test"]) == 20
    assert rows["cb"]["difference"]["seeds"] == 20


def test_a_study_that_was_stopped_goes_on_with_the_seeds_that_it_had_got(tmp_path: Path) -> None:
    plan = plan_until()
    longer = longer_plan(finished(tmp_path, plan))
    assert longer is not None
    finished(tmp_path, longer)
    held = read_held_plan(tmp_path)
    assert held is not None
    assert held.plan == longer
    assert going_on(plan, tmp_path) == longer
    assert going_on(dataclasses.replace(plan, margin=3.0), tmp_path) == dataclasses.replace(plan, margin=3.0)
    further = longer_plan(Study(tmp_path, engine=FakeEngine()))
    assert further is not None
    assert set(longer.runs()) < set(further.runs())


def test_more_seeds_are_for_the_chosen_configuration_alone(tmp_path: Path) -> None:
    grid = {"name": "dropkey", "recipe": "dropkey({0.1, 0.2})"}
    plan = make_plan(["none", grid], seeds=3, until="decided", max_seeds=10)
    EFFECTS["dropkey(0.2)"] = 0.001
    study = Study(tmp_path, plan, engine=FakeEngine())
    study.prepare()
    for key in study.missing():
        spec = study.runs[key]
        value = accuracy(spec)
        better = 0.9 if spec.recipe == "dropkey(0.2)" else 0.5
        study.store.save(key, make_result(spec, validation={"accuracy": better}, test={"accuracy": value}))
    longer = longer_plan(study)
    assert longer is not None
    added = [run for run in longer.runs() if run not in plan.runs()]
    assert {run.recipe for run in added} == {"none", "dropkey(0.2)"}


def test_the_plan_in_the_folder_is_read_back(tmp_path: Path) -> None:
    longer = longer_plan(finished(tmp_path / "study", plan_until()))
    assert longer is not None
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(longer))
    assert load_plan(path) == longer


MORE = {"name": "dropkey(0.1)", "recipe": "dropkey(0.1)", "lr": 1e-3, "seeds": 4}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"until": "sure"}, "until is 'sure'; it can be: decided"),
        ({"max_seeds": 10}, "max_seeds says nothing without until"),
        ({"until": "decided", "max_seeds": 3}, "more than the 3 seeds"),
        ({"until": "decided", "seeds": 1}, "at least two seeds"),
        ({"until": "decided", "more": [MORE | {"name": "x"}]}, "adds to no recipe"),
        ({"until": "decided", "more": [MORE | {"name": ["dropkey(0.1)"]}]}, "adds to no recipe"),
        ({"until": "decided", "more": [MORE | {"lr": -1}]}, "adds to no recipe"),
        ({"more": []}, "more is what a study"),
    ],
)
def test_what_makes_no_sense_is_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        make_plan(**said)


def test_compare_adds_seeds_by_itself(tmp_path: Path) -> None:
    """With real workers: the made-up engine gives every recipe equal results, which is equivalent at the first look."""
    plan = make_plan(["none", "dropkey(0.1)"], seeds=2, until="decided", max_seeds=3)
    summary = compare(plan, tmp_path, workers=1, engine=FakeEngine(), costs=False)
    assert summary["complete"]
    assert summary["recipes"][1]["decision"]["answer"] in ("equivalent", "undecided")


def simulated(effect: float, spread: float, rng: np.random.Generator, *, most: int = 40, recipes: int = 3) -> list[str]:
    """What `assess` says of a study that is looked at until it is decided."""
    values = np.clip(0.7 + rng.normal(0, 0.02, most) + rng.normal(0, spread, (recipes + 1, most)), 0, 1)
    values[1:] += effect
    counts = [5] * (recipes + 1)
    while True:
        seeds = list(range(max(counts)))
        rows = []
        for at, n in enumerate(counts):
            test: list[float | None] = [float(v) for v in values[at, :n]] + [None] * (len(seeds) - n)
            name = f"dropkey(0.{at})" if at else "none"
            known = [v for v in test if v is not None]
            base = {"name": name, "recipe": name, "lr": 1e-3, "seeds": seeds, "test": test, "diverged": 0}
            rows.append({**base, "train": test, "validation": test, "mean": sum(known) / len(known)})
        plan = {"seeds": [0, 1, 2, 3, 4], "until": "decided", "max_seeds": most}
        found = assess({"metric": "accuracy", "plan": plan, "recipes": rows})
        answers = [row["decision"]["answer"] for row in found["recipes"][1:]]
        todo = [at for at, answer in enumerate(answers, 1) if answer == "undecided" and counts[at] < most]
        if not todo:
            return answers
        for at in todo:
            counts[at] = next(n for n in schedule(5, most) if n > counts[at])
        counts[0] = max(counts)


@pytest.mark.slow
def test_2000_whole_studies_without_an_effect_find_one_in_at_most_6_of_100() -> None:
    """Through the same code as a study's: three recipes each, any of them called better, or better or worse."""
    rng = np.random.default_rng(7)
    answers = [simulated(0.0, 0.008, rng) for _ in range(2000)]
    better, different = (
        sum(any(a in names for a in each) for each in answers) / 2000 for names in (("better",), ("better", "worse"))
    )
    assert better <= different <= 0.06, (better, different)


@pytest.mark.slow
def test_2000_whole_studies_keep_the_power_of_one_look_at_all_seeds() -> None:
    """One recipe with an effect that 40 seeds find in about 80 of 100 studies."""
    from attemper.lab.study.power import chance_of_decision

    spread, effect = 0.02, 0.0129
    rng = np.random.default_rng(8)
    found = sum(simulated(effect, spread, rng, recipes=1) == ["better"] for _ in range(2000)) / 2000
    fixed = chance_of_decision(40, effect, spread * 2**0.5, 0.05)
    assert found >= fixed - 0.03 - 2 * (0.16 / 2000) ** 0.5, (found, fixed)
