"""Boxes: they are compared, matched and measured as the published definitions say, and padding has no influence."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision import ops

import attemper
from attemper.errors import ParameterError
from attemper.lab.cli.estimate import EstimateCommand
from attemper.lab.models.registry import build_model
from attemper.lab.models.starting import start_from
from attemper.lab.study.planfile import load_plan
from attemper.lab.tasks.base import Structured, Tallied, Task
from attemper.lab.tasks.boxes import matching
from attemper.lab.tasks.boxes.augmenting import box_augmentation
from attemper.lab.tasks.boxes.drawing import where_queries_look
from attemper.lab.tasks.boxes.geometry import generalised_overlap, overlap, to_centres, to_corners
from attemper.lab.tasks.boxes.metrics import Answer, answers, average_precision
from attemper.lab.tasks.boxes.shape import AREA, BOX, CLASS, COLUMNS, CROWD, NONE, BoxShape
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.data import RunData
from attemper.lab.training.spec import Budget, RunSpec

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = BoxShape(size=48, classes=3, boxes=4)
BACKBONE = "detr.model.backbone.model."
MODELS = ("anchor-detr(width=32, depth=2, patch=8)", "detr(width=32, depth=2, heads=4, mlp=32, queries=6)")


def some_boxes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(count, 2, generator=generator) * 0.7
    return torch.cat([first, first + 0.02 + torch.rand(count, 2, generator=generator) * 0.28], -1)


def rows_of(boxes: list[tuple[int, tuple[float, float, float, float]]], most: int = 4) -> Tensor:
    """Targets of one image."""
    rows = torch.zeros(most, COLUMNS)
    rows[:, CLASS] = NONE
    for at, (label, corners) in enumerate(boxes):
        rows[at, CLASS], rows[at, BOX] = label, torch.tensor(corners)
        rows[at, AREA] = 100.0
    return rows


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


# ------------------------------------------------------------------------------------------------------------- metrics
def truth(
    boxes: list[list[float]], labels: list[int], areas: list[float] | None = None, crowds: Any = None
) -> dict[str, Tensor]:
    corners = torch.tensor(boxes).view(-1, 4)
    usual = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    return {
        "boxes": corners,
        "labels": torch.tensor(labels, dtype=torch.int64),
        "area": usual if areas is None else torch.tensor(areas),
        "iscrowd": torch.tensor(crowds or [0] * len(labels), dtype=torch.int64),
    }


def guess(boxes: list[list[float]], scores: list[float], labels: list[int]) -> dict[str, Tensor]:
    return {
        "boxes": torch.tensor(boxes).view(-1, 4),
        "scores": torch.tensor(scores),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }


def test_average_precision_by_hand() -> None:
    """One object. A surer answer is wrong, the other right: at every recall the precision is one half."""
    there = truth([[10.0, 10.0, 50.0, 50.0]], [0])
    found = guess([[60.0, 60.0, 100.0, 100.0], [10.0, 10.0, 50.0, 50.0]], [0.9, 0.6], [0, 0])
    metrics, by_class = average_precision([Answer(found, there)], by_class=True)
    assert metrics == {name: pytest.approx(0.5) for name in ("AP", "AP50", "AP75", "AP medium")} | {
        "AP small": None,
        "AP large": None,
    }
    assert by_class == {0: pytest.approx(0.5)}
    off = guess([[10.0, 10.0, 50.0, 40.0]], [0.9], [0])  # three quarters of it: right at 0.5 … 0.75, six of ten
    metrics, _ = average_precision([Answer(off, there)])
    assert metrics["AP"] == pytest.approx(0.6)
    assert (metrics["AP50"], metrics["AP75"]) == (1.0, 1.0)
    assert average_precision([Answer(guess([], [], []), truth([], []))])[0]["AP"] is None


def made_up(seed: int) -> list[Answer]:
    """Images with objects of all sizes, crowds among them, and answers that are near, doubled, or wrong."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    found = []
    for _ in range(12):
        count = int(draw(1) * 6)
        first = draw(count, 2) * 300
        boxes = torch.cat([first, first + 5 + draw(count, 2) ** 2 * 200], -1)
        labels = (draw(count) * 3).long()
        crowd = (draw(count) < 0.15).long()
        area = (boxes[:, 2:] - boxes[:, :2]).prod(-1) * (0.5 + 0.5 * draw(count))
        near = boxes.repeat(2, 1) + (draw(2 * count, 4) - 0.5) * 14
        near[:, 2:] = torch.maximum(near[:, 2:], near[:, :2] + 1)
        named = torch.where(draw(2 * count) < 0.8, labels.repeat(2), (draw(2 * count) * 3).long())
        answer = {"boxes": near, "scores": draw(2 * count), "labels": named}
        found.append(Answer(answer, {"boxes": boxes, "labels": labels, "area": area, "iscrowd": crowd}))
    return found


