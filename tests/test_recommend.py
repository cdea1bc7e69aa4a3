"""`recommend`: equal trials for every recipe, halving by validation, confirmation on seeds that exploration never "
"saw."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from attemper.errors import AttemperError, ParameterError
from attemper.lab.cli.recommend import training_command
from attemper.lab.cli.train import Train
from attemper.lab.errors import PlanError, StudyError
from attemper.lab.report.recommendation import render
from attemper.lab.study import comparison
from attemper.lab.study import recommend as recommending
from attemper.lab.study.cautions import rates_at_the_edge
from attemper.lab.study.exploring import SPACES, Proposer, best_of, expected_best, families, kept, rungs
from attemper.lab.study.plan import Plan
from attemper.lab.study.planfile import dump_plan, load_plan
from attemper.lab.study.recommend import answer, recommend
from attemper.lab.study.study import Study
from attemper.lab.training.spec import Budget, RunSpec
from attemper.recipe import as_methods
from study_fakes import FakeEngine, make_result

BASE = {"task": "fake", "model": "vit-digits", "budget": {"epochs": 9}, "lr": [1e-3]}
GAIN = {"none": 0.0, "dropkey": 0.05, "cb": 0.001, "blur": -0.05}


def accuracy(spec: RunSpec) -> float:
    name = spec.recipe.partition("(")[0]
    rng = np.random.default_rng([spec.seed, spec.budget.epochs, sum(map(ord, spec.recipe))])
    far = abs(np.log(spec.budget.lr / 2e-3))
    value = 0.7 + 0.01 * spec.budget.epochs - 0.02 * far + GAIN.get(name, 0.0) + 0.02 * np.sin(spec.seed)
    return float(value + rng.normal(0, 0.004))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """Studies whose runs have results at once, without any worker; the runs that were asked for, in order."""
    asked: list[RunSpec] = []

    def work(study: Study, **options: Any) -> None:
        study.prepare()
        for key in study.missing():
            spec = study.runs[key]
            asked.append(spec)
            parts = {"validation": {"accuracy": accuracy(spec)}, "test": {"accuracy": accuracy(spec)}}
            study.store.save(key, make_result(spec, timing={"seconds": float(spec.budget.epochs)}, **parts))

    monkeypatch.setattr(recommending, "work", work)
    monkeypatch.setattr(comparison, "work", work)
    return asked


def searched(folder: Path, **changes: Any) -> Any:
    options = {"minutes": 7, "recipes": ["dropkey", "cb", "blur"], "workers": 2, "engine": FakeEngine(), **changes}
    return recommend(BASE, folder, **options)


def test_it_finds_what_helps_and_confirms_it_on_fresh_seeds(tmp_path: Path, done: list[RunSpec]) -> None:
    found = searched(tmp_path)
    assert found["answer"]["recipe"].startswith("dropkey(")
    assert found["answer"]["verdict"] == "better"
    assert found["answer"]["text"].startswith("Use dropkey(")
    assert found["answer"]["cost"]["ratio"] == 1.5
    short, whole = found["epochs"]
    explored = {spec.seed for spec in done if spec.budget.epochs == short}
    assert explored == {0}
    confirmed = {seed for row in found["confirmation"]["recipes"] for seed in row["seeds"]}
    assert not confirmed & explored
    assert [spec for spec in done if spec.seed in confirmed and spec.budget.epochs == short] == []
    assert whole == 9


def test_every_recipe_has_the_same_trials_learning_rates_included(tmp_path: Path, done: list[RunSpec]) -> None:
    found = searched(tmp_path)
    trials = {row["name"]: row["trials"] for row in found["explored"]}
    assert set(trials) == {"none", "dropkey", "cb", "blur"}
    count = found["sizes"]["trials"]
    assert {len(each) for each in trials.values()} == {count}
    for each in trials.values():
        assert [trial["lr"] for trial in each[:3]] == [1e-3, 2e-3, 5e-4]
        assert len({(trial["recipe"], trial["lr"]) for trial in each}) == count
        assert sum(trial["validation"][1] is not None for trial in each) == kept(count, 2)[1]
        ordered = sorted((trial["validation"][0] for trial in each), reverse=True)
        going_on = {trial["validation"][0] for trial in each if trial["validation"][1] is not None}
        assert going_on == set(ordered[: len(going_on)])


def test_the_same_search_again_runs_nothing_and_says_the_same(tmp_path: Path, done: list[RunSpec]) -> None:
    first = searched(tmp_path)
    runs = len(done)
    assert runs == len(set(done))
    again = searched(tmp_path)
    assert len(done) == runs
    assert json.dumps(again["explored"]) == json.dumps(first["explored"])
    assert again["answer"] == first["answer"]


@pytest.mark.parametrize("stop", [2, 14, 30])
def test_a_search_that_was_stopped_comes_to_the_same(tmp_path: Path, done: list[RunSpec], stop: int) -> None:
    whole = searched(tmp_path / "whole")
    folder, calls = tmp_path / "stopped", itertools.count()

    class StopError(Exception):
        pass

    def interrupted(study: Study, **options: Any) -> None:
        study.prepare()
        for key in study.missing():
            if next(calls) >= stop:
                raise StopError
            spec = study.runs[key]
            parts = {"validation": {"accuracy": accuracy(spec)}, "test": {"accuracy": accuracy(spec)}}
            study.store.save(key, make_result(spec, timing={"seconds": float(spec.budget.epochs)}, **parts))

    usual = recommending.work
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recommending, "work", interrupted)
        patch.setattr(comparison, "work", interrupted)
        with pytest.raises(StopError):
            searched(folder)
    assert recommending.work is usual
    assert searched(folder)["explored"] == whole["explored"]


def test_where_nothing_helps_it_says_none(tmp_path: Path, done: list[RunSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GAIN, "dropkey", 0.0)
    found = searched(tmp_path, minutes=4)
    assert found["answer"]["recipe"] == "none"
    assert found["answer"]["text"].startswith("Use none with a learning rate of 0.00")


def test_more_minutes_buy_more_trials_and_seeds(tmp_path: Path, done: list[RunSpec]) -> None:
    few, many = (searched(tmp_path / str(minutes), minutes=minutes)["sizes"] for minutes in (2, 10))
    assert few["trials"] < many["trials"]
    assert few["seeds"] < many["seeds"]
    assert many["minutes"] <= 10


def test_time_that_exploration_did_not_take_buys_seeds(
    tmp_path: Path, done: list[RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trials of a search are slow: a GPU wakes up, kernels are compiled."""
    sizes = searched(tmp_path / "even", minutes=5)["sizes"]
    usual, slow = recommending.work, itertools.count()

    def cold(study: Study, **options: Any) -> None:
        usual(study, **options)
        if next(slow) == 0:
            for key in study.runs:
                result = study.results()[key]
                study.store.save(key, {**result, "timing": {"seconds": 8 * result["timing"]["seconds"]}})

    monkeypatch.setattr(recommending, "work", cold)
    found = searched(tmp_path / "cold", minutes=5)
    assert found["sizes"]["trials"] < sizes["trials"]
    assert found["sizes"]["seeds"] > sizes["seeds"]
    assert found["sizes"]["minutes"] <= 5
    assert searched(tmp_path / "cold", minutes=5)["sizes"] == found["sizes"]


