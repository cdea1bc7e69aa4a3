"""Boxes: they are compared and matched as the published definitions say, and a task of them is one like any other."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision import ops

from attemper.lab.cli.estimate import EstimateCommand
from attemper.lab.study.planfile import load_plan
from attemper.lab.tasks.base import Structured, Tallied, Task
from attemper.lab.tasks.boxes import matching
from attemper.lab.tasks.boxes.augmenting import box_augmentation
from attemper.lab.tasks.boxes.geometry import generalised_overlap, overlap, to_centres, to_corners
from attemper.lab.tasks.boxes.shape import CLASS, COLUMNS, CROWD
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.data import RunData
from attemper.lab.training.spec import Budget, RunSpec
from box_rows import rows_of

pytestmark = pytest.mark.usefixtures("one_thread")


def some_boxes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(count, 2, generator=generator) * 0.7
    return torch.cat([first, first + 0.02 + torch.rand(count, 2, generator=generator) * 0.28], -1)


def packed_answers(samples: int, layers: int, queries: int, classes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(samples, layers, queries, classes + 1, generator=generator)
    boxes = to_centres(some_boxes(samples * layers * queries, seed).view(samples, layers, queries, 4))
    return torch.cat([scores, boxes], -1)


# ------------------------------------------------------------------------------------------------------------ geometry
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10**6))
def test_overlaps_are_torchvisions(a: int, b: int, seed: int) -> None:
    one, other = some_boxes(a, seed), some_boxes(b, seed + 1)
    found, _ = overlap(one[:, None], other[None])
    torch.testing.assert_close(found, ops.box_iou(one, other))
    torch.testing.assert_close(
        generalised_overlap(one[:, None], other[None]), ops.generalized_box_iou(one, other), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(to_corners(to_centres(one)), one)
    torch.testing.assert_close(to_centres(one), ops.box_convert(one, "xyxy", "cxcywh"))


# ------------------------------------------------------------------------------------------------- matching and loss
@settings(max_examples=15, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_no_other_matching_is_cheaper(queries: int, boxes: int, seed: int) -> None:
    boxes = min(boxes, queries)
    packed = packed_answers(1, 1, queries, 3, seed)
    targets = rows_of([(at % 3, tuple(box.tolist())) for at, box in enumerate(some_boxes(boxes, seed + 7))])[None]
    cost = matching.costs(packed, targets)[0, 0, :, :boxes]
    found = matching.match(packed, targets)
    paid = float(cost[found.query, found.row].sum())
    cheapest = min(
        sum(float(cost[query, row]) for row, query in enumerate(chosen))
        for chosen in itertools.permutations(range(queries), boxes)
    )
    assert paid == pytest.approx(cheapest, abs=1e-4)
    assert sorted(found.row.tolist()) == list(range(boxes))


def test_the_loss_is_what_the_paper_says() -> None:
    """Two queries and one box: computed step by step."""
    targets = rows_of([(1, (0.2, 0.2, 0.6, 0.6))])[None]
    scores = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])  # the second query names the right class
    boxes = torch.tensor([[0.1, 0.1, 0.1, 0.1], [0.5, 0.4, 0.4, 0.4]])
    packed = torch.cat([scores, boxes], -1)[None, None]
    wrong, right = -scores.log_softmax(-1)[0, 2], -scores.log_softmax(-1)[1, 1]
    classes = (0.1 * wrong + right) / (1 + 0.1 * 1)
    distance = 0.1  # the centre is 0.1 too far to the right
    apart = 1 - ops.generalized_box_iou(torch.tensor([[0.3, 0.2, 0.7, 0.6]]), torch.tensor([[0.2, 0.2, 0.6, 0.6]]))
    wanted = classes + 5 * distance + 2 * apart.item()
    assert float(matching.loss(packed, targets, per_image=1.0)) == pytest.approx(float(wanted), rel=1e-5)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6))
def test_the_loss_of_a_batch_is_the_mean_over_its_samples(first: int, second: int, seed: int) -> None:
    """So several processes that share a batch have the gradient of the whole."""
    packed = packed_answers(first + second, 2, 6, 3, seed)
    targets = torch.stack(
        [rows_of([(0, tuple(b.tolist())) for b in some_boxes(at % 4, seed)]) for at in range(len(packed))]
    )
    loss = lambda part: float(matching.loss(packed[part], targets[part], 1.7))  # noqa: E731
    parts = first * loss(slice(0, first)) + second * loss(slice(first, None))
    assert loss(slice(None)) == pytest.approx(parts / (first + second), rel=1e-5)


def test_crowds_and_rows_that_are_no_box_are_never_matched() -> None:
    targets = rows_of([(0, (0.1, 0.1, 0.4, 0.4)), (1, (0.5, 0.5, 0.9, 0.9))])[None]
    targets[0, 1, CROWD] = 1.0
    assert matching.match(packed_answers(1, 1, 6, 3, 0), targets).row.tolist() == [0]
    nothing = rows_of([])[None]
    loss = matching.loss(packed_answers(1, 1, 6, 3, 0).requires_grad_(), nothing, 1.0)
    loss.backward()
    assert torch.isfinite(loss)


def test_predictions_that_are_no_numbers_give_a_loss_that_is_none() -> None:
    """A run that diverges is a result; the matching must not end it with an error."""
    packed = packed_answers(1, 1, 6, 3, 0)
    packed[..., 0] = torch.nan
    assert not torch.isfinite(matching.loss(packed, rows_of([(0, (0.1, 0.1, 0.4, 0.4))])[None], 1.0))


def test_recall_counts_boxes_with_the_right_class_in_the_right_place() -> None:
    true = [(0, (0.1, 0.1, 0.5, 0.5)), (1, (0.5, 0.5, 0.9, 0.9))]
    targets = torch.stack([rows_of(true), rows_of([])])
    answer = torch.full((2, 1, 2, 8), -5.0)
    answer[..., -4:] = to_centres(torch.tensor([true[0][1], true[1][1]]))
    answer[:, 0, 0, 0] = answer[:, 0, 1, 2] = 5.0  # the second box is named wrongly
    assert float(matching.recall(answer, targets)) == pytest.approx((0.5 + 1.0) / 2)


# --------------------------------------------------------------------------------------------------------------- plans
def test_the_plans_of_detr_are_of_one_kind_and_can_be_measured_without_coco() -> None:
    plans = Path(__file__).parent.parent / "plans"
    published, smoke = load_plan(plans / "detr-coco.yaml"), load_plan(plans / "detr-smoke.yaml")
    assert [row.value for row in published.published] == [41.9, 42.2, 42.9]
    assert [entry.recipe for entry in published.recipes] == [entry.recipe for entry in smoke.recipes]
    box_augmentation(published.budget.augment)
    estimate = EstimateCommand(plan=plans / "detr-coco.yaml", images=5000, image_size=64)
    assert estimate.planned().task == "boxes(size=64, train=5000, test=200)"
    assert len(estimate.planned().recipes) == 3


def test_a_million_made_up_images_are_a_few_that_stand_for_all() -> None:
    task = open_task("boxes(train=1000000, test=4)")
    train, validation = task.split(0, 0.1)
    assert (len(train), len(validation)) == (900_000, 100_000)
    images, rows = next(train.batches(torch.tensor([0, 899_999]), 2))
    assert images.shape == (2, 4, 48, 48)
    assert rows.shape == (2, 3, COLUMNS)


# ---------------------------------------------------------------------------------------------------------- the task
def test_made_up_boxes_are_a_task_with_all_that_others_have() -> None:
    task = open_task("boxes(train=30, test=10)")
    assert isinstance(task, Task)
    assert isinstance(task, Structured)
    assert isinstance(task, Tallied)
    train, validation = task.split(seed=0, validation=0.2)
    assert (len(train), len(validation), len(task.test())) == (24, 6, 10)
    assert str(task.shape) == "3 × 48 × 48 at most and of boxes of 3 classes"
    again = open_task("boxes(train=30, test=10)")
    assert again.fingerprint == task.fingerprint != open_task("boxes(train=31, test=10)").fingerprint
    other, _ = task.split(seed=1, validation=0.2)
    assert not torch.equal(other.targets, train.targets)
    images, rows = next(train.batches(torch.arange(24), 24))
    covered = task.to_input(images)
    assert bool((covered[:, :3][images[:, 3:].expand(-1, 3, -1, -1) == 0] == 0).all())
    assert float(rows[rows[..., CLASS] >= 0][:, 3:5].max()) <= 1.0


def test_every_recipe_gets_the_same_batches() -> None:
    task = open_task("boxes(train=20, test=4)")
    budget = Budget(epochs=1, batch_size=8, augment="flip+crop+scale+zoom-out+photometric")
    runs = [
        RunData(
            RunSpec(task=task.name, model="anchor-detr", recipe=recipe, seed=0, budget=budget),
            task,
            torch.device("cpu"),
        )
        for recipe in ("none", "cb")
    ]
    torch.manual_seed(0)
    first = list(runs[0].epoch(1))
    torch.manual_seed(5)
    for (images, rows), (others, their_rows) in zip(first, runs[1].epoch(1), strict=True):
        assert torch.equal(images, others)
        assert torch.equal(rows, their_rows)
    (after,) = runs[0].epoch(1, after=len(first) - 1)
    assert torch.equal(after[0], first[-1][0])


def test_images_that_the_cpu_augments_stay_there_until_they_are_a_batch() -> None:
    task, elsewhere = open_task("boxes(train=20, test=4)"), torch.device("meta")
    budget = Budget(epochs=1, batch_size=8, augment="flip+crop")
    spec = RunSpec(task=task.name, model="anchor-detr", recipe="none", seed=0, budget=budget)
    data = RunData(spec, task, elsewhere)
    assert {x.device.type for x in next(data.train.batches(torch.arange(2), 2))} == {"cpu"}
    for batch in (*data.epoch(1), next(data.validation.batches(torch.arange(2, device="meta"), 2))):
        assert {x.device for x in batch} == {elsewhere}
    assert data.measured_train().targets.device == elsewhere
    plain = RunData(dataclasses.replace(spec, budget=dataclasses.replace(budget, augment="none")), task, elsewhere)
    assert plain.train.targets.device == elsewhere