def by_pycocotools(given: list[Answer]) -> list[float]:
    """The reference implementation, by itself: AP, AP50, AP75, small, medium, large."""
    from pycocotools.coco import COCO  # type: ignore[import-untyped]
    from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped]

    def sides(corners: list[float]) -> list[float]:
        return [corners[0], corners[1], corners[2] - corners[0], corners[3] - corners[1]]

    annotations: list[dict[str, Any]] = []
    results = []
    for number, each in enumerate(given, 1):
        true = each.true
        for box, label, area, crowd in zip(
            *(true[n].tolist() for n in ("boxes", "labels", "area", "iscrowd")), strict=True
        ):
            entry = {"id": len(annotations) + 1, "image_id": number, "category_id": label, "bbox": sides(box)}
            annotations.append({**entry, "area": area, "iscrowd": crowd})
        for box, score, label in zip(*(each.found[n].tolist() for n in ("boxes", "scores", "labels")), strict=True):
            results.append({"image_id": number, "category_id": label, "bbox": sides(box), "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        held = COCO()
        images = [{"id": number} for number in range(1, len(given) + 1)]
        held.dataset = {"images": images, "annotations": annotations, "categories": [{"id": at} for at in range(3)]}
        held.createIndex()
        evaluation = COCOeval(held, held.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(value) for value in evaluation.stats[:6]]


@pytest.mark.parametrize("seed", range(3))
def test_the_metrics_are_those_of_pycocotools(seed: int) -> None:
    given = made_up(seed)
    metrics, by_class = average_precision(given, by_class=True)
    reference = by_pycocotools(given)
    assert list(metrics.values()) == [pytest.approx(value, abs=1e-6) if value >= 0 else None for value in reference]
    assert metrics["AP"] == pytest.approx(sum(value or 0 for value in by_class.values()) / len(by_class), abs=1e-6)


def test_answers_are_in_pixels_of_the_file() -> None:
    """A canvas holds the whole image: its longer side is that of the canvas."""
    true = (0.0, 0.0, 0.5, 0.25)
    packed = torch.cat([torch.tensor([0.0, 9.0, 0.0, 0.0]), to_centres(torch.tensor(true))])[None, None]
    (answer,) = answers(packed, rows_of([(1, true)])[None], torch.tensor([[640, 480]]))
    assert answer.found["boxes"].tolist() == [[0.0, 0.0, 320.0, 160.0]]
    assert answer.true["boxes"].tolist() == answer.found["boxes"].tolist()
    assert (answer.found["labels"].tolist(), answer.true["labels"].tolist()) == ([1], [1])


def test_a_missing_package_is_named_before_any_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(ParameterError, match=r"pip install 'attemper\[detection\]'"):
        open_task("boxes(train=4, test=2)")


# --------------------------------------------------------------------------------------------------------------- plans
def test_the_plans_of_detr_are_of_one_kind_and_can_be_measured_without_coco() -> None:
    plans = Path(__file__).parent.parent / "plans"
    published, smoke = load_plan(plans / "detr-coco.yaml"), load_plan(plans / "detr-smoke.yaml")
    assert [row.value for row in published.published] == [41.9, 42.2, 42.9]
    assert [entry.recipe for entry in published.recipes] == [entry.recipe for entry in smoke.recipes]
    box_augmentation(published.budget.augment)
    estimate = EstimateCommand(plan=plans / "detr-coco.yaml", images=5000, image_size=64)
    assert estimate._plan().task == "boxes(size=64, train=5000, test=200)"
    assert len(estimate._plan().recipes) == 3


def test_a_million_made_up_images_are_a_few_that_stand_for_all() -> None:
    task = open_task("boxes(train=1000000, test=4)")
    train, validation = task.split(0, 0.1)
    assert (len(train), len(validation)) == (900_000, 100_000)
    images, rows = next(train.batches(torch.tensor([0, 899_999]), 2))
    assert images.shape == (2, 4, 48, 48)
    assert rows.shape == (2, 3, COLUMNS)


# -------------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize("model", MODELS)
def test_a_model_gives_scores_and_boxes_for_every_query_and_layer(model: str) -> None:
    built = build_model(model, SHAPE).train()
    inputs, _ = SHAPE.example(2)
    out = built(inputs)
    queries = out["logits"].shape[1]
    assert out["logits"].shape == (2, queries, 4)
    assert out["layers"].shape[2:] == (queries, 8)
    assert bool(((out["boxes"] >= 0) & (out["boxes"] <= 1)).all())
    torch.testing.assert_close(out["layers"][:, -1], torch.cat([out["logits"], out["boxes"]], -1))
    assert set(built.eval()(inputs)) == {"logits", "boxes"}
    assert all(p.requires_grad for p in built.parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("anchor-detr(patch=7)", "patch is 7; it must be 4, 8, 16, 32 or 64"),
        ("anchor-detr(patch=32)", "a canvas of 48 × 48 cannot be cut"),
        ("anchor-detr(width=36, heads=4)", "it must be a multiple of 8"),
        ("detr(width=30)", "must be a multiple of the heads"),
        ("detr(backbone=resnet19)", "timm has no such model. Did you mean 'resnet"),
        ("detr(dropout=2)", "from 0 to below 1"),
        ("detr(backbone=regnety_002, frozen=true)", "activations in its batch norms"),
        ("vit-cifar", "These models do: anchor-detr, detr"),
    ],
)
def test_a_model_that_cannot_be_is_refused(model: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(model, SHAPE)


def test_detr_takes_a_trained_backbone_and_freezes_it_as_published() -> None:
    import timm

    trained = timm.create_model("resnet10t")
    for norm in trained.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]
    small = "detr(backbone=resnet10t, width=32, depth=1, heads=4, mlp=32, queries=6"
    for text in (f"{small})", f"{small}, frozen=true)"):
        model = build_model(text, SHAPE)
        report = start_from(model, trained.state_dict(), source="a file", classes=3)
        given = dict(trained.named_parameters())
        ours = {
            name.removeprefix(BACKBONE): value for name, value in model.named_parameters() if name.startswith(BACKBONE)
        }
        assert len(report.loaded) > len(ours) > 10
        assert all(torch.equal(value, given[name]) for name, value in ours.items())
        assert model.eval()(SHAPE.example(1)[0])["logits"].shape == (1, 6, 4)
    assert not all(p.requires_grad for p in model.parameters())


def test_methods_on_the_image_grid_act_where_keys_lie_on_it() -> None:
    grid, queries = (build_model(model, SHAPE).train() for model in MODELS)
    inputs, _ = SHAPE.example(2)
    attemper.apply(grid, "dropkey(0.3, structure=block, w=1) + blur(grid=2d)")
    assert torch.isfinite(grid(inputs)["layers"]).all()
    with pytest.raises(ParameterError, match=r"none is known for 'detr\.model\.decoder\.layers\.0\.self_attn'"):
        attemper.apply(queries, "dropkey(0.3, structure=block, w=1)")
    attemper.apply(queries, "dropkey(0.3, structure=block, w=1)", targets=["*.encoder.*", "*.encoder_attn"])
    assert torch.isfinite(queries(inputs)["layers"]).all()


@pytest.mark.parametrize("model", MODELS)
def test_the_attention_that_is_drawn_is_the_one_that_looks_at_the_image(model: str) -> None:
    built = build_model(model, SHAPE).eval()
    inputs, _ = SHAPE.example(2)
    queries = torch.zeros(2, dtype=torch.int64)
    heat = where_queries_look(built, inputs, queries)
    assert heat is not None
    torch.testing.assert_close(heat.sum((1, 2)), torch.ones(2))
    assert float(heat[1, :, math.ceil(heat.shape[-1] * 3 / 4) :].sum()) == 0, "nobody looks at padding"
    assert where_queries_look(torch.nn.Identity(), inputs, queries) is None


RECIPES = (
    "none", "dropkey(0.3)", "dropkey(0.3, share=queries)", "dropkey(0.3, structure=cross)", "dropattention(0.3)",
    "hardmask(k=2)", "blur(w=3)", "cb", "cb(variant=cb_s)", "graying(where=tokens)", "drophead(0.4)", "droppath(0.3)",
    "ffdropout(0.3)", "dropconnect(0.3)", "skipless(skip=attention)", "layerdrop(0.3)", "explicit(v=0.1, ff=0.1)",
    "consistency + dropkey(0.3)",
)  # fmt: skip


QUICK = ("none", "dropkey(0.3)", "cb", "explicit(v=0.1, ff=0.1)")
"""With DETR; the others are slow there, and are tried with the small model."""


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(model, recipe, marks=[pytest.mark.slow] * (model == MODELS[1] and recipe not in QUICK))
        for model in MODELS
        for recipe in RECIPES
        if not ("structure" in recipe and model == MODELS[1])  # the queries of DETR lie on no grid
    ],
)
def test_padding_has_no_influence(model: str, recipe: str) -> None:
    """Changing what is behind the mask changes nothing, in training too; changing what is before it does."""
    torch.manual_seed(0)
    built = build_model(model, SHAPE).train()
    tempered = attemper.apply(built, recipe)
    inputs, _ = SHAPE.example(2)

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        built.load_state_dict(state)  # batch norms count what they have seen
        packed: Tensor = built(x)["layers"]
        return packed.detach()

    state = {name: value.clone() for name, value in built.state_dict().items()}
    tempered.progress(0.0, 1)
    before = run(inputs)
    hidden, shown = inputs.clone(), inputs.clone()
    hidden[1, :3, :, 36:] = torch.randn(3, 48, 12)
    shown[1, :3, :, :12] = torch.randn(3, 48, 12)
    assert torch.equal(run(hidden), before)
    assert not torch.equal(run(shown)[1], before[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_places_that_are_padding_have_no_influence_behind_the_convolutions(recipe: str) -> None:
    """The attention itself leaves them out: their features may be anything."""
    torch.manual_seed(0)
    built: Any = build_model(MODELS[0], SHAPE).train()
    attemper.apply(built, recipe)
    tokens = torch.randn(2, 36, 32)
    hidden = torch.zeros(2, 36, dtype=torch.bool)
    hidden[1, 20:] = True

    def run(x: Tensor) -> Tensor:
        features.clear()
        features.append(x)
        torch.manual_seed(1)
        packed: Tensor = built(inputs)["layers"]
        return packed.detach()

    features: list[Tensor] = []
    inputs = torch.zeros(2, 4, 48, 48)
    inputs[:, 3] = (~hidden).float().view(2, 6, 6).repeat_interleave(8, 1).repeat_interleave(8, 2)
    handle = built.input_norm.register_forward_pre_hook(lambda module, args: (features[0],))
    before = run(tokens)
    changed = tokens.clone()
    changed[hidden] = torch.randn(int(hidden.sum()), 32)
    after = run(changed)
    handle.remove()
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    changed[1, 0] += 1.0
    assert not torch.allclose(before, run(changed), atol=1e-5)


def test_a_place_that_is_padding_answers_nothing() -> None:
    built = build_model(MODELS[0], SHAPE).eval()
    inputs, _ = SHAPE.example(2)
    found = {name: value.detach() for name, value in built(inputs).items()}
    sure = found["logits"].softmax(-1)[1, :, :-1].max(-1).values.view(6, 6)
    assert float(sure[:, 5].max()) < 1e-9
    assert float(sure[:, 0].min()) > 1e-9


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
