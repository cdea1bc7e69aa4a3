"""Classes of pixels: what is measured and trained on, how images and masks change together, which models there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attemper
from attemper.errors import ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import Illustrated, InputShape, Tallied, Task, Verified
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.segmentation.augment import parse_mask_augmentation
from attemper.lab.tasks.segmentation.canvas import FILL, from_canvas, mask_on_canvas, place_of
from attemper.lab.tasks.segmentation.masks import NOTHING
from attemper.lab.tasks.segmentation.scores import class_ious, mean_iou, pixel_accuracy
from attemper.lab.tasks.segmentation.sources import MemoryMasks
from attemper.lab.tasks.segmentation.task import MaskShape, SegmentationTask
from attemper.tempering.outputs import IGNORED

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = MaskShape(3, 32, 48, 4)
FILLED = torch.tensor(FILL)[:, None, None]


def made(images: Tensor, truths: list[Tensor], classes: int = 4, canvas: tuple[int, int] = (8, 8)) -> SegmentationTask:
    """A task of these masks, each of any size."""
    masks = torch.stack([mask_on_canvas(truth, canvas) for truth in truths])
    source = MemoryMasks(images, masks, truths)
    names = tuple(f"c{at}" for at in range(classes))
    shape = MaskShape(3, *canvas, classes)
    return SegmentationTask("made", shape, "0", lambda: source, lambda: source, names, tuple(range(classes)))


class Painter(nn.Module):
    """Predicts what it is told: every sample has its number in its first pixel, once `to_input` leaves pixels alone."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


def numbered(count: int, canvas: tuple[int, int] = (8, 8)) -> Tensor:
    return torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, *canvas).clone()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentationTask, "to_input", lambda self, stored: stored.float())


# -------------------------------------------------------------------------------------------------------------- metrics
def by_sets(truth: list[int], says: list[int], classes: int) -> tuple[float | None, float | None]:
    """Mean intersection over union and accuracy, from sets of pixels."""
    known = [(at, t, s) for at, (t, s) in enumerate(zip(truth, says, strict=True)) if t != NOTHING]
    ious = []
    for c in range(classes):
        one, other = {at for at, t, _ in known if t == c}, {at for at, _, s in known if s == c}
        ious += [len(one & other) / len(one | other)] if one | other else []
    return (sum(ious) / len(ious), sum(t == s for _, t, s in known) / len(known)) if known else (None, None)


pixels = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 4, NOTHING]), st.integers(0, 4)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(pixels, st.integers(1, 4))
def test_metrics_are_those_of_torchmetrics_and_of_sets_of_pixels(drawn: list[tuple[int, int]], parts: int) -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    truth, says = map(torch.tensor, zip(*drawn, strict=True))
    task = made(numbered(1), [torch.zeros(8, 8, dtype=torch.uint8)], classes=5)
    tallies = []
    jaccard = MulticlassJaccardIndex(5, average="macro", ignore_index=NOTHING)
    each = MulticlassJaccardIndex(5, average="none", ignore_index=NOTHING)
    accuracy = MulticlassAccuracy(5, average="micro", ignore_index=NOTHING)
    for t, s in zip(truth.chunk(parts), says.chunk(parts), strict=True):
        source = MemoryMasks(numbered(1, (1, len(t))), t[None, None].byte(), [t[None].byte()])
        model = Painter(F.one_hot(s, 5)[None, None].float())
        with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(SegmentationTask, "to_input", lambda self, stored: stored.float())
            tallies.append(task.tally(model, source))
        for metric in (jaccard, each, accuracy):
            metric.update(s[None], t[None])
    found = task.score(tallies)
    expected = by_sets(truth.tolist(), says.tolist(), 5)
    assert (found["mIoU"], found["accuracy"]) == pytest.approx(expected, abs=1e-6)
    if expected[0] is not None:
        assert found["mIoU"] == pytest.approx(float(jaccard.compute()), abs=1e-6)
        assert found["accuracy"] == pytest.approx(float(accuracy.compute()), abs=1e-6)
        matrix = sum(tally.matrix for tally in tallies)
        ours = [0.0 if value is None else value for value in class_ious(matrix)]
        assert ours == pytest.approx(each.compute().tolist(), abs=1e-6)


