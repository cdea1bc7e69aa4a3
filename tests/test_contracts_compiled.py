"""Compiled code draws the same masks as eager code, with and without activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import attemper
from contracts import (
    COMPOSED,
    SCHEDULED,
    assert_same,
    evaluate,
    every_family,
    gradients,
    original,
    tempered,
    train,
    train_with_gradients,
)
from families import VIT, Family, call, family, timm_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # a compiler may order sums differently; another mask is another matter

FORWARD_AND_BACKWARD = ("timm-swin", "hf-bert", "hf-detr", "torchvision-vit", "nn-decoder", "hand-written")
"""Families differ in what the compiler reads of their code, which it reads for all. That it turns what it has read into
one graph for forward and one for backward takes twice as long, and is tried with one family of every kind."""
PARTS = {"hf-detr": ("model.encoder", "model.decoder")}
"""Where the graph of every layer breaks by itself, the compiler traces whatever is round it again and again."""


@pytest.fixture(autouse=True)
def _clean_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same_gradients(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Where eager code gives no gradient at all, the compiler gives zeros."""
    assert not any(got[name].any() for name in got.keys() - wanted.keys())
    assert_same({name: got[name] for name in wanted}, wanted, **CLOSE)


def assert_compiled_is_eager(
    model: nn.Module, family: Family, parts: Sequence[str] | None = None, **options: Any
) -> None:
    """The same output and gradients for the same seed, others for another, and others for a second call.

    parts: compile these modules instead of the whole.
    """
    wanted = train_with_gradients(model, family, seed=1)
    other = train(model, family, seed=2)
    assert not torch.allclose(wanted[0], other, **CLOSE), "the tolerance cannot tell masks apart"
    compiled: Any = model if parts else torch.compile(model, **options)
    for part in parts or ():
        model.get_submodule(part).compile(**options)
    output = train(compiled, family, seed=1)
    assert_same(output, wanted[0], **CLOSE)
    assert_same_gradients(gradients(model, output), wanted[1])
    assert_same(train(compiled, family, seed=2), other, **CLOSE)
    assert not torch.allclose(train(compiled, family, seed=None), other, **CLOSE)


@every_family
def test_compiled_training_draws_eagers_masks(family: Family) -> None:
    model, _ = tempered(family, SCHEDULED)
    backend = "aot_eager_default_partitioner" if family.name in FORWARD_AND_BACKWARD else "eager"
    assert_compiled_is_eager(model, family, PARTS.get(family.name), backend=backend, fullgraph=family.fullgraph)


def test_compiled_training_draws_eagers_masks_for_methods_composed() -> None:
    vit = family("timm-vit")
    assert_compiled_is_eager(tempered(vit, COMPOSED)[0], vit, backend="aot_eager", fullgraph=True)


def test_inductor_draws_eagers_masks_in_forward_and_backward() -> None:
    """Of one block, since the compiler of C++ takes its time; `make slow` compiles whole models."""
    torch.manual_seed(0)
    model = timm_model("vit_tiny_patch16_224", **{**VIT, "depth": 1})().train()
    attemper.apply(model, "dropkey(0.5)")
    assert_compiled_is_eager(model, family("timm-vit"), backend="inductor", fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm-vit", "hf-bert", "nn-encoder"])
def test_inductor_draws_eagers_masks(name: str) -> None:
    model, _ = tempered(family(name), SCHEDULED)
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    with torch.no_grad():  # half the kernels
        for seed in (1, 2):
            assert_same(train(compiled, family(name), seed), train(model, family(name), seed), **CLOSE)
        assert not torch.allclose(train(model, family(name), 1), train(model, family(name), 2), **CLOSE)


@pytest.mark.parametrize("name", ["timm-vit", "nn-encoder", "hand-written"])
def test_compiled_eval_is_the_compiled_originals_bit_for_bit(name: str) -> None:
    model, _ = tempered(family(name), COMPOSED)
    got = evaluate(torch.compile(model, backend="aot_eager", fullgraph=True), family(name))
    torch._dynamo.reset()
    wanted = evaluate(torch.compile(original(family(name)), backend="aot_eager", fullgraph=True), family(name))
    assert_same(got, wanted)


def test_a_compiled_model_follows_the_training_switch() -> None:
    multihead = family("nn-mha")
    model, _ = tempered(multihead, SCHEDULED)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = evaluate(original(multihead), multihead)
    for _ in range(2):
        assert_same(evaluate(compiled, multihead), before, **CLOSE)
        assert not torch.allclose(train(compiled, multihead), before, **CLOSE)


def test_blocks_compiled_one_by_one_share_their_graphs_whatever_their_rates() -> None:
    torch.manual_seed(0)
    model = timm_model("vit_tiny_patch16_224", **{**VIT, "depth": 12})().train()
    handle = attemper.apply(model, "dropkey(0.6, schedule=decreasing)")
    assert len({row.rate for row in handle.summary()}) == 12
    vit = family("timm-vit")
    wanted, other = train_with_gradients(model, vit), train(model, vit, seed=2)
    assert not torch.allclose(wanted[0], other, **CLOSE)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=False, fail_on_recompile_limit_hit=True):
        assert_same(train_with_gradients(model, vit), wanted, **CLOSE)
        assert_same(train(model, vit, seed=2), other, **CLOSE)
    assert counter.frame_count <= 3, "every block was compiled for itself"


def test_a_live_change_of_the_rate_acts_and_compiles_little_anew() -> None:
    multihead = family("nn-mha")
    model, handle = tempered(multihead, "dropkey(0.3)")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    outputs = []
    for rate in (0.3, 0.25, 0.2, 0.15, 0.1):
        handle.set_rate(rate)
        outputs.append(train(compiled, multihead))
        assert_same(outputs[-1], train(model, multihead), **CLOSE)
    assert not torch.allclose(outputs[0], outputs[-1], **CLOSE)
    assert counter.frame_count <= 2


def test_switching_the_methods_off_acts_on_a_compiled_model() -> None:
    multihead = family("nn-mha")
    model, handle = tempered(multihead, "dropkey(0.3)")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = train(original(multihead), multihead)
    assert not torch.allclose(train(compiled, multihead), plain, **CLOSE)
    with handle.disabled():
        assert_same(train(compiled, multihead), plain, **CLOSE)
    handle.set_rate(0)
    assert_same(train(compiled, multihead), plain, **CLOSE)
    handle.remove()
    assert_same(train(compiled, multihead), plain, **CLOSE)


def test_compiled_activation_checkpointing_gives_the_same_gradients() -> None:
    vit = family("timm-vit")
    model, _ = tempered(vit, SCHEDULED)
    wanted = train_with_gradients(model, vit)
    model.set_grad_checkpointing()
    assert_same(train_with_gradients(model, vit), wanted, **CLOSE)
    output = train(torch.compile(model, backend="aot_eager", fullgraph=True), vit)
    assert_same((output.detach(), gradients(model, output)), wanted, **CLOSE)


def test_a_compiled_training_step_around_the_model_gives_the_same_loss() -> None:
    multihead = family("nn-mha")
    model, handle = tempered(multihead, SCHEDULED)
    inputs = multihead.inputs()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step() -> Tensor:
        return handle.loss(lambda: call(model, inputs), lambda output: output.square().mean())

    wanted = train(model, multihead).square().mean()
    torch.manual_seed(1)
    assert_same(step(), wanted, **CLOSE)
