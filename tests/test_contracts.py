"""The contracts that users can lean on, for every family of models and every recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Source, keep_mask
from attemper.sites import find_sites
from attemper.tempering.draws import source
from contracts import (
    COMPOSED,
    SCHEDULED,
    assert_same,
    blocks_of,
    checkpoint_blocks,
    copies_of,
    evaluate,
    every_family,
    every_recipe,
    fingerprint,
    gradients,
    original,
    tempered,
    train,
    train_with_gradients,
)
from families import Family, call, family


# ----------------------------------------------------------------------------------------------------------- eval mode
@every_recipe
@every_family
def test_eval_output_is_the_originals_bit_for_bit(family: Family, recipe: str) -> None:
    before = evaluate(original(family), family)
    model, handle = tempered(family, recipe)
    assert_same(evaluate(model, family), before)
    for made in copies_of(family):
        assert_same(evaluate(made(model), family), before)
    handle.remove()
    assert_same(evaluate(model, family), before)


@every_recipe
@every_family
def test_eval_output_is_the_originals_after_any_number_of_training_passes(family: Family, recipe: str) -> None:
    twin = original(family)  # sees the same passes: batch norm counts them, tempered or not
    model, handle = tempered(family, recipe)
    for _ in range(2):
        train(twin, family)
        train(model, family)
        assert_same(evaluate(model, family), evaluate(twin, family))
    handle.remove()
    assert_same(evaluate(model, family), evaluate(twin, family))


@every_family
def test_eval_output_is_the_originals_while_gradients_are_recorded(family: Family) -> None:
    twin, (model, _) = original(family).eval(), tempered(family, COMPOSED)
    model.eval()
    torch.manual_seed(1)
    got = call(model, family.inputs())
    torch.manual_seed(1)
    wanted = call(twin, family.inputs())
    assert_same(got, wanted)
    assert_same(gradients(model, got), gradients(twin, wanted))


FAST_PATHS = {
    "nn-encoder": "_transformer_encoder_layer_fwd",
    "nn-mha": "_native_multi_head_attention",
    "torchvision-vit": "_native_multi_head_attention",
}


@every_recipe
@pytest.mark.parametrize("name", FAST_PATHS)
def test_eval_still_takes_torchs_fast_path(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits are others than the slow path's, and whatever enters a mode or adds a hook in eval switches it off."""
    plain, (model, handle) = original(family(name)), tempered(family(name), recipe)
    taken = []
    kernel = getattr(torch, FAST_PATHS[name])

    def counted(*args: Any, **kwargs: Any) -> Any:
        taken.append(name)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch, FAST_PATHS[name], counted)
    wanted = evaluate(plain, family(name))
    assert len(taken) == family(name).attentions
    assert_same(evaluate(model, family(name)), wanted)
    assert len(taken) == 2 * family(name).attentions
    with handle.stochastic():
        assert not torch.allclose(evaluate(model, family(name)), wanted)
    assert len(taken) == 2 * family(name).attentions, "the fast path passes by the methods"


@pytest.mark.parametrize("name", ["timm-vit", "timm-swin", "hf-vit", "torchvision-vit", "nn-encoder", "hand-written"])
def test_exported_eval_model_holds_nothing_of_attemper(name: str) -> None:
    model, _ = tempered(family(name), COMPOSED)
    inputs = family(name).inputs()
    args = inputs.pop("args", ())
    with torch.no_grad():
        exported = torch.export.export(model.eval(), args, inputs)
    assert "attemper" not in str(exported.graph)
    assert len(exported.graph.nodes) == len(
        torch.export.export(original(family(name)).eval(), args, inputs).graph.nodes
    )


# ------------------------------------------------------------------------------------------------------- training mode
@every_recipe
@every_family
def test_training_output_is_tempered_random_and_repeatable(family: Family, recipe: str) -> None:
    untempered = train(original(family), family)
    model, _ = tempered(family, recipe)
    first, second = train(model, family, seed=1), train(model, family, seed=None)
    assert not torch.allclose(first, untempered)
    assert not torch.allclose(first, second)
    assert_same(train(model, family, seed=1), first)


@every_recipe
@every_family
def test_copies_draw_the_same_masks(family: Family, recipe: str) -> None:
    model, _ = tempered(family, recipe)
    copies = {str(number): made(model) for number, made in enumerate(copies_of(family))}
    wanted = train(model, family)
    for made in copies.values():
        assert type(made) is type(model)
        assert_same(train(made, family), wanted)


@every_recipe
@every_family
def test_gradients_reach_every_parameter_that_had_one(family: Family, recipe: str) -> None:
    _, before = train_with_gradients(original(family), family)
    _, after = train_with_gradients(tempered(family, recipe)[0], family)
    assert before.keys() == after.keys()
    assert all(gradient.isfinite().all() for gradient in after.values())
    felt = [name for name, gradient in before.items() if gradient.abs().max() > 1e-6]
    assert felt
    assert [name for name in felt if not after[name].any()] == []


