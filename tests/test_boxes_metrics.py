"""Average precision of boxes is pycocotools'."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.tasks.boxes.geometry import to_centres
from attemper.lab.tasks.boxes.metrics import Answer, answers, average_precision
from attemper.lab.tasks.registry import open_task
from box_rows import rows_of

pytestmark = pytest.mark.usefixtures("one_thread")


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
