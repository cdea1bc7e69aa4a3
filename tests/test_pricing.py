"""What a difference costs to see: seeds from a pilot's spread, time from a probe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from attemper.errors import ParameterError
from attemper.lab.errors import StudyError
from attemper.lab.study.estimate import estimate
from attemper.lab.study.plan import Plan
from attemper.lab.study.power import chance_of_decision, smallest_difference
from attemper.lab.study.pricing import Spread, known_spread, price_of, spread_of
from attemper.lab.study.probing import Measured, Probe, Sizes
from attemper.lab.study.summary_files import read_summary
from study_fakes import make_plan
from test_summary import study_with

RESULTS = Path(__file__).parents[1] / "docs/results"


def probe(plan: Plan) -> Probe:
    each = Measured(setup=1.0, batch=0.1, evaluation=0.0, keeping=0.0, saving=0.0, memory=None)
    sizes = Sizes(batches=10, batch_size=64, validation=1, measured=1, test=1)
    recipes = {entry.configurations[0]: each for entry in plan.recipes}
    return Probe(start=0.0, sizes=sizes, recipes=recipes, resident=0, workers=2, device="an example")


def test_so_many_seeds_find_the_difference_after_correction() -> None:
    plan = make_plan(seeds=3)
    price = price_of(plan, probe(plan), Spread(0.01, "a pilot"), 0.01)
    assert price.seeds is not None
    assert price.comparisons == 2
    assert (
        chance_of_decision(price.seeds, 0.01, 0.01, 0.025)
        >= 0.8
        > chance_of_decision(price.seeds - 1, 0.01, 0.01, 0.025)
    )
    assert price.seen is not None
    assert chance_of_decision(3, price.seen, 0.01, 0.025) == pytest.approx(0.8, abs=1e-3)
    twice = price_of(plan, probe(plan), Spread(0.02, "a pilot"), 0.01)
    assert twice.seeds is not None
    assert 3 < twice.seeds / price.seeds < 4.1
    assert twice.seconds is not None
    assert price.seconds is not None
    assert twice.seconds / price.seconds == pytest.approx(twice.seeds / price.seeds, rel=0.05)
    assert f"{price.seeds} seeds" in "\n".join(price.lines())
    assert "more than 1,000 seeds" in "\n".join(price_of(plan, probe(plan), Spread(0.5, ""), 0.001).lines())


def test_a_plan_that_goes_on_until_decided_sees_what_all_its_seeds_see() -> None:
    fixed = make_plan(seeds=3)
    growing = dataclasses.replace(fixed, until="decided", max_seeds=12)
    price = price_of(growing, probe(growing), Spread(0.01, "a pilot"), 0.01)
    assert price.seen == pytest.approx(smallest_difference(12, 0.01, 0.025))
    assert "the plan's at most 12 seeds see" in price.lines()[-1]
    assert price.seeds == price_of(fixed, probe(fixed), Spread(0.01, "a pilot"), 0.01).seeds
    found = estimate(growing, probe(growing))
    assert found.at_most is not None
    assert found.at_most.seconds == pytest.approx(estimate(make_plan(seeds=12), probe(fixed)).here.seconds)
    assert estimate(fixed, probe(fixed)).at_most is None


def test_a_pilot_shows_the_pooled_deviation_of_its_differences(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(0.8, 0.01, (3, 5))
    names = {"none": 0, "dropkey(0.1)": 1, "cb(cb)": 2}
    study_with(tmp_path, make_plan(seeds=5), lambda spec: (0.5, float(values[names[spec.recipe], spec.seed])))
    expected = np.sqrt(np.mean([np.var(values[at] - values[0], ddof=1) for at in (1, 2)]))
    assert spread_of(tmp_path).deviation == pytest.approx(float(expected))


@pytest.mark.parametrize(("task", "page"), [("cifar10", "cifar10"), ("mel:x.npz", "gtzan"), ("actions:x", "thumos14")])
def test_what_is_known_of_a_task_is_what_its_page_shows(task: str, page: str) -> None:
    assert known_spread(task).deviation == pytest.approx(spread_of(RESULTS / f"{page}.html").deviation, rel=0.01)


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="run a pilot"):
        known_spread("folder:photos")
    study_with(tmp_path, make_plan(seeds=1), lambda spec: (0.5, 0.5))
    with pytest.raises(StudyError, match="shows no spread"):
        spread_of(tmp_path)


def test_a_page_tells_its_study_again_and_other_files_do_not(tmp_path: Path) -> None:
    summary = read_summary(RESULTS / "gtzan.html")
    assert summary["same"] == {"dropkey(0.2)": "dropattention(0.2)"}
    assert summary["verdict"].startswith("Undecided after 5 seeds")
    assert {row["name"]: row["decision"] and row["decision"]["more"] for row in summary["recipes"]}["dropkey(0.2)"] == 6
    for name, text in {
        "a.html": "<html>",
        "b.json": "{}",
        "c.json": "[",
        "d.html": '<script type="application/json" id="summary">{"title": 1}</script>',
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(StudyError, match=name):
            read_summary(tmp_path / name)
    with pytest.raises(StudyError, match="holds no study"):
        read_summary(tmp_path / "nothing")
