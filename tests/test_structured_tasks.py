"""What tasks that are no classification share: reading a model, metrics under ranks, pictures, mistakes."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from attemper.lab.errors import DataError
from attemper.lab.report import by_class
from attemper.lab.report.entries import entries
from attemper.lab.study.cautions import cautions
from attemper.lab.study.result_shape import misshapen
from attemper.lab.study.summary import details_over_seeds
from attemper.lab.tasks.base import Tallied, measured, output_of
from attemper.lab.tasks.classification import Metrics, class_table
from attemper.lab.tasks.faults import UNREADABLE, Fault, Faults
from attemper.lab.tasks.pictures import (
    MOST_BYTES,
    Picture,
    beside,
    draw_boxes,
    image_of,
    paint_classes,
    paint_heat,
    picture,
    spread,
)
from attemper.lab.tasks.source import LazySource, MemorySource, Source
from attemper.lab.training.ranks import Ranks
from attemper.lab.training.validation import measure


# ------------------------------------------------------------------------------------------------------------- sources
def test_targets_of_any_shape_and_facts_follow_their_samples() -> None:
    images, boxes = torch.arange(5, dtype=torch.uint8)[:, None, None, None], torch.randn(5, 3, 2)
    facts = {"size": torch.arange(10).view(5, 2)}
    order = torch.tensor([3, 0])
    memory = MemorySource(images, boxes, facts=facts)
    lazy = LazySource(lambda index: images[index], boxes, workers=0, facts=facts)
    for source in (memory, lazy):
        taken = source.take(torch.tensor([4, 3, 0]))
        assert taken.facts["size"].tolist() == [[8, 9], [6, 7], [0, 1]]
        assert taken.to(torch.device("cpu")).facts["size"].tolist() == taken.facts["size"].tolist()
        ((pixels, targets),) = taken.take(torch.tensor([1, 2])).batches(torch.arange(2), 2)
        assert pixels.flatten().tolist() == order.tolist()
        assert torch.equal(targets, boxes[order])


# --------------------------------------------------------------------------------------------------- metrics and ranks
class Largest:
    """A metric that is no mean over samples: the largest of all predictions."""

    primary = "largest"

    def tally(self, model: nn.Module, source: Source) -> list[float]:
        return [float(model(images.float()).max()) for images, _ in source.batches(torch.arange(len(source)), 2)]

    def score(self, tallies: Sequence[Any]) -> Metrics:
        return {"largest": max(value for each in tallies for value in each)}

    def measure(self, model: nn.Module, source: Source) -> Metrics:
        return measured(self, model, source)


class OneOfTwo(Ranks):
    """A rank whose neighbour does the other part at once."""

    def __init__(self, rank: int, other: Any) -> None:
        super().__init__(rank, 2)
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other] if self.rank == 0 else [self.other, value]

    def from_main(self, make: Any) -> Any:
        return make()


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_ranks_score_the_tallies_of_all(samples: int) -> None:
    source = MemorySource(torch.arange(samples, dtype=torch.uint8).view(-1, 1, 1, 1), torch.zeros(samples))
    task: Any = Largest()
    assert isinstance(task, Tallied)
    whole = task.measure(nn.Identity(), source)
    assert whole == {"largest": samples - 1.0}
    second = torch.arange(samples)[Ranks(1, 2).part(samples)]
    other = [task.tally(nn.Identity(), source.take(second))] if len(second) else []
    assert measure(nn.Identity(), task, source, OneOfTwo(0, other)) == whole


def test_a_task_may_read_more_of_an_output_than_its_logits() -> None:
    @dataclasses.dataclass
    class Boxed:
        def read_output(self, out: Any) -> Tensor:
            return torch.cat([out["logits"], out["boxes"]], -1)

    out = {"logits": torch.ones(2, 3, dtype=torch.bfloat16), "boxes": torch.zeros(2, 4, dtype=torch.bfloat16)}
    boxed, plain = output_of(Boxed(), out), output_of(object(), out)  # type: ignore[arg-type]
    assert boxed.shape == (2, 7)
    assert boxed.dtype == torch.float32
    assert plain.shape == (2, 3)


# ------------------------------------------------------------------------------------------------------------ pictures
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 900), st.integers(1, 900), st.integers(0, 2**31 - 1))
def test_a_picture_is_never_larger_than_it_may_be(width: int, height: int, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    made = picture(Image.fromarray(noise), "noise")
    assert len(made.data) <= MOST_BYTES
    with Image.open(io.BytesIO(made.data)) as opened:
        assert opened.format in ("PNG", "JPEG")


def test_drawings_show_what_they_are_given() -> None:
    image = image_of(torch.zeros(3, 40, 60, dtype=torch.uint8))
    assert image.width / image.height == 1.5
    boxed = np.asarray(draw_boxes(image, [(0.25, 0.25, 0.75, 0.75)], [""], [(255, 0, 0)]))
    assert tuple(boxed[image.height // 4, image.width // 2]) == (255, 0, 0), "on the frame"
    assert tuple(boxed[image.height // 2, image.width // 2]) == (0, 0, 0), "inside of it"
    classes = torch.zeros(2, 2, dtype=torch.long)
    classes[1, 1] = 1
    painted = np.asarray(paint_classes(image, classes, nothing=0))
    assert painted[0, 0].sum() == 0
    assert painted[-1, -1].sum() > 0
    heat = np.asarray(paint_heat(image, torch.tensor([[0.0, 0.0], [0.0, 1.0]])))
    assert heat[-1, -1].sum() > heat[0, 0].sum()
    assert beside([image, image]).width > 2 * image.width


def test_the_samples_that_are_shown_are_spread_over_all() -> None:
    assert spread(100, 4) == [0, 33, 66, 99]
    assert spread(1, 4) == [0]
    assert spread(0, 4) == []


# ------------------------------------------------------------------------------------------------------------- details
def details(value: float, caption: str = "a") -> dict[str, Any]:
    shown = picture(Image.new("RGB", (4, 4)), caption).to_dict()
    rows = [("cat", 3, value), ("dog", 0, None)]
    return {"items": 7, "table": class_table("AP", "boxes", rows), "pictures": [shown]}


def test_details_of_seeds_become_one_table_and_the_pictures_of_the_first() -> None:
    found = details_over_seeds([{"test_details": details(0.2)}, {"test_details": details(0.4, "b")}])
    assert found is not None
    assert [row["value"] for row in found["table"]["rows"]] == [pytest.approx(0.3), None]
    assert [one["caption"] for one in found["pictures"]] == ["a"]
    assert found["items"] == 7


def test_tables_and_pictures_are_on_the_page_and_captions_are_text() -> None:
    row = {"name": "none", "recipe": "none", "details": details_over_seeds([{"test_details": details(0.2, "<b>")}])}
    ranked = entries({"recipes": [row, {**row, "name": "other", "recipe": "cb"}]})
    table, shown = by_class.by_class(ranked), by_class.pictures(ranked)
    assert table is not None
    assert shown is not None
    assert "cat" in table.body
    assert "20.0" in table.body
    assert shown.body.count("data:image/png;base64,") == 2
    assert "<b>" not in shown.body
    assert "&lt;b&gt;" in shown.body


@pytest.mark.parametrize(
    "wrong",
    [
        {"pictures": [{"caption": "a", "data": base64.b64encode(b"<svg onload=alert(1)>").decode()}]},
        {"pictures": [{"caption": "a", "data": "no base64 !"}]},
        {"table": {"metric": "AP", "counted": "boxes", "rows": [{"name": "cat", "count": -1, "value": 0.5}]}},
        {"items": "many"},
    ],
)
def test_details_that_no_run_writes_are_told(wrong: dict[str, Any]) -> None:
    assert misshapen({"test_details": details(0.5)}) is None
    assert misshapen({"test_details": wrong}) == "its test details is not what a run writes"
    row = {"name": "none", "recipe": "none", "details": {"pictures": wrong.get("pictures", [])}}
    shown = by_class.pictures(entries({"recipes": [row]}))
    assert shown is None or "svg" not in shown.body


def test_cautions_about_other_metrics_do_not_speak_of_accuracy() -> None:
    row = {"name": "none", "mean": 0.004, "diverged": 0, "details": {"items": 20}}
    first, few = cautions([row], row, 1, "AP")
    assert first.startswith("Near nothing: the baseline reaches 0.4 % AP")
    assert few.startswith("Few test items: 20")
    assert "One of them" not in few


# -------------------------------------------------------------------------------------------------------------- faults
NO_SIZE = Fault("box has no size", "boxes have no size")


def test_everything_that_is_wrong_is_told_at_once_in_bounded_length() -> None:
    faults = Faults()
    for number in range(1000):
        faults.add(NO_SIZE, f"box {number}")
    faults.add(UNREADABLE, "a\nb.jpg", "it is empty")
    with pytest.raises(DataError) as raised:
        faults.settle("'cells'", "refuse")
    text = str(raised.value)
    assert "1,000 boxes have no size" in text
    assert "and 990 more" in text
    assert "1 image cannot be read: 'a\\nb.jpg' (it is empty)" in text
    assert len(text) < 1000
    assert len(faults.settle("'cells'", "skip")) == 2
    assert Faults().settle("'cells'", "refuse") == []


def test_faults_of_several_files_are_told_together() -> None:
    whole, part = Faults(), Faults()
    part.add(NO_SIZE, "box 1")
    whole.merge(part, "train.json")
    assert whole.lines() == ["1 box has no size: 'train.json: box 1'"]
    with pytest.raises(DataError, match="cannot be used"):
        whole.refuse("'cells'")


def test_the_page_of_one_run_speaks_of_no_others() -> None:
    run = {"test_details": details(0.2)}
    row = {"name": "none", "recipe": "none", "details": details_over_seeds([run])}
    alone = entries({"recipes": [row]})
    table, shown = by_class.by_class(alone), by_class.pictures(alone)
    assert table is not None
    assert table.lead.startswith("AP class by class on the test set. ")
    assert shown is not None
    assert shown.lead == "Test samples that were chosen before any model saw them."
    other = {"name": "cb", "recipe": "cb", "details": details_over_seeds([run, run])}
    both = by_class.by_class(entries({"recipes": [row, other]}))
    assert both is not None
    assert "the mean over seeds: the baseline, and the best of the others" in both.lead


def test_a_picture_says_what_it_is_in_plain_data() -> None:
    assert Picture("a", b"xy").to_dict() == {"caption": "a", "data": "eHk="}
