"""What DeiT's recipe asks of a budget beside a teacher: repeated images, decay on matrices, and keys that stay."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attemper.errors import ParameterError
from attemper.lab.errors import PlanError
from attemper.lab.study.plan import Plan
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.data import RunData
from attemper.lab.training.learner import Learner, parameter_groups
from attemper.lab.training.loop import run
from attemper.lab.training.ranks import Ranks
from attemper.lab.training.spec import LATER, Budget, RunSpec
from attemper.lab.training.versions import BEFORE

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TASK = "digits(train=200, test=50)"
TINY = "vit-digits(depth=2, width=16, heads=2, mlp=16)"


def spec(recipe: str = "none", *, model: str = TINY, seed: int = 0, **budget: Any) -> RunSpec:
    chosen = Budget(**{"epochs": 2, "batch_size": 32, "lr": 3e-3, "warmup_epochs": 1, **budget})
    return RunSpec(task=TASK, model=model, recipe=recipe, seed=seed, budget=chosen)


# ------------------------------------------------------------------------------------------------ repeated augmentation
class Numbered:
    """A task whose images are their own numbers, so that a batch tells what it was made of."""

    def __init__(self, images: int) -> None:
        self.task: Task = open_task(TASK)
        train, held = self.task.split(0, 0.3)
        train = train.take(torch.arange(images) % len(train))
        train.images = torch.arange(images).view(-1, 1, 1, 1)  # type: ignore[attr-defined]
        self.parts = train, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def split(self, seed: int, validation: float) -> Any:
        return self.parts

    def to_input(self, stored: torch.Tensor) -> torch.Tensor:
        return stored


def numbers(data: RunData, epoch: int) -> list[list[int]]:
    return [inputs.flatten().tolist() for inputs, _ in data.epoch(epoch)]


@settings(max_examples=60, deadline=None)
@given(
    images=st.integers(6, 200),
    views=st.integers(1, 12),
    repeats=st.integers(1, 6),
    seed=st.integers(0, 3),
    accumulate=st.integers(1, 3),
)
def test_a_batch_holds_each_of_its_images_as_often_as_asked_and_an_epoch_keeps_its_length(
    images: int, views: int, repeats: int, seed: int, accumulate: int
) -> None:
    task = Numbered(images)
    size = views * repeats
    budget = {"batch_size": size, "accumulate": accumulate}
    data, once = (RunData(spec(seed=seed, repeats=n, **budget), task, CPU) for n in (repeats, 1))
    batches = numbers(data, 1)
    if size <= images:
        assert len(batches) == len(numbers(once, 1)) == once.batches_per_epoch
    drawn = [number for batch in batches for number in batch]
    assert len(drawn) == data.images_per_epoch
    assert all(drawn.count(number) == repeats for number in set(drawn)), "no image comes back in another batch"
    for batch in batches:
        assert all(batch.count(number) == repeats for number in batch)
        neighbours = zip(batch, batch[1:] + batch[:1], strict=True)
        assert len(set(batch)) == 1 or all(one != other for one, other in neighbours), (
            "mixup would blend it with itself"
        )
    assert numbers(data, 1) == batches, "a function of seed and epoch"
    assert len(set(drawn)) < 8 or numbers(data, 2) != batches


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(1, 5), repeats=st.integers(1, 4), augment=st.sampled_from(["none", "crop-flip(0)"]))
def test_ranks_share_the_same_batches_of_repeated_images(ranks: int, repeats: int, augment: str) -> None:
    task = Numbered(60)
    chosen = spec(batch_size=5 * repeats, repeats=repeats, augment=augment)
    parts = [numbers(RunData(chosen, task, CPU, Ranks(rank, ranks)), 3) for rank in range(ranks)]
    together = [list(itertools.chain(*batch)) for batch in zip(*parts, strict=True)]
    assert together == numbers(RunData(chosen, task, CPU), 3)


def test_the_copies_of_an_image_are_augmented_differently_and_have_its_label() -> None:
    data = RunData(spec(batch_size=30, repeats=3, augment="resized-crop"), open_task(TASK), CPU)
    inputs, targets = next(data.epoch(1))
    copies = inputs.view(3, 10, -1)
    pairs = itertools.combinations(copies, 2)
    equal = sum(torch.equal(one[i], other[i]) for one, other in pairs for i in range(10))
    assert equal < 6, "of 30; two crops of 8 × 8 pixels can be the same by chance"
    assert (targets.view(3, 10) == targets[:10]).all()
    assert run(spec(batch_size=30, repeats=3, augment="crop-flip"), open_task(TASK))["status"] == "finished"


def test_batches_that_cannot_hold_whole_repeats_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"batch_size is 1024, .* 3 times .* such as 1026"):
        Budget(batch_size=1024, repeats=3)
    with pytest.raises(ParameterError, match="repeats is 0; it must be at least 1"):
        Budget(repeats=0)
    with pytest.raises(ParameterError, match="repeats is 150; it must be at most the number of training samples"):
        RunData(spec(batch_size=150, repeats=150), open_task(TASK), CPU)
    plan = {"task": "digits", "model": "m", "recipes": ["cb"], "budget": {"repeats": 3, "batch_size": 64}}
    with pytest.raises(PlanError, match="batch_size is 64") as caught:
        Plan.from_dict(plan)
    assert caught.value.path == ("budget", "batch_size")
    assert Plan.from_dict({**plan, "budget": {"repeats": 3, "batch_size": 66}}).budget.repeats == 3


# --------------------------------------------------------------------------------------------------------- weight decay
def test_decay_on_matrices_leaves_biases_norms_and_what_the_model_names_alone() -> None:
    model = Learner(spec("cb(cb_s)"), open_task(TASK), CPU).model
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, alone = ([names[id(p)] for p in group["params"]] for group in parameter_groups(model, "matrices", {}))
    assert set(decayed) | set(alone) == set(names.values())
    assert {"cls_token", "pos_embed"} <= set(alone)
    for name in decayed:
        assert name.endswith("weight")
        assert "norm" not in name
    assert all(
        name.endswith("bias") or "norm" in name or "token" in name or "pos" in name or "attemper" in name
        for name in alone
    )
    (everything,) = parameter_groups(model, "all", {})
    assert [names[id(p)] for p in everything["params"]] == list(names.values()), "as it always was"
    (only,) = parameter_groups(nn.Linear(2, 2, bias=False), "matrices", {})
    assert "weight_decay" not in only


def test_decay_on_matrices_shrinks_them_and_nothing_else() -> None:
    learner = Learner(spec(optimizer="adamw", weight_decay=0.5, decay="matrices"), open_task(TASK), CPU)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner.set_lr(0.1)
    for parameter in learner.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.update()
    for name, parameter in learner.model.named_parameters():
        kept = 1.0 if parameter.ndim == 1 or name in ("cls_token", "pos_embed") else 0.95
        assert torch.allclose(parameter, kept * before[name]), name


def test_an_unknown_decay_is_refused() -> None:
    with pytest.raises(ParameterError, match="decay is 'some'; it must be 'all' or 'matrices'"):
        Budget(decay="some")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------- keys
def test_runs_have_the_keys_that_they_always_had() -> None:
    plain = RunSpec(task="digits", model="vit-digits", recipe="none", seed=0, budget=Budget(), versions=BEFORE)
    assert plain.key("data") == "b27493c4fd1d506f5ec2"
    budget = Budget(epochs=40, optimizer="adamw", clip=1, augment="crop-flip")
    other = RunSpec(
        task="cifar10", model="vit-cifar", recipe="dropkey(0.1)", seed=3, budget=budget, evaluate=("calibration",)
    )
    assert dataclasses.replace(other, versions=BEFORE).key("data") == "0c306d8834be0873f808"


def test_what_a_budget_did_not_have_before_is_said_only_where_it_says_something() -> None:
    assert not set(Budget().to_dict()) & set(LATER)
    assert set(LATER) <= {field.name for field in dataclasses.fields(Budget)}
    full = Budget(batch_size=126, repeats=3, decay="matrices", teacher="vit-digits", distillation="soft")
    assert full.to_dict() == Budget().to_dict() | {
        "batch_size": 126,
        "repeats": 3,
        "decay": "matrices",
        "teacher": "vit-digits",
        "distillation": "soft",
    }
    assert Budget.from_dict(full.to_dict()) == full
    keys = {spec(**{"batch_size": 126, **change}).key("x") for change in ({}, {"repeats": 3}, {"decay": "matrices"})}
    assert len(keys) == 3
    plan = Plan.from_dict({"task": "t", "model": "m", "recipes": ["cb"], "budget": full.to_dict()})
    assert Plan.from_dict(plan.to_dict()) == plan
