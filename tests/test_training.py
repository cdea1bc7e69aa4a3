"""Training: what recipes share, which epoch is chosen, when the test set is read, and how a run can end."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.errors import AttemperError, ConflictError, NoSiteError, ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.source import Source
from attemper.lab.training import loop
from attemper.lab.training.check import check_run
from attemper.lab.training.data import RunData
from attemper.lab.training.learner import Average, Learner
from attemper.lab.training.loop import run
from attemper.lab.training.schedule import learning_rate
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.validation import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TINY = "vit-digits(depth=2, width=16, heads=2, mlp=16)"


def small_task() -> Task:
    return open_task("digits(train=200, test=50)")


def spec(recipe: str = "none", *, model: str = TINY, seed: int = 0, **budget: Any) -> RunSpec:
    chosen = Budget(**{"epochs": 2, "batch_size": 32, "lr": 3e-3, "warmup_epochs": 1, **budget})
    return RunSpec(task="digits(train=200, test=50)", model=model, recipe=recipe, seed=seed, budget=chosen)


class Watched:
    """A task that writes down when its test set was opened."""

    def __init__(self, task: Task, events: list[str]) -> None:
        self.task = task
        self.events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def test(self) -> Source:
        self.events.append("test")
        return self.task.test()


# ---------------------------------------------------------------------------------- the same for every recipe of a seed
RECIPES = ["dropkey(0.1)", "cb(cb_s)", "explicit(v=5e-4, ff=5e-4)", "dropkey(0.1) + rdrop", "layerdrop(0.5)"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_of_a_seed_start_from_the_same_weights(recipe: str) -> None:
    plain, other = (Learner(spec(each), small_task(), CPU).model.state_dict() for each in ("none", recipe))
    assert all(torch.equal(value, other[name]) for name, value in plain.items())
    assert all(name.startswith("attemper.") for name in other.keys() - plain.keys())


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_of_a_seed_see_the_same_batches_in_every_epoch(recipe: str) -> None:
    augment = "crop-flip(1)+erasing+mixup"
    plain, other = (RunData(spec(each, augment=augment), small_task(), CPU) for each in ("none", recipe))
    learner = Learner(spec(recipe, augment=augment), small_task(), CPU)
    for epoch in (1, 2):
        for ours, theirs in zip(plain.epoch(epoch), other.epoch(epoch), strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
            learner.learn(*theirs)  # draws from the stream of the methods between two batches


def test_epochs_and_seeds_have_batches_of_their_own() -> None:
    def first(seed: int, epoch: int) -> Tensor:
        return next(RunData(spec(seed=seed), small_task(), CPU).epoch(epoch))[0]

    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))


def test_equal_runs_have_equal_results_and_leave_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = run(spec("dropkey(0.3)"), small_task())
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(2)
    second = run(spec("dropkey(0.3)"), small_task())
    assert {**first, "timing": 0} == {**second, "timing": 0}
    other = run(spec("dropkey(0.3)", seed=1), small_task())
    assert other["curve"] != first["curve"]


# ------------------------------------------------------------------------------------------------- honest measurement
def test_the_test_set_is_opened_once_and_only_after_training_has_ended() -> None:
    events: list[str] = []

    def watch(event: dict[str, Any]) -> None:
        events.extend(["epoch"] if event["validation"] else [])

    run(spec(epochs=3), Watched(small_task(), events), progress=watch)
    assert events == ["epoch"] * 3 + ["test"]


def test_the_chosen_epoch_does_not_depend_on_the_test_set() -> None:
    class Reversed(Watched):
        def test(self) -> Source:
            source = self.task.test()
            source.targets = 9 - source.targets
            return source

    honest, lied_to = run(spec(epochs=4), small_task()), run(spec(epochs=4), Reversed(small_task(), []))
    assert lied_to["test"] != honest["test"]
    same = ("chosen_epoch", "curve", "validation", "train")
    assert all(lied_to[name] == honest[name] for name in same)


def test_the_epoch_is_the_best_on_validation_and_the_earliest_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.2, 0.7, 0.7, 0.6])

    def scripted(*args: Any) -> dict[str, float]:
        return {"accuracy": next(accuracies, 0.5), "loss": 1.0}

    monkeypatch.setattr(loop, "evaluate", scripted)
    result = run(spec(epochs=4), small_task())
    assert result["chosen_epoch"] == 2
    assert result["validation"]["accuracy"] == 0.7


def test_metrics_are_those_of_the_chosen_epochs_weights() -> None:
    whole = run(spec(epochs=4, lr=2e-2), small_task())
    # The rate of a run depends on its number of epochs, so the weights of an epoch are looked at from inside.
    kept: dict[int, dict[str, Tensor]] = {}
    learner = None

    def keep(event: dict[str, Any]) -> None:
        kept[event["epoch"]] = {name: value.clone() for name, value in learner.model.state_dict().items()}

    original = Learner.__init__

    def spy(self: Learner, *args: Any, **kwargs: Any) -> None:
        nonlocal learner
        original(self, *args, **kwargs)
        learner = self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "__init__", spy)
        assert run(spec(epochs=4, lr=2e-2), small_task(), progress=keep)["test"] == whole["test"]
    assert learner is not None
    learner.model.load_state_dict(kept[whole["chosen_epoch"]])
    task = small_task()
    data = RunData(spec(epochs=4, lr=2e-2), task, CPU)
    assert evaluate(learner, task, task.test()) == whole["test"]
    assert evaluate(learner, task, data.validation) == whole["validation"]
    assert evaluate(learner, task, data.measured_train()) == whole["train"]


def test_a_result_is_plain_json_with_everything_in_it() -> None:
    result = run(spec("dropkey(0.1, schedule=decreasing)"), small_task())
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    task = small_task()
    assert result["key"] == spec("dropkey(0.1, schedule=decreasing)").key(task.fingerprint)
    assert RunSpec.from_dict(result["spec"]) == spec("dropkey(0.1, schedule=decreasing)")
    assert result["rates"] == [
        {"method": "dropkey", "block": 0, "rate": 0.1},
        {"method": "dropkey", "block": 1, "rate": 0.05},
    ]
    assert [entry["epoch"] for entry in result["curve"]] == [1, 2]
    assert result["status"] == "finished"
    assert result["diverged_at"] is None
    assert set(result["versions"]) == {"attemper", "torch", "python", "device"}


def test_the_default_model_learns_digits() -> None:
    budget = Budget(epochs=10, batch_size=64, lr=3e-3, warmup_epochs=2)
    result = run(RunSpec(task="digits", model="vit-digits", recipe="none", seed=0, budget=budget), open_task("digits"))
    assert result["test"]["accuracy"] >= 0.95
    assert result["train"]["accuracy"] > result["curve"][0]["train_accuracy"]


# ---------------------------------------------------------------------------------------------------------- divergence
def test_divergence_is_a_result_with_the_weights_before_it() -> None:
    result = run(spec(lr=1e6, warmup_epochs=0, loss_bound=30.0), small_task())
    assert result["status"] == "diverged"
    assert result["diverged_at"]["epoch"] == 1
    assert 1 < result["diverged_at"]["step"] <= 4
    assert result["chosen_epoch"] == 0
    assert result["curve"] == []
    untrained = Learner(spec(), small_task(), CPU)
    assert result["test"] == evaluate(untrained, small_task(), small_task().test())
    json.dumps(result, allow_nan=False)


def test_a_loss_that_is_no_number_is_divergence_too() -> None:
    learner = Learner(spec(), small_task(), CPU)
    meter = learner.meter
    for value in (1.0, math.nan, math.inf):
        meter.update(torch.tensor(value), torch.tensor(1.0), torch.tensor(0.5))
    assert meter.read().bad_batch == 2
    meter.reset()
    assert meter.read().bad_batch is None


# ------------------------------------------------------------------------------------------------------------ the step
def test_accumulated_batches_make_the_step_of_one_large_batch() -> None:
    inputs, targets = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    once = Learner(spec(clip=0.5), small_task(), CPU)
    twice = Learner(spec(clip=0.5), small_task(), CPU, accumulate=2)
    before = [p.detach().clone() for p in twice.model.parameters()]
    for _ in range(3):
        once.learn(inputs, targets)
        twice.learn(inputs[:16], targets[:16])
        twice.learn(inputs[16:], targets[16:])
    for a, b, start in zip(once.model.parameters(), twice.model.parameters(), before, strict=True):
        assert not torch.equal(b, start)
        assert torch.allclose(a, b, atol=2e-4)


def test_the_loss_is_the_tasks_own_and_what_the_recipe_adds() -> None:
    inputs, targets = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
    plain = Learner(spec(smoothing=0.1), small_task(), CPU)
    penalised = Learner(spec("explicit(v=0.5, ff=0.5)", smoothing=0.1), small_task(), CPU)
    own, total = plain.loss(inputs, targets), penalised.loss(inputs, targets)
    expected = torch.nn.functional.cross_entropy(plain.model(inputs), targets, label_smoothing=0.1)
    assert torch.allclose(own, expected)
    reading = penalised.meter.read()
    assert reading.penalty > 1e-4
    assert reading.loss + reading.penalty == pytest.approx(float(total.detach()), rel=1e-5)


def test_the_moving_average_is_evaluated_in_place_of_the_weights() -> None:
    layer = torch.nn.Linear(2, 2)
    average = Average(layer, 0.9)
    start = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight += 1.0
    average.update()
    with average.swapped_in():
        assert torch.allclose(layer.weight, start + 0.1)
    assert torch.allclose(layer.weight, start + 1.0)
    assert run(spec(ema=0.5), small_task())["test"] != run(spec(), small_task())["test"]


def test_lower_precision_and_decoupled_decay_train_as_well() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        lower = run(spec(precision="bfloat16", optimizer="adamw", clip=1.0), small_task())
        full = run(spec(optimizer="adamw", clip=1.0), small_task())
    assert lower["status"] == "finished"
    losses = [result["curve"][-1]["train_loss"] for result in (lower, full)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    budget = Budget(epochs=10, lr=1.0, min_lr=0.1, warmup_epochs=2)
    rates = [learning_rate(budget, step, 10) for step in range(100)]
    assert rates[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert rates[20] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    middle = (rates[59] + rates[60]) / 2
    assert middle == pytest.approx(0.55)


def test_an_epoch_has_whole_batches_and_whole_accumulations() -> None:
    data = RunData(spec(batch_size=32, accumulate=3), small_task(), CPU)
    assert len(data.train) == 140
    assert (data.batches_per_epoch, data.steps_per_epoch) == (3, 1)
    assert [len(targets) for _, targets in data.epoch(1)] == [32, 32, 32]
    large = RunData(spec(batch_size=512, accumulate=4), small_task(), CPU)
    assert (large.batch_size, large.accumulate, large.batches_per_epoch) == (140, 1, 1)


def test_progress_says_where_the_run_is() -> None:
    events: list[dict[str, Any]] = []
    run(spec(epochs=2), small_task(), progress=events.append)
    last = events[-1]
    assert (last["epoch"], last["epochs"], last["step"], last["steps"]) == (2, 2, 4, 4)
    assert set(last["validation"]) == {"accuracy", "loss"}
    json.dumps(events, allow_nan=False)


# --------------------------------------------------------------------------------------------- before training starts
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"recipe": "dropkey(0.1)", "model": "convmixer(width=8, depth=1)"}, NoSiteError),
        ({"recipe": "rdrop"}, ConflictError),
        ({"recipe": "skipless(blocks=[7])"}, ParameterError),
        ({"model": "vit-digits(depht=3)"}, ParameterError),
        ({"model": "hf:vit(image_size=16, patch_size=4, num_hidden_layers=1)"}, ParameterError),
        ({"augment": "mixpu"}, ParameterError),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_it_starts(change: dict[str, str], kind: type[AttemperError]) -> None:
    with pytest.raises(kind):
        check_run(spec(**change), small_task())


def test_too_few_images_are_found_before_training_starts() -> None:
    few = dataclasses.replace(spec(), task="digits(train=9)")
    with pytest.raises(DataError, match="9 training images of 10 classes"):
        check_run(few, open_task(few.task))


def test_a_run_that_can_work_is_left_alone() -> None:
    before = torch.get_rng_state()
    check_run(spec("dropkey(0.1) + cb"), small_task())
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------------------------------------- the description
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": "20"}, "epochs is '20'; it must be a whole number"),
        ({"epochs": 2.5}, "epochs is 2.5; it must be a whole number"),
        ({"epochs": True}, "epochs is True; it must be a whole number"),
        ({"lr": "1e-3"}, "lr is '1e-3'; it must be a number"),
        ({"lr": math.nan}, "lr is nan; it must be a finite number"),
        ({"compile": 1}, "compile is 1; it must be true or false"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; it must be 'adam' or 'adamw'"),
        ({"ema": 1}, "ema is 1.0; it must be between 0 and 1"),
        ({"epoch": 3}, "A budget has no 'epoch'. Did you mean 'epochs'"),
    ],
)
def test_a_wrong_budget_is_refused_with_what_would_be_right(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Budget.from_dict(given)


def test_equal_descriptions_have_equal_keys_however_their_numbers_are_written() -> None:
    assert spec(lr=1, clip=2).key("x") == spec(lr=1.0, clip=2.0).key("x")
    assert spec().key("x") != spec().key("y")
    assert spec().key("x") != spec(seed=1).key("x")
