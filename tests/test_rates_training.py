"""Rates that move while a run trains: with time, by learning, to zero at the end; in the result and on the page."""

import pytest
import torch

from attemper.errors import ParameterError
from attemper.lab.report.study import render
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.check import check_run
from attemper.lab.training.cost import step_costs
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import run
from attemper.lab.training.rates import at_full_rate
from attemper.lab.training.spec import Budget, RunSpec
from summaries import summary

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = "digits(train=100, test=20)"
MODEL = "vit-digits(depth=2, width=16, heads=2, mlp=16)"


def spec(recipe, **budget):
    chosen = Budget(**{"epochs": 4, "batch_size": 32, "lr": 3e-3, "warmup_epochs": 1, **budget})
    return RunSpec(task=TASK, model=MODEL, recipe=recipe, seed=0, budget=chosen)


def by_epoch(result, method, block=0):
    return [
        next(row["rate"] for row in entry["rates"] if row["method"] == method and row["block"] == block)
        for entry in result["curve"]
    ]


def test_training_tells_how_far_it_is():
    result = run(spec("dropkey(0.4, schedule=[0.4, 0.2], until=0.5) + droppath(0.2, start=3)"), open_task(TASK))
    assert by_epoch(result, "dropkey") == [0.4, 0.4, 0.0, 0.0]
    assert by_epoch(result, "dropkey", 1) == [0.2, 0.2, 0.0, 0.0]
    assert by_epoch(result, "droppath") == [0.0, 0.0, 0.0, 0.2]
    highest = {(row["method"], row["block"]): row["rate"] for row in result["rates"]}
    assert highest == {("dropkey", 0): 0.4, ("dropkey", 1): 0.2, ("droppath", 0): 0.2, ("droppath", 1): 0.2}


def test_the_last_epochs_of_a_budget_go_without():
    recipe = "dropkey(0.4) + droppath(0.2, until=1) + blur(1.0) + drophead(0.4, ramp=0.5) + cb"
    result = run(spec(recipe, last_epochs_without=2), open_task(TASK))
    assert by_epoch(result, "dropkey") == [0.4, 0.4, 0.0, 0.0]
    assert by_epoch(result, "droppath") == [0.2, 0.0, 0.0, 0.0]
    assert by_epoch(result, "blur") == [1.0, 1.0, 0.0, 0.0]
    rising = by_epoch(result, "drophead")
    assert 0 < rising[0] < rising[1]
    assert rising[2:] == [0.0, 0.0]
    assert result["spec"]["recipe"] == recipe
    assert "last_epochs_without" not in spec("none").to_dict()["budget"]  # older runs keep their keys
    with pytest.raises(ParameterError, match="last_epochs_without is 4; it must be from 0 to below the epochs"):
        spec("none", last_epochs_without=4)


def test_learnt_rates_are_written_down_and_those_that_stand_still_are_not():
    result = run(spec("dropkey(learn)"), open_task(TASK))
    rates = by_epoch(result, "dropkey")
    assert len(set(rates)) == 4
    assert all(0 < rate <= 0.9 for rate in rates)
    chosen = result["curve"][result["chosen_epoch"] - 1]["rates"]
    assert result["rates"] == chosen
    assert "rates" not in run(spec("dropkey(0.1)", epochs=1), open_task(TASK))["curve"][0]


def test_a_step_is_timed_and_counted_while_everything_acts():
    given = spec("dropkey(learn, until=0.5) + droppath(0.3, start=0.9)")
    costs = step_costs([given.recipe], open_task(TASK), MODEL, given.budget, rounds=2, device="cpu")
    assert costs[given.recipe]["ratio"] > 0
    assert at_full_rate(given).recipe == "dropkey(learn) + droppath(0.3)"
    assert at_full_rate(spec("none", last_epochs_without=2)) == spec("none")


def test_times_that_do_not_fit_a_budget_are_found_before_training():
    with pytest.raises(ParameterError, match="dropkey would never act"):
        check_run(spec("dropkey(0.1, start=10)"), open_task(TASK))


def test_the_page_draws_rates_that_move():
    given = summary(3, seeds=2, epochs=4)
    assert "Rates over time" not in render(given)
    for seed, curve in enumerate(given["recipes"][1]["curves"]):
        for entry in curve:
            moved = 0.1 + 0.02 * entry["epoch"] + 0.01 * seed
            entry["rates"] = [
                {"method": "dropkey", "block": block, "rate": rate} for block, rate in ((0, moved), (1, 0.3))
            ]
    page = render(given)
    assert "Rates over time" in page
    assert "rate over epoch. At the end: block 0: 0.185; block 1: 0.3" in page


@pytest.mark.parametrize("decay", ["all", "matrices"])
def test_learnt_rates_do_not_decay(decay):
    learner = Learner(spec("dropkey(learn)", decay=decay), open_task(TASK), torch.device("cpu"))
    names = {id(p): name for name, p in learner.model.named_parameters()}
    groups = {names[id(p)]: group["weight_decay"] for group in learner.optimizer.param_groups for p in group["params"]}
    assert groups.keys() == set(names.values())
    assert {value for name, value in groups.items() if name.startswith("attemper.")} == {0.0}
    assert groups["head.weight"] == Budget.weight_decay
