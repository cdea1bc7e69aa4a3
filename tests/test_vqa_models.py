"""Models for questions about images, under every method: padding has no influence, and questions look at patches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.errors import AttemperError, ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.vocabulary import BEGIN, PADDING
from attemper.lab.tasks.vqa.looking import question_look
from attemper.lab.tasks.vqa.shape import QuestionShape

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = QuestionShape(channels=3, height=12, width=12, words=30, length=9, classes=7)
MODELS = {
    "two-stream": "two-stream(width=16, heads=2, depth=2, image_depth=1, patch=4)",
    "vilt": "vilt(width=16, heads=2, depth=2, mlp=32, patch=4)",
}
RECIPES = [
    "none",
    "dropkey(0.3)",
    "dropkey(0.3, share=queries)",
    "dropkey(0.3, share=heads)",
    "hardmask(0.5, k=3)",
    "hardmask(0.5, k=2, fill=neg_inf)",
    "blur(2.0)",
    "dropattention(0.3)",
    "dropattention(0.3, unit=column)",
    "drophead(0.3)",
    "layerdrop(0.3)",
    "droppath(0.3)",
    "ffdropout(0.2)",
    "dropconnect(0.2)",
    "skipless(mlp)",
    "cb",
    "cb(cb_s)",
    "cb(branch=attention)",
    "graying",
    "graying(where=tokens)",
    "explicit(q=1e-4, k=1e-4, v=5e-4, av=1e-4, ff=5e-4)",
    "arora(v=5e-4, ff=5e-4)",
    "dropkey(0.1) + consistency",
    "dropkey(0.1) + rdrop",
]


def small(kind: str, shape: QuestionShape = SHAPE) -> Any:
    torch.manual_seed(1)
    return build_model(MODELS[kind], shape).train()


def lively(kind: str) -> Any:
    """A model whose answers depend on what is asked as much as those of a trained one."""
    model = small(kind)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def example(samples: int = 4, real: int = 5) -> tuple[Tensor, Tensor]:
    """Images of noise, and questions of which so many tokens are real."""
    torch.manual_seed(2)
    words = torch.randint(4, SHAPE.words, (samples, SHAPE.length))
    words[:, 0], words[:, real:] = BEGIN, PADDING
    return torch.randn(samples, 3, 12, 12), words


def run_seeded(model: Any, inputs: Tensor) -> Tensor:
    torch.manual_seed(5)
    out: Tensor = model(inputs)
    return out


# ------------------------------------------------------------------------------------------------------------- padding
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_stands_in_padding_changes_nothing_under_any_method(kind: str, recipe: str) -> None:
    """Whatever vector a padded token has: its word's and its place's are replaced by noise."""
    model, (images, words) = lively(kind), example()
    attemper.apply(model, recipe)
    inputs = SHAPE.join(images, words)
    before = run_seeded(model, inputs)
    table = model.words if kind == "two-stream" else model.vilt.embeddings.text_embeddings.word_embeddings
    places = model.order if kind == "two-stream" else model.vilt.embeddings.text_embeddings.position_embeddings.weight
    with torch.no_grad():
        table.weight[PADDING] = torch.randn(16) * 30
        places[..., 5:, :] = torch.randn(SHAPE.length - 5, 16) * 30
    torch.testing.assert_close(run_seeded(model, inputs), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_real_word_changes_the_answer(kind: str) -> None:
    model, (images, words) = lively(kind).eval(), example()
    before = model(SHAPE.join(images, words))
    for place in range(1, 5):
        other = words.clone()
        other[:, place] = 4 + (words[:, place] - 3) % (SHAPE.words - 4)
        assert float((model(SHAPE.join(images, other)) - before).abs().amax(1).min()) > 0.01


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_longer_row_with_more_padding_gives_the_same_answer(kind: str) -> None:
    images, words = example(real=5)
    short = QuestionShape(**{**vars(SHAPE), "length": 5})
    one, other = small(kind).eval(), small(kind, short).eval()
    given = one.state_dict()
    own = other.state_dict()
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(given[name][..., :5, :] if value.shape != given[name].shape else given[name])
    torch.testing.assert_close(one(SHAPE.join(images, words)), other(short.join(images, words[:, :5])))


# -------------------------------------------------------------------------------------------------------- every method
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_method_makes_a_training_step(kind: str, recipe: str) -> None:
    model = small(kind)
    tempered = attemper.apply(model, recipe)
    inputs, targets = SHAPE.example(4)
    task = open_task("vqa:shapes")
    loss = tempered.loss(lambda: model(inputs), lambda out: task.loss(out, targets))
    loss.backward()
    assert torch.isfinite(loss)
    unmoved = [name for name, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert not [name for name in unmoved if "token_type_embeddings" not in name]


def test_every_method_there_is_is_among_those_tried() -> None:
    tried = {method.name for recipe in RECIPES for method in attemper.parse(recipe)}
    assert tried == {method.name for method in attemper.list_methods()}


@pytest.mark.parametrize(("kind", "count"), [("two-stream", 5), ("vilt", 2)])
def test_every_attention_is_tempered_that_over_the_image_too(kind: str, count: int) -> None:
    rows = attemper.apply(small(kind), "dropkey(0.3)").summary()
    assert len(rows) == count
    assert {row.rate for row in rows} == {0.3}


@pytest.mark.parametrize("recipe", ["dropkey(0.3, structure=block)", "blur(grid=2d)", "cb(gate)"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_what_needs_a_grid_of_keys_or_a_class_token_is_refused_before_training(kind: str, recipe: str) -> None:
    with pytest.raises(AttemperError, match="none is known for"):
        attemper.apply(small(kind), recipe)


# ---------------------------------------------------------------------------------------------------------------- vilt
def test_vilt_gives_what_the_library_gives_whose_patches_are_shuffled() -> None:
    from transformers import ViltForQuestionAnswering

    model, (images, words) = small("vilt").eval(), example()
    ours = model(SHAPE.join(images, words))
    config = model.vilt.config
    config.num_labels = SHAPE.classes
    library: Any = ViltForQuestionAnswering(config).eval()
    library.vilt.load_state_dict(model.vilt.state_dict())
    library.classifier.load_state_dict(model.classifier.state_dict())
    theirs = library(input_ids=words, attention_mask=(words != PADDING).long(), pixel_values=images).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_vilt_draws_nothing_and_answers_alike_twice() -> None:
    model, (images, words) = small("vilt").eval(), example()
    before = torch.get_rng_state()
    first = model(SHAPE.join(images, words))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model(SHAPE.join(images, words)), first)


def test_vilt_from_nothing_knows_where_a_patch_is() -> None:
    model, (images, words) = small("vilt").eval(), example()
    moved = images.roll(4, dims=3)
    answers = [model(SHAPE.join(each, words)) for each in (images, moved)]
    assert not torch.allclose(*answers, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ pictures
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("recipe", ["none", "dropkey(0.3) + cb"])
def test_a_question_looks_at_patches_with_the_weights_that_the_model_computes(kind: str, recipe: str) -> None:
    model, (images, words) = small(kind), example(samples=1)
    attemper.apply(model, recipe)
    inputs = SHAPE.join(images, words)
    look = question_look(model, inputs)
    assert look is not None
    assert look.shape == (3, 3)
    seen: list[Tensor] = []
    if kind == "vilt":
        assert 0 < float(look.sum()) < 1  # words and the class token have the rest
        model.eval()
        out = model.vilt.encoder.layer[-1].attention.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        model(inputs)
        out.remove()
        attention = model.vilt.encoder.layer[-1].attention.attention
        q, k = (f(seen[0]).unflatten(-1, (2, 8)).transpose(1, 2) for f in (attention.query, attention.key))
        mask = torch.cat([words != PADDING, torch.ones(1, 10, dtype=torch.bool)], 1)
        weights = (q[:, :, :1] @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        torch.testing.assert_close(look.flatten(), weights[0, :, 0, -9:].mean(0).detach(), rtol=1e-4, atol=1e-5)
    else:
        assert float(look.sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_model_that_does_not_say_where_it_looks_has_no_look() -> None:
    assert question_look(torch.nn.Linear(2, 2), torch.randn(1, 2)) is None


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("two-stream(width=30)", "the width must be a multiple of the heads"),
        ("two-stream(patch=5)", "cannot be cut into such patches"),
        ("two-stream(depth=0)", "depth"),
        ("vilt(width=15, heads=2)", "the width must be a multiple of the heads"),
        ("vit-digits", "does not take inputs of 3 × 12 × 12 with 9 tokens of 30 words"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(model: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(model, SHAPE)


def test_vilt_wants_square_images() -> None:
    with pytest.raises(ParameterError, match="takes square images, not those of 12 × 24"):
        build_model(MODELS["vilt"], QuestionShape(**{**vars(SHAPE), "width": 24}))
