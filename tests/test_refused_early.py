"""What cannot work, or means nothing, is refused by name before any training."""

from __future__ import annotations

import pytest

from attemper.errors import ParameterError
from attemper.lab.call_syntax import parse_call, render_call
from attemper.lab.tasks.mae.shape import MaskedShape
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.check import check_run
from attemper.lab.training.spec import Budget, RunSpec

DIGITS = "digits(train=40, test=10)"
ENCODER = "vit-mae(width=16, heads=2, depth=1, mlp=32)"


def spec(task: str, model: str, recipe: str = "none") -> RunSpec:
    return RunSpec(task=task, model=model, recipe=recipe, seed=0, budget=Budget(epochs=1, batch_size=4))


@pytest.mark.parametrize("recipe", ["dropkey(0.1) + consistency", "dropkey(0.1) + rdrop"])
def test_comparing_probabilities_is_refused_where_there_are_no_classes(recipe: str) -> None:
    with pytest.raises(ParameterError, match=r"'mae:digits.*' predicts numbers. Leave it out of pre-training"):
        check_run(spec(f"mae:{DIGITS}", ENCODER, recipe), open_task(f"mae:{DIGITS}"))
    check_run(spec(DIGITS, ENCODER, recipe), open_task(DIGITS))


@pytest.mark.parametrize("side", [29, 31])
def test_images_that_only_pixels_divide_are_refused_unless_that_is_meant(side: int) -> None:
    with pytest.raises(
        ParameterError, match=rf"images of {side} × {side} can be cut into no patches but single pixels"
    ):
        open_task(f"mae:noise(size={side}, train=20, test=4)")
    shape = open_task(f"mae:noise(size={side}, train=20, test=4, patch=1)").shape
    assert isinstance(shape, MaskedShape)
    assert shape.patches == side**2


@pytest.mark.slow
def test_a_backbone_that_asserts_its_size_is_refused_with_what_it_says() -> None:
    task = "boxes(train=8, test=4)"
    model = "detr(backbone=vit_tiny_patch16_224, width=16, depth=1, heads=2, mlp=16, queries=5)"
    with pytest.raises(ParameterError, match=r"does not run on inputs of 3 × 48 × 48.*doesn't match model \(224\)"):
        check_run(spec(task, model), open_task(task))


def test_names_with_dots_are_options_as_timm_writes_them() -> None:
    name, options = parse_call("detr(backbone=resnet50.a1_in1k, width=256)")
    assert options == {"backbone": "resnet50.a1_in1k", "width": 256}
    assert parse_call(render_call(name, options)) == (name, options)
    with pytest.raises(ParameterError, match="something else before them"):
        parse_call("detr(backbone=f(1).x)")