@pytest.mark.parametrize("recipe", [SCHEDULED, COMPOSED])
@every_family
def test_activation_checkpointing_gives_the_same_gradients(
    family: Family, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = train_with_gradients(tempered(family, recipe)[0], family)
    draws = []

    def counted(*args: Any) -> Source:
        draws.append(args)
        return source(*args)

    monkeypatch.setattr("attemper.tempering.written.source", counted)
    blocks = [block.name for block in find_sites(original(family), family.targets).blocks]
    model, _ = tempered(family, recipe)
    checkpoint_blocks(model, blocks)
    assert_same(train_with_gradients(model, family), wanted)
    assert len(draws) == 2 * family.attentions, "nothing was recomputed"


@pytest.mark.parametrize("name", ["timm-vit", "timm-beit", "timm-swin", "hf-bert", "nn-encoder", "nn-mha"])
def test_mixed_precision_stays_what_it_was(name: str) -> None:
    plain, (model, handle) = original(family(name)), tempered(family(name), COMPOSED)
    # Without oneDNN, which takes bfloat16 instructions for granted on virtual machines that have none.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        wanted, got = train(plain, family(name)), train(model, family(name))
        assert got.dtype == wanted.dtype
        assert got.isfinite().all()
        assert_same(train(model, family(name)), got)
        assert gradients(model, got).keys() == gradients(plain, wanted).keys()
        handle.set_rate(1e-9)  # attention is ours, and nothing is dropped
        assert_same(train(model, family(name)).float(), wanted.float(), rtol=0.05, atol=0.05)


# ------------------------------------------------------------------------------------------- state dicts and reversing
@every_recipe
@every_family
def test_state_dict_is_unchanged_and_loads_both_ways(family: Family, recipe: str) -> None:
    plain, (model, _) = original(family), tempered(family, recipe)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    plain.load_state_dict(model.state_dict(), strict=True)
    moved = evaluate(plain, family)
    assert_same(evaluate(model, family), moved)
    fresh, _ = tempered(family, recipe)
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert_same(evaluate(fresh, family), moved)


@every_recipe
@every_family
def test_remove_leaves_no_trace(family: Family, recipe: str) -> None:
    twin, model = original(family), original(family)
    before = fingerprint(model)
    handle = attemper.apply(model, recipe, targets=family.targets)
    assert fingerprint(model) != before
    train(twin, family), train(model, family)
    handle.remove()
    assert fingerprint(model) == fingerprint(model.train()) == before
    assert_same(train_with_gradients(model, family), train_with_gradients(twin, family))


# ------------------------------------------------------------------------------------------------- what was put where
@every_family
def test_summary_lists_every_site_with_its_rate(family: Family) -> None:
    _, handle = tempered(family, "dropkey(0.3, schedule=decreasing) + dropattention(0.2)")
    rows, blocks, L = handle.summary(), blocks_of(family), family.blocks
    dropkey, dropattention = rows[::2], rows[1::2]
    assert [row.block for row in dropkey] == [row.block for row in dropattention] == blocks
    assert [row.rate for row in dropkey] == pytest.approx([0.3 * (L - l) / L for l in blocks])
    assert [row.rate for row in dropattention] == [0.2] * family.attentions
    assert {row.method for row in dropkey} == {"dropkey"}
    assert len({row.site for row in rows}) == family.attentions
    modules = dict(handle.model.named_modules())
    assert all(type(modules[row.site]).__name__ == row.module for row in rows)


# --------------------------------------------------------------------------------------------------- the random stream
class Twice(nn.Module):
    """Two attentions of equal weights, or one that is used twice, on the same input."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        first = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layers = nn.ModuleList([first, first if shared else copy.deepcopy(first)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x, x, x)[0] for layer in self.layers]


@pytest.mark.parametrize("shared", [False, True])
def test_layers_draw_different_masks(shared: bool) -> None:
    model, x = Twice(shared), torch.randn(2, 12, 16)
    attemper.apply(model, "dropkey(0.3)")
    first, second = model.train()(x)
    assert not torch.allclose(first, second)
    first, second = model.eval()(x)
    assert_same(first, second)


def test_processes_with_other_samples_draw_other_masks() -> None:
    """Real processes are in test_mesh.py."""
    vit = family("timm-vit")
    model, handle = tempered(vit, COMPOSED)
    alone = train(model, vit)
    outputs = []
    for rank in range(3):
        handle.samples(first=64 * rank, count=64)
        outputs.append(train(model, vit))
        assert_same(train(model, vit), outputs[-1])
    assert_same(outputs[0], alone)
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[1], outputs[2])
    assert not torch.allclose(outputs[0], outputs[2])


def by_hand(model: Any, x: Tensor) -> Tensor:
    """The hand-written model with dropkey(0.2) + dropattention(0.3), spelled out."""
    seed = draw_seed(x.device)
    for number, block in enumerate(model.stack):
        batch, tokens, width = x.shape
        qkv = block.to_qkv(block.norm(x)).view(batch, tokens, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        for lane, p in enumerate((0.2, 0.3)):
            keep = keep_mask(seed, logits.shape, p, lane=lane, site=f"stack.{number}")
            logits = logits.masked_fill(~keep, -torch.inf)
        assert logits.isfinite().any(-1).all(), "a row lost all of its keys: choose another seed"
        x = x + block.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))
    out: Tensor = model.head(x.mean(1))
    return out


def test_composed_methods_equal_the_two_applied_by_hand() -> None:
    hand_written = family("hand-written")
    model = original(hand_written).double()
    x = torch.randn(2, 10, 48, dtype=torch.float64)
    torch.manual_seed(5)
    wanted = by_hand(model, x)
    attemper.apply(model, "dropkey(0.2) + dropattention(0.3, rescale=normalize)", targets=hand_written.targets)
    torch.manual_seed(5)
    assert_same(model.train()(x), wanted, rtol=1e-12, atol=1e-12)


def test_composed_methods_equal_the_two_in_the_operator() -> None:
    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = torch.randn(3, 2, 3, 10, 8, dtype=torch.float64)
    methods = attemper.parse("dropkey(0.2) + dropattention(0.3, rescale=inverted)")
    model = Plain()
    attemper.apply(model, methods)
    torch.manual_seed(3)
    got = model.train()(q, k, v)
    torch.manual_seed(3)
    assert_same(got, attemper.attention(q, k, v, methods=methods, seed=draw_seed(q.device), impl="reference"))