def test_a_class_that_neither_truth_nor_prediction_has_is_left_out_and_one_that_is_only_predicted_is_not() -> None:
    matrix = torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    assert mean_iou(matrix) == pytest.approx((3 / 4 + 4 / 5) / 2)
    matrix[0, 2] = 2
    assert mean_iou(matrix) == pytest.approx((3 / 6 + 4 / 5 + 0) / 3)
    assert class_ious(matrix)[2] == 0.0
    assert (mean_iou(matrix * 0), pixel_accuracy(matrix * 0)) == (None, None)


@pytest.mark.usefixtures("plain")
def test_pixels_are_counted_as_large_as_the_files_are_and_once_each() -> None:
    sizes = [(4, 4), (16, 8), (5, 13)]
    truths = [
        torch.randint(4, size, generator=torch.Generator().manual_seed(at)).byte() for at, size in enumerate(sizes)
    ]
    truths[1][:3] = NOTHING
    task = made(numbered(3), truths)
    with torch.no_grad():
        tally = task.tally(Painter(torch.zeros(3, 8, 8, 4)), task.test())
    assert int(tally.matrix.sum()) == 16 + 13 * 8 + 65
    counts = torch.cat([t.flatten() for t in truths]).bincount(minlength=256)
    assert tally.matrix.sum(1).tolist() == counts[:4].tolist()


@pytest.mark.usefixtures("plain")
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
def test_a_model_that_is_right_on_the_canvas_is_right_on_the_file_where_it_is_no_larger(
    h: int, w: int, seed: int
) -> None:
    truth = torch.randint(4, (h, w), generator=torch.Generator().manual_seed(seed)).byte()
    scale = 3
    canvas = (scale * max(h, w),) * 2
    sheet = mask_on_canvas(truth, canvas)
    assert set(sheet.unique().tolist()) <= {*truth.unique().tolist(), NOTHING}
    place = place_of((h, w), canvas)
    assert (sheet != NOTHING).sum() == place.height * place.width
    logits = F.one_hot(sheet.long().clamp_max(3), 4).float()
    assert torch.equal(from_canvas(logits, (h, w)).argmax(0).byte(), truth), (
        "a pixel of the file is 3 × 3 of the canvas"
    )