def test_another_search_in_the_same_folder_is_refused(tmp_path: Path, done: list[RunSpec]) -> None:
    searched(tmp_path)
    with pytest.raises(StudyError, match="another minutes"):
        searched(tmp_path, minutes=13)
    with pytest.raises(StudyError, match="another recipes"):
        searched(tmp_path, recipes=["cb"])
    with pytest.raises(ParameterError, match="--minutes is 0"):
        searched(tmp_path, minutes=0)


def test_what_cannot_be_searched_leaves_the_folder_free(tmp_path: Path, done: list[RunSpec]) -> None:
    for wrong in ({"recipes": ["dropkeys"]}, {"recipes": ["cb"], "engine": FakeEngine(misfits=("cb(cb)", "cb"))}):
        with pytest.raises(AttemperError):
            searched(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()
    assert searched(tmp_path / "new", recipes=["cb"], minutes=3)["answer"]


def test_the_page_shows_exploration_and_confirmation_apart(tmp_path: Path, done: list[RunSpec]) -> None:
    found = searched(tmp_path)
    text = html.unescape(render(found))
    assert found["answer"]["text"] in text
    assert "Expected best of k trials" in text
    for row in found["explored"]:
        for trial in row["trials"]:
            assert trial["recipe"] in text
    evil = "<img src=x onerror=alert(1)>"
    found["explored"][1]["trials"][0]["recipe"] = found["explored"][1]["name"] = evil
    found["answer"]["text"] = found["misfits"]["x"] = evil
    assert evil not in render(found)


class HashingEngine(FakeEngine):
    """Runs of models of one's own, whose keys depend on the hash of their source."""

    def with_hashes(self, budget: Budget, task: Any, model: str) -> Budget:
        return dataclasses.replace(budget, code_hash="0123456789abcdef")


def test_a_model_of_ones_own_is_explored_and_gone_on_with(tmp_path: Path, done: list[RunSpec]) -> None:
    base = {**BASE, "model": "my_models:small"}
    options: dict[str, Any] = {"minutes": 4, "recipes": ["dropkey", "cb"], "workers": 2, "engine": HashingEngine()}
    first = recommend(base, tmp_path, **options)
    assert first["answer"]["recipe"].startswith("dropkey(")
    runs = len(done)
    assert recommend(base, tmp_path, **options)["explored"] == first["explored"]
    assert len(done) == runs


def test_where_everything_diverges_there_is_no_answer() -> None:
    none = {"recipe": "none", "lr": 0.1, "test": [0.3, 0.1], "diverged": 2, "decision": None, "difference": None}
    undecided = {"answer": "undecided"}
    cb = {**none, "recipe": "cb(cb)", "diverged": 0, "decision": undecided, "difference": {"mean": 0.1}, "cost": None}
    none["cost"] = None
    found = answer({"recipes": [none, cb]})
    assert found["verdict"] == "diverged"
    assert found["text"].startswith("No answer: every run of none diverged, with a learning rate of 0.1.")
    assert answer({"recipes": [{**none, "diverged": 1}, cb]})["verdict"] == "baseline"
    better = {**cb, "decision": {"answer": "better"}}
    assert answer({"recipes": [none, better]})["recipe"] == "cb(cb)"
    alike = {**cb, "decision": {"answer": "equivalent"}}
    assert "better than it by what matters" in answer({"recipes": [{**none, "diverged": 0}, alike]})["text"]


def test_the_command_at_the_end_trains_under_the_budget_that_was_searched_with() -> None:
    budget = Budget(epochs=7, batch_size=32, warmup_epochs=1.5, optimizer="adamw", clip=1.0, ema=0.999, compile=True)
    base = {"task": "digits", "model": "vit-digits", "budget": {**budget.to_dict(), "code_hash": "0" * 64}}
    text = training_command(base, {"recipe": "dropkey(0.1) + cb", "lr": 0.0012345678}, Path("my data"))
    command, *words = shlex.split(text)
    assert (command, words[0]) == ("attemper", "train")
    train = tyro.cli(tyro.conf.OmitArgPrefixes[Train], args=words[1:])
    assert train.budget == dataclasses.replace(budget, lr=0.0012345678)
    assert (train.recipe, train.data) == ("dropkey(0.1) + cb", Path("my data"))


# ---------------------------------------------------------------------------------------------------------------- parts
@pytest.mark.parametrize("name", SPACES)
def test_whatever_is_proposed_is_a_recipe_with_a_learning_rate_near_the_plans(name: str) -> None:
    (family,) = [each for each in families([name]) if each.name == name]
    proposer = Proposer(family, 1e-3, seed=1)
    proposer.propose(4)
    proposer.tell(dict.fromkeys(proposer.trials, 0.5))
    proposer.propose(3)
    for recipe, lr in proposer.trials:
        assert name == "none" or as_methods(recipe)[0].name == name
        assert 2.5e-4 <= lr <= 4e-3


def test_the_same_results_lead_to_the_same_proposals() -> None:
    both = [Proposer(families(["dropkey"])[1], 1e-3, seed=3) for _ in range(2)]
    for proposer in both:
        proposer.propose(4)
        proposer.tell({trial: float(len(trial[0])) for trial in proposer.trials})
        proposer.propose(4)
    assert both[0].trials == both[1].trials


@given(st.integers(1, 400), st.integers(1, 40))
def test_stages_grow_to_the_full_budget_and_trials_shrink_to_one(epochs: int, trials: int) -> None:
    stages = rungs(epochs)
    assert stages[-1] == epochs
    assert stages == sorted(set(stages))
    assert len(stages) <= 3
    counts = kept(trials, len(stages))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == trials
    assert counts[-1] >= 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(1, 5))
