"""Masked pre-training: hidden patches stay hidden, every recipe sees the same ones, and what is learnt serves later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attemper
from attemper.errors import AttemperError, ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import Illustrated, Task
from attemper.lab.tasks.mae.masks import drawn_ranks, ranks_of
from attemper.lab.tasks.mae.shape import MaskedShape
from attemper.lab.tasks.mae.task import MaskedTask
from attemper.lab.tasks.registry import open_task, verify
from attemper.lab.training import loop
from attemper.lab.training.data import RunData
from attemper.lab.training.initial import initial_model
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from endings import assert_same_end, timeless

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = "mae:digits(train=200, test=60)"
MODEL = "vit-mae(width=16, heads=2, depth=2, mlp=32, decoder_depth=1)"
ENCODER = "vit-mae(width=16, heads=2, depth=2, mlp=32)"
SHAPE = MaskedShape(channels=3, side=12, patch=3, visible=6)
RECIPES = [
    "none",
    "dropkey(0.3)",
    "hardmask(0.5, k=3)",
    "blur(2.0)",
    "dropattention(0.3)",
    "drophead(0.3)",
    "layerdrop(0.3)",
    "droppath(0.3)",
    "ffdropout(0.2)",
    "dropconnect(0.2)",
    "skipless(mlp)",
    "cb",
    "cb(cb_s, branch=both)",
    "graying",
    "graying(kind=svd)",
    "graying(where=tokens)",
    "explicit(q=1e-4, k=1e-4, v=5e-4, av=1e-4, ff=5e-4)",
    "arora(v=5e-4, ff=5e-4)",
    "dropkey(0.1) + consistency",
    "dropkey(0.1) + rdrop",
]


def opened(text: str = TASK) -> MaskedTask:
    task = open_task(text)
    assert isinstance(task, MaskedTask)
    return task


def small(shape: Any = SHAPE) -> Any:
    torch.manual_seed(1)
    return build_model(MODEL, shape).train()


def spec(recipe: str = "dropkey(0.2)", task: str = TASK, model: str = MODEL, **budget: Any) -> RunSpec:
    known = {"epochs": 3, "batch_size": 32, "lr": 3e-3, "warmup_epochs": 1, "augment": "crop-flip(1)", **budget}
    return RunSpec(task=task, model=model, recipe=recipe, seed=3, budget=Budget(**known))


# ---------------------------------------------------------------------------------------------------------------- shape
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 5), st.integers(1, 3))
def test_patches_are_those_of_the_library_and_go_back_into_their_image(
    channels: int, patch: int, rows: int, samples: int
) -> None:
    shape = MaskedShape(channels, rows * patch, patch, visible=1)
    images = torch.randn(samples, channels, rows * patch, rows * patch)
    patches = shape.cut(images)
    assert torch.equal(shape.glued(patches), images)
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    class Patching:
        config = ViTMAEConfig(patch_size=patch, num_channels=channels)

    library: Any = ViTMAEForPreTraining.patchify
    assert torch.equal(library(Patching(), images), patches)


@pytest.mark.parametrize("per_patch", [False, True])
def test_the_loss_is_that_of_the_library_under_the_same_mask(per_patch: bool) -> None:
    from transformers import ViTMAEForPreTraining

    model, (inputs, _) = small().eval(), SHAPE.example(5)
    images, ranks = SHAPE.parted(inputs)
    config = model.vit.config
    config.norm_pix_loss = per_patch
    library: Any = ViTMAEForPreTraining(config).eval()
    library.vit.load_state_dict(model.vit.state_dict())
    library.decoder.load_state_dict(model.decoder.state_dict())
    theirs = library(pixel_values=images, noise=ranks)
    ours = model(inputs)
    torch.testing.assert_close(ours, theirs.logits, rtol=1e-4, atol=1e-5)
    aims = SHAPE.aims(images, ranks, per_patch=per_patch)
    assert torch.equal(aims[..., -1], theirs.mask)
    torch.testing.assert_close(opened().loss(ours, aims), theirs.loss)


def test_models_from_nothing_know_where_patches_are_in_encoder_and_decoder() -> None:
    """The library itself leaves positions at zero, so that hidden patches could not differ."""
    model = small().eval()
    hidden = model(SHAPE.example(1)[0])[0]
    distances = torch.cdist(hidden, hidden) + torch.eye(SHAPE.patches)
    assert float(distances.min()) > 1e-4
    for table in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
        places = table[0, 1:]
        assert float((torch.cdist(places, places) + torch.eye(len(places))).min()) > 0.1
        assert float(table[0, 0].abs().max()) == 0


# ------------------------------------------------------------------------------------------------------------ no leaks
@pytest.mark.parametrize("recipe", RECIPES)
def test_pixels_of_hidden_patches_change_nothing_under_any_method(recipe: str) -> None:
    model = small()
    attemper.apply(model, recipe)
    inputs, _ = SHAPE.example(4)
    images, ranks = SHAPE.parted(inputs)
    hidden = SHAPE.spread((ranks >= SHAPE.visible).float())
    other = SHAPE.join(images + hidden * 50 * torch.randn_like(images), ranks)
    assert not torch.equal(other, inputs)

    def seeded(x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        tokens, _ = model.encode(x)
        torch.manual_seed(5)
        return tokens, model(x)

    for before, after in zip(seeded(inputs), seeded(other), strict=True):
        assert torch.equal(before, after)
    assert seeded(inputs)[0].shape == (4, 1 + SHAPE.visible, 16)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("classifier", [False, True])
def test_every_method_makes_a_training_step(recipe: str, classifier: bool) -> None:
    task = open_task("digits") if classifier else opened()
    torch.manual_seed(1)
    model = build_model(ENCODER if classifier else MODEL, task.shape).train()
    tempered = attemper.apply(model, recipe)
    inputs, targets = task.shape.example(4)
    loss = tempered.loss(lambda: model(inputs), lambda out: task.loss(out, targets))
    loss.backward()
    assert torch.isfinite(loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in trained)


def test_every_method_there_is_is_among_those_tried() -> None:
    tried = {method.name for recipe in RECIPES for method in attemper.parse(recipe)}
    assert tried == {method.name for method in attemper.list_methods()}


@pytest.mark.parametrize("recipe", ["dropkey(0.3, structure=block)", "blur(grid=2d)"])
def test_what_needs_a_grid_of_keys_is_refused_where_patches_are_hidden_and_works_where_none_are(recipe: str) -> None:
    for targets in (None, ["vit.*"]):
        with pytest.raises(AttemperError, match="needs the keys to lie on an image grid"):
            attemper.apply(small(), recipe, targets=targets)
    shape: Any = open_task("digits").shape
    model = build_model(ENCODER, shape).train()
    attemper.apply(model, recipe.replace("block", "cross"))
    assert model(shape.example(2)[0]).shape == (2, 10)


# --------------------------------------------------------------------------------------------------------------- masks
def test_every_recipe_of_a_seed_hides_the_same_patches_of_the_same_images() -> None:
    def batches(recipe: str, seed: int = 3) -> list[Tensor]:
        chosen = RunSpec(task=TASK, model=MODEL, recipe=recipe, seed=seed, budget=spec().budget)
        return [inputs for inputs, _ in RunData(chosen, opened(), torch.device("cpu")).epoch(2)]

    one, other, third = batches("none"), batches("dropkey(0.2) + cb"), batches("none", seed=4)
    assert all(map(torch.equal, one, other))
    assert not any(map(torch.equal, one, third))
    shape = opened().shape
    ranks = torch.cat([shape.parted(inputs)[1] for inputs in one])
    assert (ranks.sort(1).values == torch.arange(shape.patches)).all()
    assert len({tuple(row) for row in ranks.tolist()}) == len(ranks)


def test_evaluation_hides_by_the_image_alone_whatever_else_is_in_the_batch() -> None:
    images = torch.randint(256, (70, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ranks = ranks_of(images, 16)
    assert torch.equal(ranks, torch.cat([ranks_of(each[None], 16) for each in images]))
    assert torch.equal(ranks[40:], ranks_of(images[40:], 16))
    assert (ranks.sort(1).values == torch.arange(16)).all()
    assert len({tuple(row) for row in ranks.tolist()}) == len(ranks)
    changed = images.clone()
    changed[:, 0, 0, 0] ^= 1
    assert (ranks_of(changed, 16) != ranks).any(1).all()


@pytest.mark.parametrize("ranks", ["drawn", "of contents"])
def test_every_patch_is_hidden_as_often_as_every_other(ranks: str) -> None:
    images = torch.randint(256, (4000, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = ranks_of(images, 16) if ranks == "of contents" else drawn_ranks(4000, 16, seed=1)
    hidden = (found >= 4).double()
    assert float((hidden.mean(0) - 0.75).abs().max()) < 4 * (0.75 * 0.25 / 4000) ** 0.5 + 1e-9
    pairs = (hidden.T @ hidden / 4000 - 0.75 * 11 / 15).fill_diagonal_(0)  # without replacement: 12/16 · 11/15
    assert float(pairs.abs().max()) < 5 * (0.55 * 0.45 / 4000) ** 0.5


@pytest.mark.parametrize(("mask", "visible"), [(0.75, 4), (0.5, 8), (0.6, 6), (0.99, 1), (0.01, 15)])
def test_the_share_of_hidden_patches_is_what_was_asked_for(mask: float, visible: int) -> None:
    task = opened(f"mae:digits(mask={mask}, train=60, test=20)")
    assert task.shape.visible == visible
    model = build_model(MODEL, task.shape)
    tokens, _ = model.encode(task.shape.example(2)[0])  # type: ignore[operator]
    assert tokens.shape[1] == 1 + visible


# ------------------------------------------------------------------------------------------------------------- metrics
class Constant(torch.nn.Module):
    """Predicts the same number everywhere."""

    def __init__(self, shape: MaskedShape, value: float) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))
        self.shape = shape

    def forward(self, inputs: Tensor) -> Tensor:
        return self.value.expand(len(inputs), self.shape.patches, self.shape.classes)


@pytest.mark.parametrize("per_patch", [True, False])
def test_explained_variance_is_one_minus_the_error_in_units_of_the_variance(per_patch: bool) -> None:
    task = opened(f"mae:digits(per_patch={per_patch}, train=300, test=100)")
    assert isinstance(task, Task)
    test = task.test()
    with torch.no_grad():
        found = task.measure(Constant(task.shape, 0.0).eval(), test)
        ((stored, _),) = test.batches(torch.arange(100), 100)
        images, ranks = task.shape.parted(task.to_input(stored))
        wanted = task.shape.cut(images)[ranks >= task.shape.visible]
    if per_patch:
        wanted = (wanted - wanted.mean(1, keepdim=True)) / (wanted.var(1, keepdim=True) + 1e-6).sqrt()
    assert found["loss"] == pytest.approx(float(wanted.square().mean()), rel=1e-5)
    assert found["explained_variance"] == pytest.approx(1 - float(found["loss"] or 0) / task.variance)
    assert abs(float(found["explained_variance"] or 0)) < 0.1  # test images differ from training images
    assert task.variance < 0.75 if per_patch else task.variance == pytest.approx(1.0, abs=0.01)


def test_tables_and_pictures_are_of_classes_that_nothing_was_trained_on() -> None:
    task = opened()
    assert isinstance(task, Illustrated)
    model = build_model(MODEL, task.shape).eval()
    with torch.no_grad():
        details = task.details(model, task.test())
        shown = task.pictures(model, task.test(), 3)
        again = task.pictures(model, task.test(), 3)
    assert details is not None
    assert [row["name"] for row in details["table"]["rows"]] == list("0123456789")
    assert sum(row["count"] for row in details["table"]["rows"]) == 60
    assert len(shown) == 3
    assert shown == again
    assert "explained" in shown[0].caption


def test_pictures_show_pixels_as_they_were_stored() -> None:
    task = opened()
    ((stored, _),) = task.test().batches(torch.arange(5), 5)
    images, _ = task.shape.parted(task.to_input(stored))
    for pixels, image in zip(stored, images, strict=True):
        assert torch.equal(task._visible(image), pixels)


# ---------------------------------------------------------------------------------------------------------------- runs
def test_pre_training_learns_in_seconds() -> None:
    chosen = spec(
        "none", task="mae:digits(per_patch=false, train=500, test=60)", epochs=8, batch_size=25, augment="none", lr=5e-3
    )
    result = run(chosen, opened(chosen.task))
    assert result["metric"] == "explained_variance"
    assert result["test"]["explained_variance"] > 0.15
    assert len(result["test_details"]["pictures"]) == 4


class StopError(Exception):
    pass


def test_a_run_that_is_stopped_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    whole = run(spec(), opened(), folder=tmp_path / "whole")

    def stop(event: dict[str, Any]) -> None:
        if event["validation"] is not None and event["epoch"] == 2:
            raise StopError

    with pytest.raises(StopError):
        run(spec(), opened(), folder=tmp_path / "cut", progress=stop)
    again = run(spec(), opened(), folder=tmp_path / "cut")
    assert timeless(again) == timeless(whole)
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


def test_fine_tuning_starts_from_the_whole_encoder(tmp_path: Path) -> None:
    before = run(spec("graying"), opened(), folder=tmp_path / "mae")
    assert before["status"] == "finished"
    later = spec(task="digits(train=100, test=50)", model=ENCODER, init=str(tmp_path / "mae"))
    task: Any = open_task(later.task)
    torch.manual_seed(0)
    model, report = initial_model(later, task.shape)
    assert report is not None
    assert report.share == 1.0
    assert not report.missing
    assert report.renewed == ("head.weight", "head.bias")
    assert all(name.startswith("decoder.") for name in report.ignored)
    from attemper.files import read_weights

    given = read_weights(tmp_path / "mae").tensors
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items() if name != "head.weight"
               and name != "head.bias")  # fmt: skip
    result = run(later, task)
    assert result["start"]["share"] == 1.0


def test_the_classifier_sees_patches_in_their_order_and_draws_nothing() -> None:
    shape: Any = open_task("digits").shape
    model: Any = build_model(ENCODER, shape).eval()
    images = shape.example(3)[0]
    before = torch.get_rng_state()
    first = model(images)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, model(images))
    embedded, mask, order = model.vit.embeddings(images, noise=torch.arange(16.0).expand(3, -1))
    assert float(mask.sum()) == 0
    assert torch.equal(order, torch.arange(16).expand(3, -1))
    assert embedded.shape == (3, 17, 16)


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mae:", "does not say which images"),
        ("mae", "does not say which images"),
        ("mae:numerals", "one class each that are no stream.*'numerals' has"),
        ("mae:tones", "is on images|square"),
        ("mae:mae:digits", "'mae:digits' has 1 × 8 × 8 in patches"),
        ("mae:shapes", "'shapes' has 3 × 32 × 32 with a class for every pixel"),
        ("mae:digits(mask=1.0)", "mask is 1.0; it must be a number above 0 and below 1"),
        ("mae:digits(mask=most)", "mask is 'most'"),
        ("mae:digits(patch=3)", "cannot be cut into such patches"),
        ("mae:digits(patch=8)", "an image is one patch"),
        ("mae:digits(patch=1)", "which has no variance"),
        ("mae:digits(per_patch=3)", "it must be true or false"),
        ("mae:digits(sise=3)", "sise"),
        ("mae:digitz", "There is no task 'digitz'"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(AttemperError, match=message):
        open_task(text)


@pytest.mark.parametrize(
    ("model", "masked", "message"),
    [
        ("vit-mae(patch=4)", True, "patch is 4, and the task hides patches of 2"),
        ("vit-mae(pool=avg)", True, "pool is 'avg'; it is of a classifier"),
        ("vit-mae(decoder_depth=1)", False, "decoder_depth is 1; it is of pre-training"),
        ("vit-mae(pool=max)", False, "pool is 'max'"),
        ("vit-mae(width=18, heads=3)", True, "it must be a multiple of 4"),
        ("vit-mae(width=16, heads=3)", True, "multiple of the heads"),
        ("vit-digits", True, "does not take inputs of 1 × 8 × 8 in patches of 2 × 2, 4 of 16 visible"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: str, masked: bool, message: str) -> None:
    shape: Any = open_task("mae:digits" if masked else "digits").shape
    with pytest.raises(ParameterError, match=message):
        build_model(model, shape)


def test_mixing_and_smoothing_are_refused_where_there_are_no_labels() -> None:
    with pytest.raises(ParameterError, match="mixing classes makes no sense"):
        opened().augmentation("crop-flip+mixup(0.8)")
    with pytest.raises(ParameterError, match="no labels that could be smoothed"):
        opened().loss(*(lambda example: (example[1][..., :-1], example[1]))(opened().shape.example(2)), smoothing=0.1)


def test_verify_speaks_of_images_and_patches() -> None:
    assert verify("mae:digits(patch=4)")[0] == (
        "mae:digits(patch=4): 1,437 training samples and 360 test samples of 1 × 8 × 8 in patches of 4 × 4, "
        "1 of 4 visible"
    )