# ----------------------------------------------------------------------------------------------------------------- loss
def test_pixels_without_a_label_weigh_nothing() -> None:
    task = open_task("shapes")
    logits = torch.randn(3, 5, 7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(4, (3, 5, 7))
    targets[0], targets[1, 2:] = IGNORED, IGNORED
    counted = targets != IGNORED
    for smoothing in (0.0, 0.1):
        loss = task.loss(logits, targets, smoothing)
        expected = F.cross_entropy(logits[counted], targets[counted], label_smoothing=smoothing)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    (gradient,) = torch.autograd.grad(task.loss(logits, targets), logits)
    assert (gradient[~counted] == 0).all()
    assert (gradient[counted] != 0).any(-1).all()
    assert float(task.right(logits, targets)) == pytest.approx(
        float((logits.argmax(-1) == targets)[counted].double().mean())
    )


def test_a_batch_without_any_label_has_a_loss_of_zero_and_does_no_harm() -> None:
    task = open_task("shapes")
    logits = torch.randn(2, 4, 4, 4, requires_grad=True)
    nothing = torch.full((2, 4, 4), IGNORED)
    loss = task.loss(logits, nothing)
    loss.backward()
    assert float(loss.detach()) == 0 == float(task.right(logits, nothing))
    assert (logits.grad == 0).all()  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------------------- augmentation
def coloured(count: int = 6, side: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images whose colour says the class of every pixel, in blocks of four pixels."""
    classes = torch.randint(4, (count, side // 4, side // 4), generator=torch.Generator().manual_seed(seed))
    targets = classes.repeat_interleave(4, 1).repeat_interleave(4, 2)
    return (60 * targets[:, None]).expand(-1, 3, -1, -1).to(torch.uint8).contiguous(), targets


def augmented(text: str, seed: int = 0, images: Any = None) -> tuple[Tensor, Tensor]:
    stored, targets = coloured() if images is None else images
    augment = parse_mask_augmentation(text)
    return augment(stored, targets, classes=4, to_input=lambda x: x.float(), seed=seed)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(1, 1), (0.4, 0.9), (1.1, 2.5)]))
def test_masks_go_where_their_images_go(seed: int, scale: tuple[float, float]) -> None:
    inputs, targets = augmented(f"scale-crop(smallest={scale[0]}, largest={scale[1]})", seed)
    outside = targets == IGNORED
    assert (inputs.movedim(1, -1)[outside] == torch.tensor(FILL)).all(), "what lies outside is filled and ignored"
    assert bool(outside.any()) == (scale[1] < 1)
    inner = -F.max_pool2d(-targets[:, None].float(), 7, 1, 3) == F.max_pool2d(targets[:, None].float(), 7, 1, 3)
    inner &= F.max_pool2d(outside[:, None].float(), 7, 1, 3) == 0
    framed = F.pad(torch.ones_like(inner[..., 3:-3, 3:-3]), (3, 3, 3, 3))  # colours of what was cut off reach inside
    inner &= framed
    wrong = (inputs[:, :1] - 60 * targets[:, None]).abs()[inner]
    assert wrong.numel() == 0 or float(wrong.max()) < 30, "inside of an area, a colour is nearest to its class"


def test_photometric_changes_colours_alone_and_seeds_decide() -> None:
    stored, targets = coloured()
    inputs, same = augmented("photometric(p=1)")
    assert torch.equal(same, targets)
    assert not torch.equal(inputs, stored.float())
    both = "scale-crop+photometric"
    state = torch.get_rng_state()
    first, again, other = augmented(both, 1), augmented(both, 1), augmented(both, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), state), "methods draw from torch's generator, and see the same numbers"
    assert all(torch.equal(a, b) for a, b in zip(augmented("none"), (stored.float(), targets), strict=True))


def test_augmentations_that_would_leave_masks_behind_are_refused() -> None:
    task = open_task("shapes")
    for text in ("crop-flip", "mixup", "resized-crop"):
        with pytest.raises(ParameterError, match="There are: none, scale-crop, photometric"):
            task.augmentation(text)
    with pytest.raises(ParameterError, match=r"largest is 0\.3; it must be a number, from 0.5 to 20"):
        task.augmentation("scale-crop(largest=0.3)")


# --------------------------------------------------------------------------------------------------------------- models
OURS = ["segvit(depth=4, width=24, heads=2, mlp=32)", "segvit-shapes(head=upernet, hidden=16)", "segformer-nano"]
LIBRARY = [
    "timm:vit_tiny_patch16_224(depth=4, embed_dim=24, num_heads=2, head=upernet, hidden=16)",
    "timm:pvt_v2_b0",
    "hf:segformer(depths=(1,1,1,1), hidden_sizes=(8,16,24,32), num_attention_heads=(1,2,3,4), decoder_hidden_size=16)",
]
RECIPES = [
    "dropkey(0.3) + cb + explicit(v=1e-3, ff=1e-3)",
    "graying + dropattention(0.2)",
    "drophead(0.2) + droppath(0.2, replace=true) + ffdropout(0.1)",
    "dropkey(0.2) + consistency",
    "hardmask(0.2) + dropconnect(0.1)",
    "blur + layerdrop(0.2)",
    "skipless",
    "arora(v=1e-3, ff=1e-3)",
]


@pytest.mark.parametrize("name", [*OURS, *LIBRARY])
def test_models_give_every_pixel_a_score_of_every_class(name: str) -> None:
    model = build_model(name, SHAPE)
    inputs, targets = SHAPE.example(2)
    out = model(inputs)
    assert out.shape == (2, 32, 48, 4)
    open_task("shapes").loss(out, targets).backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert [n for n in without if "bias" not in n and "norm" not in n and "cls" not in n] == []


@pytest.mark.parametrize("name", OURS)
def test_our_models_have_no_dropout_of_their_own(name: str) -> None:
    model = build_model(name, SHAPE).train()
    inputs, _ = SHAPE.example(2)
    assert torch.equal(model(inputs), model(inputs))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", OURS)
def test_every_kind_of_method_acts_in_training_and_is_gone_in_the_end(name: str, recipe: str) -> None:
    task = open_task("shapes")
    model = build_model(name, SHAPE)
    inputs, targets = SHAPE.example(2)
    before = model.eval()(inputs)
    tempered = attemper.apply(model.train(), recipe)
    loss = tempered.loss(lambda: model(inputs), lambda out: task.loss(out, targets), targets != IGNORED)
    loss.backward()
    assert loss.isfinite()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    tempered.remove()
    model.load_state_dict(model.state_dict())
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        assert torch.equal(model.eval()(inputs), before)


def test_segformers_reduced_attention_and_convolutions_are_reached() -> None:
    model = build_model("segformer-nano", SHAPE).train()
    inputs, _ = SHAPE.example(2)
    tempered = attemper.apply(model, "dropkey(0.5) + explicit(q=1e-3, ff=1e-3, conv=1e-3)")
    model(inputs)
    rows = tempered.penalties()
    assert {row.component for row in rows} == {"q", "ff1", "ff2", "conv"}
    assert {row.block for row in rows} == {0, 1, 2, 3}
    assert any("sequence_reduction" in row.site for row in rows)
    assert any("dwconv" in row.site for row in rows)
    assert not torch.equal(model(inputs), model(inputs)), "keys are dropped, also of reduced sequences"
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_a_comparison_of_passes_does_not_see_pixels_without_a_label() -> None:
    """Changing what is predicted there changes nothing."""
    first, second = torch.randn(2, 2, 4, 4, 3).unbind()
    counted = torch.rand(2, 4, 4) < 0.5
    changed = torch.where(counted[..., None], second, second + 5 * torch.randn_like(second))
    method = attemper.methods.Consistency()
    assert float(method.compare(first, second, counted)) == pytest.approx(
        float(method.compare(first, changed, counted))
    )


def test_weights_of_a_classifier_start_a_segmentation() -> None:
    from attemper.lab.models.starting import start_from

    options = "depth=2, embed_dim=24, num_heads=2"
    classifier = build_model(f"timm:vit_tiny_patch16_224({options})", InputShape(3, 64, 64, 10))
    model = build_model(f"timm:vit_tiny_patch16_224({options})", MaskShape(3, 32, 48, 4))
    report = start_from(model, classifier.state_dict(), source="a classifier", classes=4)
    assert report.share == 1.0
    assert report.resampled == ("encoder.pos_embed",)
    assert set(report.renewed) == {"head.classifier.weight", "head.classifier.bias"}


def test_models_and_shapes_that_do_not_belong_together_say_so() -> None:
    with pytest.raises(ParameterError, match="'vit-tiny' does not take inputs of 3 × 32 × 48 with a class for"):
        build_model("vit-tiny", SHAPE)
    with pytest.raises(ParameterError, match="'segvit' does not take inputs of 3 × 8 × 8 and of 2 classes"):
        build_model("segvit", InputShape(3, 8, 8, 2))
    for name, said in (
        ("segvit(patch=5)", "patch is 5; images of 32 × 48"),
        ("segvit(head=both)", "must be 'linear' or 'upernet'"),
        ("timm:vit_tiny_patch16_224(head=both)", "must be 'linear' or 'upernet'"),
        ("timm:vit_tiny_patch16_224(depth=2, head=upernet)", "needs 4 feature maps; the model has 2"),
        ("hf:vit", "no semantic segmentation of the model type 'vit'"),
    ):
        with pytest.raises(ParameterError, match=said):
            build_model(name, SHAPE)


def test_the_task_is_all_that_a_task_can_be() -> None:
    task = open_task("shapes(train=20, test=5)")
    assert isinstance(task, Task)
    assert isinstance(task, Tallied)
    assert isinstance(task, Illustrated)
    assert isinstance(task, Verified)
    assert [len(part) for part in task.split(0, 0.3)] == [14, 6]
    assert len(task.test()) == 5
    assert open_task("shapes(normalise=half)").to_input(torch.zeros(1, 3, 2, 2)).unique().tolist() == [-1.0]


@pytest.mark.usefixtures("plain")
def test_pictures_show_image_truth_and_prediction_with_a_legend_of_their_classes() -> None:
    import io

    from PIL import Image

    for classes in (4, 40):
        truths = [torch.randint(classes, (8, 8)).byte() for _ in range(5)]
        task = made(numbered(5), truths, classes)
        found = task.pictures(Painter(torch.randn(5, 8, 8, classes)), task.test(), 3)
        assert len(found) == 3
        image = Image.open(io.BytesIO(found[0].data))
        assert image.width > 2.5 * (image.height - 60), "three in a row"
        assert "% of the labelled pixels are right" in found[0].caption