def test_the_expected_best_is_the_mean_over_all_draws(values: list[float], k: int) -> None:
    k = min(k, len(values))
    draws = list(itertools.product(values, repeat=k))
    assert expected_best(values)[k - 1] == pytest.approx(sum(map(max, draws)) / len(draws))


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([(5e-4, [5e-4, 1e-3]), (5e-4, [5e-4, 2e-3])], "lowest learning rate of its trials (0.0005): a lower one"),
        ([(4e-3, [1e-3, 4e-3]), (2e-3, [1e-3, 2e-3])], "highest learning rate of its trials (0.002, 0.004): a higher"),
        ([(5e-4, [5e-4, 1e-3]), (1e-3, [5e-4, 1e-3])], ""),
        ([(1e-3, [5e-4, 1e-3, 2e-3]), (5e-4, [5e-4, 1e-3])], ""),
        ([(1e-3, [1e-3]), (1e-3, [1e-3])], ""),
    ],
)
def test_learning_rates_at_the_edge_of_the_trials_are_told(rates: list[tuple[float, list[float]]], said: str) -> None:
    rows = [{"confirmed": True, "best": {"lr": best}, "trials": [{"lr": lr} for lr in tried]} for best, tried in rates]
    rows.append({"confirmed": False, "best": {"lr": 1.0}, "trials": [{"lr": 0.5}, {"lr": 1.0}, {"lr": 2.0}]})
    told = rates_at_the_edge(rows)
    assert said in told[0] if said else not told


