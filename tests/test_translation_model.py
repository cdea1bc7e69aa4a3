"""The model that translates: what it computes, and how it learns a language of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.errors import ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.numerals import english, german
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.text import TextShape
from attemper.lab.tasks.vocabulary import BEGIN, END, PADDING
from attemper.lab.training.check import check_run
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from test_translation import parts_of

SMALL = "seq2seq(depth=2, width=64, heads=4)"


# --------------------------------------------------------------------------------------------------------- the language
@pytest.mark.parametrize(
    ("number", "one", "other"),
    [
        (0, "zero", "null"),
        (7, "seven", "sieben"),
        (21, "twenty one", "ein und zwanzig"),
        (110, "one hundred ten", "ein hundert zehn"),
        (999_999, "nine hundred ninety nine thousand nine hundred ninety nine",
         "neun hundert neun und neunzig tausend neun hundert neun und neunzig"),
        (5_000, "five thousand", "fünf tausend"),
    ],
)  # fmt: skip
def test_numbers_are_said_in_both_languages(number: int, one: str, other: str) -> None:
    assert (english(number), german(number)) == (one, other)


def test_no_number_is_in_training_and_test() -> None:
    train, validation, test = parts_of(open_task("numerals"))
    assert len(set(train.references) | set(validation.references) | set(test.references)) == 3500


# ------------------------------------------------------------------------------------------------------------ the model
def shape() -> TextShape:
    found = open_task("numerals").shape
    assert isinstance(found, TextShape)
    return found


@pytest.mark.parametrize("options", ["", ", positions=learnt, tied=false, mlp=32"])
def test_a_model_gives_scores_of_every_next_word(options: str) -> None:
    model = build_model(f"seq2seq(depth=1, width=32, heads=2{options})", shape())
    inputs, targets = shape().example(3)
    out = model(inputs)
    assert out.shape == (*targets.shape, shape().classes)
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == len(list(model.parameters()))


def test_the_default_model_has_six_layers_on_either_side() -> None:
    with torch.device("meta"):
        model: Any = build_model("seq2seq", shape())
    assert len(model.encoder.layers) == len(model.decoder.layers) == 6


def test_layers_of_a_stack_start_from_different_weights() -> None:
    model: Any = build_model(SMALL, shape())
    for stack in (model.encoder, model.decoder):
        assert not torch.equal(stack.layers[0].linear1.weight, stack.layers[1].linear1.weight)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq2seq(width=64, heads=5)", "width must be a multiple of the heads"),
        ("seq2seq(width=63, heads=3)", "it must be even"),
        ("seq2seq(positions=none)", "positions is None; it must be 'sinusoidal' or 'learnt'"),
        ("vit-tiny", r"does not take inputs of .* tokens.*These models do: .*seq2seq"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(text, shape())


def test_a_translation_does_not_depend_on_what_else_is_in_the_batch() -> None:
    model: Any = build_model(SMALL, shape()).eval()
    source = open_task("numerals").test().tokens[:6, : shape().source].long()  # type: ignore[attr-defined]
    together = model.translate(source)
    for row, sentence in enumerate(source):
        alone = model.translate(sentence[sentence != PADDING][None])[0]
        words = together[row][: len(alone)]
        assert torch.equal(alone, words)
        assert not together[row][len(alone) :].any(), "padding behind the end"


def test_decoding_word_by_word_agrees_with_the_whole_sentence_at_once() -> None:
    model: Any = build_model(SMALL, shape()).eval()
    source = open_task("numerals").test().tokens[:6, : shape().source].long()  # type: ignore[attr-defined]
    found = model.translate(source)
    given = torch.cat([torch.full((6, 1), BEGIN), found], 1)[:, : shape().target]
    given = torch.nn.functional.pad(given, (0, shape().target - given.shape[1]))
    best = model(torch.cat([source, given], 1)).argmax(-1)[:, : found.shape[1]]
    for row in range(6):
        end = (found[row] == END).nonzero()
        length = int(end[0]) + 1 if len(end) else found.shape[1]
        assert torch.equal(best[row, :length], found[row, :length])


# ------------------------------------------------------------------------------------------------------------- training
def spec(recipe: str, **budget: Any) -> RunSpec:
    whole = {"epochs": 4, "batch_size": 64, "lr": 2e-3, "warmup_epochs": 1.0, "weight_decay": 0.0, **budget}
    return RunSpec(task="numerals(train=1500, test=100)", model=SMALL, recipe=recipe, seed=0, budget=Budget(**whole))


def test_bleu_rises_while_a_model_learns_the_numbers() -> None:
    wanted = spec("dropkey(0.05)", epochs=3, lr=3e-3, batch_size=32, validation=0.1)
    result = run(wanted, open_task(wanted.task), device="cpu")
    course = [entry["validation"]["bleu"] for entry in result["curve"]]
    assert result["metric"] == "bleu"
    assert course[0] < 0.3 < course[-1]
    assert result["test"]["bleu"] > 0.7
    assert set(result["test"]) == {"bleu", "accuracy", "loss"}
    assert {row["method"] for row in result["rates"]} == {"dropkey"}


def test_a_run_can_be_watched_and_resumed(tmp_path: Path) -> None:
    wanted = spec("blur(1.0) + consistency", epochs=1, smoothing=0.1)
    task = open_task("numerals(train=120, test=20)")
    whole = run(wanted, task, device="cpu", folder=tmp_path, probe_every=1)
    assert {entry["block"] for entry in whole["probes"]} == {0, 1, 2, 3}
    again = run(wanted, task, device="cpu", folder=tmp_path)
    assert again["test"] == whole["test"]


def test_what_does_not_fit_text_is_refused_before_training() -> None:
    task = open_task("numerals(train=100, test=10)")
    with pytest.raises(ParameterError, match=r"no augmentation 'crop-flip'.*There are: none"):
        check_run(spec("none", augment="crop-flip"), task)
