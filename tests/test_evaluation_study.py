"""Evaluations in studies: what a plan asks for, every run measures, and the summary compares."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attemper.lab.cli.compare import Compare, folder_of
from attemper.lab.errors import PlanError
from attemper.lab.evaluation.key_figures import headline, over_seeds
from attemper.lab.report.study import render
from attemper.lab.study.comparison import DEFAULT_PLAN
from attemper.lab.study.evaluations import evaluation_table
from attemper.lab.study.export import to_csv, to_markdown
from attemper.lab.study.plan import Plan
from attemper.lab.study.store import problem_with
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise
from attemper.lab.training.digests import with_digest
from evaluated import ALL, made_up
from study_fakes import FakeEngine, make_plan, make_result


def test_over_seeds_figures_are_averaged_and_diagrams_pooled() -> None:
    found = over_seeds([made_up(0.8), None, made_up(0.9, 0.1)])
    assert found is not None
    by_name = {figure["name"]: figure for figure in found["figures"]}
    assert by_name["ECE"]["values"] == [0.1, None, pytest.approx(0.2)]
    assert by_name["ECE"]["mean"] == pytest.approx(0.15)
    assert by_name["ECE"]["deviation"] == pytest.approx(0.1 / 2**0.5)
    assert by_name["PGD 8/255"]["mean"] == pytest.approx(0.25)
    assert by_name["corrupted"]["mean"] == pytest.approx(0.6)
    assert found["accuracy"] == pytest.approx(0.85)
    assert found["bins"][0] == {
        "low": 0.0,
        "high": 0.5,
        "count": 20,
        "confidence": 0.4,
        "accuracy": pytest.approx(0.45),
    }
    assert found["bins"][1]["accuracy"] is None
    centre = found["robustness"]["occlusion"][0]
    assert (centre["low"], centre["accuracy"], centre["high"]) == (0.5, pytest.approx(0.55), 0.6)
    assert over_seeds([None, None]) is None


def test_the_headline_has_what_was_asked_for_and_nothing_else() -> None:
    names = [figure["name"] for figure in headline(made_up(0.8))]
    assert names == ["NLL", "Brier", "ECE", "gap", "occluded", "corrupted", "FGSM 8/255", "PGD 8/255"]
    assert headline({"accuracy": 0.8, "nll": 0.1}) == []


def test_corruptions_for_validation_are_not_in_the_mean() -> None:
    found = made_up(0.8)
    found["robustness"]["corruptions"] += [{"kind": "saturate", "severity": 1, "accuracy": 0.0, "nll": 9.0}]
    assert next(figure["value"] for figure in headline(found) if figure["name"] == "corrupted") == pytest.approx(0.6)
    found["robustness"]["corruptions"] = found["robustness"]["corruptions"][-1:]
    assert "corrupted" not in [figure["name"] for figure in headline(found)]


def test_results_with_corruptions_of_an_earlier_version_are_run_again() -> None:
    spec = make_plan(evaluate="robustness").runs()[0]
    key = spec.key("data")
    result = {**make_result(spec, "data"), "evaluation": made_up(0.8)}
    assert problem_with(with_digest(result), key) is None
    del result["evaluation"]["corruption_constants"]
    assert "not the published ones" in str(problem_with(with_digest(result), key))
    result["evaluation"]["robustness"]["corruptions"] = []
    assert problem_with(with_digest(result), key) is None, "what was not corrupted is as good as ever"


def test_a_plan_says_what_is_evaluated() -> None:
    plan = make_plan(evaluate="robustness(steps=20), calibration")
    assert plan.evaluate == ("calibration", "robustness(steps=20)")
    assert {spec.evaluate for spec in plan.runs()} == {plan.evaluate}
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "evaluate" not in make_plan().to_dict()
    assert make_plan(evaluate=[]) == make_plan()
    for wrong in ("calibraton", ["robustness(epsilon=-1)"], 3):
        with pytest.raises(PlanError) as caught:
            make_plan(evaluate=wrong)
        assert caught.value.path == ("evaluate",)


def test_a_summary_has_one_more_table(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(evaluate=["calibration", "robustness"]), engine=FakeEngine())
    study.prepare()
    for key, spec in study.runs.items():
        study.store.save(key, make_result(spec, evaluation=made_up(0.8)))
    summary = summarise(study)
    assert [row["evaluation"]["accuracy"] for row in summary["recipes"]] == [pytest.approx(0.8)] * 3
    json.dumps(summary, allow_nan=False)
    assert "| recipe | NLL | Brier | ECE % | gap % |" in to_markdown(summary)
    assert "| cb | 0.500 ± 0.000 | 0.250 ± 0.000 | 10.00 ± 0.00 |" in to_markdown(summary)
    header, first = to_csv(summary).splitlines()[:2]
    assert dict(zip(header.split(","), first.split(","), strict=True))["brier"] == "0.25"
    assert evaluation_table(summary) is not None


def test_figures_are_compared_seed_by_seed_and_corrected_over_the_whole_table(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(seeds=5, evaluate=["calibration", "robustness"]), engine=FakeEngine())
    study.prepare()
    for key, spec in study.runs.items():
        shift = 0.01 * spec.seed  # seeds differ more than recipes do: only a paired comparison sees anything
        shift -= 0.02 + 1e-4 * spec.seed if spec.recipe == "cb(cb)" else 0.0
        study.store.save(key, make_result(spec, evaluation=made_up(0.8, shift)))
    summary = summarise(study)
    by_recipe = {row["name"]: {f["name"]: f for f in row["evaluation"]["figures"]} for row in summary["recipes"]}
    assert set(by_recipe) == {"none", "dropkey(0.1)", "cb"}
    error = by_recipe["cb"]["ECE"]["difference"]
    assert error["mean"] == pytest.approx(-0.0202)
    compared = [f["difference"]["p"] for name in ("cb", "dropkey(0.1)") for f in by_recipe[name].values()]
    assert error["adjusted"] == pytest.approx(error["p"] * sum(p is not None for p in compared), rel=1e-6)
    assert "difference" not in by_recipe["none"]["ECE"]
    markdown = to_markdown(summary)
    assert re.search(r"\| cb \|.* \d+\.\d+ ± \d+\.\d+ \* \|", markdown)
    assert "\\* differs from the baseline" in markdown
    assert "*" not in next(line for line in markdown.splitlines() if line.startswith("| dropkey(0.1) | 0.5"))
    page = render(summary)
    assert 'class="number good"' in page.split('id="evaluation"')[1], "a smaller error is better"
    assert 'class="number bad"' in page.split('id="evaluation"')[1], "a smaller accuracy is worse"


def test_a_real_study_evaluates_every_run(tmp_path: Path) -> None:
    plan = Compare(model="vit-digits(depth=1)", recipes=("dropkey(0.1)",), seeds=1, epochs=1, evaluate=",".join(ALL))
    study = Study(tmp_path, plan.changed(DEFAULT_PLAN))
    assert folder_of(study.plan) == Path("runs/digits-vit-digits-depth-1-evaluated")
    study.prepare()
    study.work()
    assert not (tmp_path / "work").exists() or not list((tmp_path / "work").iterdir()), "weights are not kept"
    none, dropkey = summarise(study)["recipes"]
    names = [figure["name"] for figure in dropkey["evaluation"]["figures"]]
    assert {"ECE", "PGD 0.05", "accuracy, 2 passes"} <= set(names)
    averaged = {"accuracy, 2 passes", "ECE, 2 passes"}
    others = [name for name in names if name not in averaged]
    assert [figure["name"] for figure in none["evaluation"]["figures"]] == others, "none has nothing to average"
    assert 'id="robustness"' in render(summarise(study))


def test_a_study_without_evaluations_is_as_it_was(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine())
    study.prepare()
    summary = summarise(study)
    assert "evaluation" not in summary["recipes"][0]
    assert "ECE" not in to_markdown(summary)
    assert evaluation_table(summary) is None
