"""What a recipe costs, against none, in one process."""

from __future__ import annotations

import numpy as np
import pytest

from attemper.lab.tasks.registry import open_task
from attemper.lab.training import cost
from attemper.lab.training.cost import Stepper, step_costs, summarise
from attemper.lab.training.spec import Budget


def test_every_recipe_has_a_cost_against_none_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    names: dict[int, str] = {}
    original = Stepper.__init__

    def named(self: Stepper, spec: object, *args: object) -> None:
        names[id(self)] = spec.recipe  # type: ignore[attr-defined]
        original(self, spec, *args)  # type: ignore[arg-type]

    def timed(self: Stepper) -> float:
        turns.append(names[id(self)])
        return {"none": 0.010, "dropkey(0.1)": 0.013, "cb": 0.009}[names[id(self)]]

    monkeypatch.setattr(Stepper, "__init__", named)
    monkeypatch.setattr(Stepper, "time", timed)
    task = open_task("digits(train=100)")
    model = "vit-digits(depth=1, width=16, heads=2, mlp=16)"
    costs = step_costs(["dropkey(0.1)", "cb"], task, model, Budget(batch_size=16), rounds=3, device="cpu")
    assert turns == ["none", "dropkey(0.1)", "cb"] * 3
    assert {name: round(each["ratio"], 6) for name, each in costs.items()} == {
        "none": 1.0,
        "dropkey(0.1)": 1.3,
        "cb": 0.9,
    }
    assert costs["none"]["milliseconds"] == pytest.approx(10)
    assert all(each["peak_memory"] is None for each in costs.values())


def test_a_step_takes_time() -> None:
    task = open_task("digits(train=100)")
    model = "vit-digits(depth=1, width=16, heads=2, mlp=16)"
    costs = step_costs(["none"], task, model, Budget(batch_size=16), rounds=2, device="cpu")
    assert costs["none"]["milliseconds"] > 0
    assert costs["none"]["ratio"] == 1.0


def test_the_interval_covers_the_median_and_shrinks_with_more_rounds() -> None:
    draw = np.random.default_rng(1)
    widths = []
    for rounds in (10, 1000):
        reference = draw.normal(1.0, 0.05, rounds)
        summary = summarise(1.2 * draw.normal(1.0, 0.05, rounds), reference, None)
        assert summary["low"] <= summary["ratio"] <= summary["high"]
        widths.append(summary["high"] - summary["low"])
    assert summary["ratio"] == pytest.approx(1.2, abs=0.02)
    assert widths[1] < widths[0] / 4


def test_what_slows_the_whole_machine_down_does_not_change_the_ratio() -> None:
    weather = np.linspace(1.0, 5.0, 50)
    summary = summarise(1.5 * weather, weather, None)
    assert (summary["ratio"], summary["low"], summary["high"]) == pytest.approx((1.5, 1.5, 1.5))


def test_the_bootstrap_is_the_same_every_time() -> None:
    times = np.random.default_rng(0).uniform(1, 2, 30)
    assert summarise(times, times[::-1], None) == summarise(times, times[::-1], None)
    assert cost.BOOTSTRAPS >= 1000
