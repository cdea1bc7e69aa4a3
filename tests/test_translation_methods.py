"""Methods on an encoder–decoder: on encoder self-, decoder causal self- and cross-attention, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
import attemper.tempering.interception
from attemper.errors import AttemperError, ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.vocabulary import MARKS, PADDING
from attemper.ops.call import Call
from attemper.tempering.outputs import IGNORED

TASK = open_task("numerals(train=100, test=20)")
SHAPE: Any = TASK.shape
SITES = {
    "encoder.layers.0.self_attn": 0,
    "encoder.layers.1.self_attn": 1,
    "decoder.layers.0.self_attn": 2,
    "decoder.layers.0.multihead_attn": 2,
    "decoder.layers.1.self_attn": 3,
    "decoder.layers.1.multihead_attn": 3,
}
PERTURBATIONS = [
    "dropkey(0.3)",
    "hardmask(0.5, k=3)",
    "hardmask(0.5, k=3, fill=neg_inf)",
    "blur(2.0)",
    "dropattention(0.3)",
    "dropkey(0.2) + hardmask(0.3, k=2) + blur(1.0)",
]
WORKING = [
    *PERTURBATIONS,
    "dropkey(0.3, share=queries)",
    "dropkey(0.3, share=heads)",
    "dropattention(0.3, unit=column)",
    "dropkey(0.1) + consistency",
    "dropkey(0.1) + rdrop",
    "explicit(q=1e-4, k=1e-4, v=5e-4, av=1e-4, ff=5e-4)",
    "arora(v=5e-4, ff=5e-4)",
    "skipless",
    "drophead(0.3)",
    "layerdrop(0.3)",
    "droppath(0.3)",
    "ffdropout(0.2)",
    "dropconnect(0.2)",
    "graying(where=tokens)",
]
REFUSED = {
    "cb": "is causal, and what mixes all tokens would show every token its future",
    "graying": "acts on a patch embedding",
    "dropkey(0.3, structure=cross)": "needs the keys to lie on an image grid",
    "dropkey(0.3, structure=block)": "needs the keys to lie on an image grid",
    "blur(grid=2d)": "needs the keys to lie on an image grid",
}
ALWAYS = ("skipless", "graying")
"""Part of the architecture: these act in eval mode too."""


def small() -> Any:
    torch.manual_seed(1)
    return build_model("seq2seq(depth=2, width=32, heads=4)", SHAPE).train()


def run_seeded(function: Any, *arguments: Any) -> Tensor:
    torch.manual_seed(5)
    out: Tensor = function(*arguments)
    return out


def example(samples: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    found: tuple[Tensor, Tensor] = SHAPE.example(samples)
    return found


# -------------------------------------------------------------------------------------------------------- where it acts
@pytest.mark.parametrize("recipe", ["dropkey(0.3)", "hardmask(0.3)", "blur(1.0)", "dropattention(0.3)"])
def test_every_attention_of_encoder_and_decoder_is_tempered(recipe: str) -> None:
    tempered = attemper.apply(small(), recipe)
    rows = tempered.summary()
    assert {row.site: row.block for row in rows} == SITES
    assert {row.rate for row in rows} == {1.0 if recipe.startswith("blur") else 0.3}


def test_a_schedule_runs_through_the_encoder_and_then_through_the_decoder() -> None:
    tempered = attemper.apply(small(), "dropkey(0.4, schedule=decreasing)")
    rates = {row.site: row.rate for row in tempered.summary()}
    assert rates == {site: pytest.approx(0.4 - 0.1 * block) for site, block in SITES.items()}


def test_each_kind_of_attention_is_computed_with_the_methods_and_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, bool, bool, str]] = []
    plain = attemper.tempering.interception.attend_and_square

    def spy(call: Call, *rest: Any) -> tuple[Tensor, dict[str, Tensor]]:
        masked = call.attn_mask is not None
        calls.append((*call.shape[2:], masked, call.is_causal, str(call.methods[0])))
        return plain(call, *rest)

    monkeypatch.setattr(attemper.tempering.interception, "attend_and_square", spy)
    model = small()
    attemper.apply(model, "dropkey(0.3)")
    model(example()[0])
    s, t = SHAPE.source, SHAPE.target
    encoder, causal, cross = (
        (s, s, True, False, "dropkey(0.3)"),
        (t, t, False, True, "dropkey(0.3)"),
        (t, s, True, False, "dropkey(0.3)"),
    )
    assert calls == [encoder, encoder, causal, cross, causal, cross]


@pytest.mark.parametrize("recipe", PERTURBATIONS)
@pytest.mark.parametrize("target", ["encoder.*.self_attn", "decoder.*.self_attn", "decoder.*.multihead_attn"])
def test_each_kind_of_attention_is_perturbed_in_training(recipe: str, target: str) -> None:
    model, inputs = small(), example()[0]
    plain = model(inputs)
    tempered = attemper.apply(model, recipe, targets=target)
    assert not torch.allclose(run_seeded(model, inputs), plain, atol=1e-4)
    with tempered.disabled():
        torch.testing.assert_close(model(inputs), plain, rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------- causality, padding
@pytest.mark.parametrize("recipe", WORKING)
def test_no_word_sees_a_later_one_in_training(recipe: str) -> None:
    model, (inputs, _) = small(), example()
    attemper.apply(model, recipe)
    last = SHAPE.target - 4
    changed = inputs.clone()
    later = changed[:, SHAPE.source + last :]
    later.copy_(len(MARKS) + (later + 3) % (SHAPE.target_words - len(MARKS)))
    before, after = run_seeded(model, inputs), run_seeded(model, changed)
    torch.testing.assert_close(before[:, :last], after[:, :last], rtol=0, atol=1e-6)
    assert not torch.equal(before[:, last:], after[:, last:])


@pytest.mark.parametrize("recipe", PERTURBATIONS)
def test_padding_is_never_attended(recipe: str) -> None:
    model, (inputs, _) = small(), example()
    attemper.apply(model, recipe)
    words, length = SHAPE.source - 3, SHAPE.source
    source, target = inputs[:, :length].clone(), inputs[:, length:]
    source[:, words:] = PADDING
    short = source[:, :words]
    torch.testing.assert_close(run_seeded(model.encode, source)[:, :words], run_seeded(model.encode, short))
    memory = model.encode(short)
    padded = torch.cat([memory, torch.randn(len(memory), 3, memory.shape[-1])], 1)
    torch.testing.assert_close(
        run_seeded(model.decode, target, padded, source), run_seeded(model.decode, target, memory, short)
    )


def test_padding_does_not_weigh_in_the_comparison_of_two_passes() -> None:
    model, task = small(), TASK
    tempered = attemper.apply(model, "dropkey(0.3) + consistency(strength=2)")
    inputs, targets = example()
    real = targets != IGNORED

    def loss_of(counted: Tensor | None) -> Tensor:
        torch.manual_seed(0)
        return tempered.loss(lambda: model(inputs), lambda out: task.loss(out, targets), counted)

    torch.manual_seed(0)
    first, second = model(inputs), model(inputs)
    p, q = first[real].log_softmax(-1), second[real].log_softmax(-1)
    by_hand = (task.loss(first, targets) + task.loss(second, targets)) / 2 + 2 * (p.exp() * (p - q)).sum(-1).mean()
    torch.testing.assert_close(loss_of(real), by_hand)
    assert not torch.allclose(loss_of(None), by_hand)
    with pytest.raises(ParameterError, match="counted must be boolean, one value for every prediction"):
        loss_of(real[:, 1:])


# --------------------------------------------------------------------------------------------------------- every method
@pytest.mark.parametrize("recipe", [*WORKING, *REFUSED])
def test_every_method_makes_a_training_step_or_is_refused_with_a_reason(recipe: str) -> None:
    model, (inputs, targets) = small(), example()

    def step() -> Tensor:
        tempered = attemper.apply(model, recipe)
        return tempered.loss(lambda: model(inputs), lambda out: TASK.loss(out, targets), targets != IGNORED)

    if recipe in REFUSED:
        with pytest.raises(AttemperError, match=REFUSED[recipe]):
            step()
        return
    loss = step()
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_every_method_there_is_is_among_those_tried() -> None:
    tried = {method.name for recipe in (*WORKING, *REFUSED) for method in attemper.parse(recipe)}
    assert tried == {method.name for method in attemper.list_methods()}


@pytest.mark.parametrize("recipe", [recipe for recipe in WORKING if not recipe.startswith(ALWAYS)])
def test_translations_in_eval_mode_are_the_same_bit_for_bit(recipe: str) -> None:
    model, (inputs, targets) = small(), example()
    source = inputs[:, : SHAPE.source]
    model.eval()
    with torch.no_grad():
        words, scores = model.translate(source), model(inputs)
    tempered = attemper.apply(model, recipe)
    model.train()
    tempered.loss(lambda: model(inputs), lambda out: TASK.loss(out, targets))
    model.eval()
    with torch.no_grad():
        assert torch.equal(model.translate(source), words)
        assert torch.equal(model(inputs), scores)