def test_a_trial_that_diverged_goes_on_last() -> None:
    assert best_of({("a", 1.0): None, ("b", 1.0): 0.1, ("c", 1.0): 0.2}, 2) == [("c", 1.0), ("b", 1.0)]


def test_a_plan_may_name_single_configurations(tmp_path: Path) -> None:
    tried = [{"recipe": "dropkey(0.1)", "lr": 1e-3}, {"recipe": "dropkey(0.2)", "lr": 5e-4}]
    rows = [{"name": "none", "tried": [{"recipe": "none", "lr": 2e-3}]}, {"name": "dropkey", "tried": tried}]
    plan = Plan.from_dict({"task": "fake", "model": "vit-digits", "seeds": 2, "recipes": rows})
    assert plan.baseline.name == "none"
    assert len(plan.runs()) == 6
    assert plan.configurations(plan.recipes[1]) == [("dropkey(0.1)", 1e-3), ("dropkey(0.2)", 5e-4)]
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(plan))
    assert load_plan(path) == plan
    for wrong in ({"name": "x", "tried": []}, {"tried": tried}, {"name": "x", "tried": [{"recipe": "cb"}]}):
        with pytest.raises(PlanError):
            Plan.from_dict({"task": "fake", "model": "vit-digits", "recipes": [wrong]})
