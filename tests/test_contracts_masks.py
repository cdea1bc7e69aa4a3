"""A tempered model still obeys its own masks, and computes what it did before where nothing is dropped."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from contracts import RECIPES, all_kept, assert_same, every_family, every_recipe, gradients, original, tempered, train
from families import Family, Inputs, call, family

__all__ = ["all_kept"]

HEAVY = ["dropkey(0.9)", "dropattention(0.9)", "dropattention(0.9, rescale=inverted)", "dropkey(0.9, share=queries)"]
"""Rows lose all of their visible keys all the time: that is when a mask is easily lost."""
heavily = pytest.mark.parametrize("recipe", HEAVY)


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A training pass that always draws the same masks."""
    torch.manual_seed(4)
    return model.train()(*args, **kwargs)


def changed(x: Tensor, *where: Any) -> Tensor:
    """A copy in which x[where] is something else altogether."""
    x = x.clone()
    x[where] = x[where].flip(-1) * 3 + 2
    return x


# ------------------------------------------------------------------------------------------------- nothing is dropped
SOFTMAX = {"timm-swin", "timm-swinv2", "timm-mvitv2", "hf-pvt", "torchvision-swin"}
"""Attention by matmul and softmax in every block: only softmax is ours, so not a single bit may change."""


def in_double(inputs: Inputs) -> Inputs:
    def wide(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(wide(part) for part in value)
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: wide(value) for name, value in inputs.items()}


@every_recipe
@every_family
@pytest.mark.usefixtures("all_kept")
def test_with_every_key_kept_outputs_and_gradients_are_the_originals(family: Family, recipe: str) -> None:
    if family.own_randomness:
        pytest.skip("what the model draws itself depends on how much was drawn before")
    plain = original(family).double().train()
    model = copy.deepcopy(plain)
    attemper.apply(model, recipe, targets=family.targets)
    inputs = in_double(family.inputs())
    got, wanted = call(model, inputs), call(plain, inputs)
    bitwise = {"rtol": 0.0, "atol": 0.0}
    tolerance = bitwise if family.name in SOFTMAX else {"rtol": 1e-6, "atol": 1e-10}
    torch.testing.assert_close(got, wanted, **tolerance)
    torch.testing.assert_close(gradients(model, got), gradients(plain, wanted), **tolerance)


# ----------------------------------------------------------------------------------------- torch.nn.MultiheadAttention
B, H, NQ, NK, D = 2, 2, 5, 6, 8
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim, vdim": {"kdim": 4, "vdim": 12},
}
LAYOUTS = ("batch first", "batch second", "unbatched")


def masks(kind: str, batched: bool) -> dict[str, Tensor]:
    """Masks that forbid key 2, and more. In torch's own way: True, or −inf, is forbidden."""
    forbidden = torch.zeros(NQ, NK, dtype=torch.bool)
    forbidden[:, 2] = True
    forbidden[1, 4:] = True
    additive = torch.linspace(-1, 1, NQ * NK).view(NQ, NK).masked_fill(forbidden, -torch.inf)
    padding = torch.zeros(B, NK, dtype=torch.bool)
    padding[:, 2] = True
    padding[1, 5] = True
    padding = padding if batched else padding[0]
    per_head = forbidden.repeat(B * H if batched else H, 1, 1)
    per_head[0, 0, 0] = True
    return {
        "none": {},
        "bool": {"attn_mask": forbidden},
        "float": {"attn_mask": additive},
        "per head": {"attn_mask": per_head},
        "padding": {"key_padding_mask": padding},
        "bool and padding": {"attn_mask": forbidden, "key_padding_mask": padding},
        "float and padding": {
            "attn_mask": additive,
            "key_padding_mask": torch.zeros(padding.shape).masked_fill(padding, -torch.inf),
        },
    }[kind]


MASKS = ("none", "bool", "float", "per head", "padding", "bool and padding", "float and padding")


def multihead(extra: str, layout: str) -> tuple[nn.MultiheadAttention, list[Tensor]]:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(D, H, batch_first=layout == "batch first", **EXTRAS[extra])
    tensors = [torch.randn(B, n, d) for n, d in ((NQ, D), (NK, module.kdim), (NK, module.vdim))]
    if layout == "unbatched":
        tensors = [t[0] for t in tensors]
    if layout == "batch second":
        tensors = [t.transpose(0, 1) for t in tensors]
    return module, tensors


every_multihead = pytest.mark.parametrize(
    ("extra", "layout", "mask"), list(itertools.product(EXTRAS, LAYOUTS, MASKS)), ids=lambda value: value
)


@every_multihead
@pytest.mark.usefixtures("all_kept")
def test_multihead_attention_with_every_key_kept_is_the_originals(extra: str, layout: str, mask: str) -> None:
    plain, (q, k, v) = multihead(extra, layout)
    model = copy.deepcopy(plain)
    attemper.apply(model, "dropkey(0.3) + dropattention(0.3, rescale=normalize)")
    for options in ({"need_weights": False}, {"need_weights": True}, {"average_attn_weights": False}):
        given = {**options, **masks(mask, layout != "unbatched")}
        (got, got_weights), (wanted, wanted_weights) = model(q, k, v, **given), plain(q, k, v, **given)
        assert_same((got, got_weights), (wanted, wanted_weights), rtol=1e-5, atol=1e-6)
        assert_same(gradients(model, got), gradients(plain, wanted), rtol=1e-5, atol=1e-5)


@every_multihead
def test_multihead_attention_keeps_masked_keys_out(extra: str, layout: str, mask: str) -> None:
    model, (q, k, v) = multihead(extra, layout)
    attemper.apply(model, "dropkey(0.9)")
    where = (slice(None), 2) if layout == "batch first" else (2,)
    for need_weights in (False, True):
        given = {"need_weights": need_weights, **masks(mask, layout != "unbatched")}
        out, weights = run(model, q, k, v, **given)
        other, _ = run(model, q, changed(k, *where), changed(v, *where), **given)
        assert out.isfinite().all()
        assert torch.equal(out, other) == (mask != "none")
        if weights is not None:
            keys = weights[..., :NK]
            assert (keys[..., 2] == 0).all() == (mask != "none")
            assert_same(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=1e-6, atol=0.0)


def test_multihead_attention_of_one_tensor_is_the_originals() -> None:
    """Self-attention takes another route through the projections than attention over other tokens."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, batch_first=True)
    model = copy.deepcopy(plain)
    attemper.apply(model, "dropkey(1e-9)")
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 6, 8)
    for arguments in ((x, x, x), (x, memory, memory)):
        assert_same(model(*arguments), plain(*arguments), rtol=1e-5, atol=1e-6)


def test_causal_hint_of_multihead_attention_is_obeyed() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    attemper.apply(model, "dropkey(0.9)")
    x = torch.randn(2, 6, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    for need_weights in (False, True):
        options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
        out, other = run(model, x, x, x, **options)[0], run(model, *[changed(x, slice(None), 4)] * 3, **options)[0]
        assert_same(out[:, :4], other[:, :4])
        assert not torch.equal(out[:, 4:], other[:, 4:])


# -------------------------------------------------------------------------------------------------------- whole models
@heavily
def test_bert_keeps_padding_out(recipe: str) -> None:
    bert = family("hf-bert")
    model, _ = tempered(bert, recipe)
    inputs = bert.inputs()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    visible = mask.bool()
    padded, seen = ids.clone(), ids.clone()
    padded[~visible] = 7
    seen[1, 3] = (seen[1, 3] + 1) % 90
    out, same, other = (run(model.bert, input_ids=t, attention_mask=mask)[0] for t in (ids, padded, seen))
    assert out.isfinite().all()
    assert_same(same[visible], out[visible])
    assert not torch.equal(same[~visible], out[~visible])
    assert not torch.equal(other[visible], out[visible])


@heavily
def test_transformer_encoder_keeps_padding_out(recipe: str) -> None:
    model, _ = tempered(family("nn-encoder"), recipe)
    x = torch.randn(2, 10, 48)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 3:] = True
    out, other = (run(model, t, src_key_padding_mask=padding) for t in (x, changed(x, 0, slice(3, None))))
    assert out[~padding].isfinite().all()
    assert_same(other[~padding], out[~padding])
    assert not torch.equal(run(model, changed(x, 0, 1), src_key_padding_mask=padding)[0, :3], out[0, :3])


@heavily
def test_transformer_encoder_with_padding_is_the_originals_in_eval(recipe: str) -> None:
    """There torch takes its fast path, with nested tensors, which any patch could switch off."""
    plain, (model, _) = original(family("nn-encoder")).eval(), tempered(family("nn-encoder"), recipe)
    x = torch.randn(2, 10, 48)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 6:] = True
    with torch.no_grad():
        got = model.eval()(x, src_key_padding_mask=padding)
        wanted = plain(x, src_key_padding_mask=padding)
    assert_same(got, wanted)


@heavily
def test_transformer_decoder_keeps_the_future_and_the_padding_out(recipe: str) -> None:
    model, _ = tempered(family("nn-decoder"), recipe)
    x, memory = torch.randn(2, 7, 48), torch.randn(2, 10, 48)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[:, 4:] = True
    options = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(7),
        "tgt_is_causal": True,
        "memory_key_padding_mask": padding,
    }
    out = run(model, x, memory, **options)
    assert_same(run(model, x, changed(memory, slice(None), slice(4, None)), **options), out)
    assert not torch.equal(run(model, x, changed(memory, slice(None), 2), **options), out)
    later = run(model, changed(x, slice(None), 5), memory, **options)
    assert_same(later[:, :5], out[:, :5])
    assert not torch.equal(later[:, 5:], out[:, 5:])


@heavily
def test_detr_keeps_the_padding_of_an_image_out(recipe: str) -> None:
    model, _ = tempered(family("hf-detr"), recipe)
    encoder, decoder = model.model.encoder, model.model.decoder
    tokens = torch.randn(2, 16, 48)  # instead of the backbone's: a convolution looks over the padding's edge
    visible = torch.ones(2, 16, dtype=torch.bool)
    visible[1, 8:] = False

    def encode(t: Tensor) -> Tensor:
        out: Tensor = run(encoder, inputs_embeds=t, attention_mask=visible, spatial_position_embeddings=None)[0]
        return out

    out = encode(tokens)
    assert_same(encode(changed(tokens, ~visible))[visible], out[visible])
    assert not torch.equal(encode(changed(tokens, visible))[visible], out[visible])

    def decode(memory: Tensor) -> Tensor:
        queries = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
        out: Tensor = run(decoder, inputs_embeds=queries, encoder_hidden_states=memory, encoder_attention_mask=visible)[
            0
        ]
        return out

    assert_same(decode(changed(tokens, ~visible)), decode(tokens))
    assert not torch.equal(decode(changed(tokens, visible)), decode(tokens))


def shifted_block(name: str, model: Any) -> Any:
    """The second block of the first stage on a (2, 16, 16, 24) map, and what it gives."""
    if name == "timm-swin" or name == "timm-swinv2":
        block = model.layers[0].blocks[1]
        return lambda x: run(block, x)
    if name == "torchvision-swin":
        block = model.features[1][1]
        return lambda x: run(block, x)
    block = model.swin.encoder.layers[0].blocks[1]

    def hugging(x: Tensor) -> Tensor:
        out = run(block, x.flatten(1, 2), (16, 16))
        return (out if isinstance(out, Tensor) else out[0]).view(2, 16, 16, -1)

    return hugging


@heavily
@pytest.mark.parametrize("name", ["timm-swin", "timm-swinv2", "hf-swin", "torchvision-swin"])
def test_shifted_windows_keep_tokens_from_across_the_border_out(name: str, recipe: str) -> None:
    model, _ = tempered(family(name), recipe)
    block = shifted_block(name, model)
    x = torch.randn(2, 16, 16, 24)
    out, other = block(x), block(changed(x, slice(None), 0, 0))
    near = torch.zeros(16, 16, dtype=torch.bool)
    near[:2, :2] = True  # the token's neighbours; the rest of its window comes from the other borders of the image
    assert out.isfinite().all()
    assert_same(other[:, ~near], out[:, ~near])
    assert not torch.equal(other[:, near], out[:, near])


# --------------------------------------------------------------------------------------------------- shapes of the call
class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "broadcast", "causal"])
@pytest.mark.usefixtures("all_kept")
def test_the_call_takes_whatever_torchs_does(lead: tuple[int, ...], mask: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(*lead, 5, 4), torch.randn(*lead, 5, 4), torch.randn(*lead, 5, 8)
    allowed = torch.rand(*lead, 5, 5) < 0.6
    allowed[..., 0] = True
    options: dict[str, Any] = {
        "none": {"scale": 0.3},
        "bool": {"attn_mask": allowed},
        "float": {"attn_mask": torch.randn(*lead, 5, 5)},
        "broadcast": {"attn_mask": allowed.reshape(-1, 5, 5)[0]},
        "causal": {"is_causal": True},
    }[mask]
    model = Plain()
    attemper.apply(model, RECIPES[-1])
    assert_same(model(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------- the model's own dropout
class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        values = torch.eye(x.shape[1]).expand(x.shape[0], 1, -1, -1)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], values, dropout_p=0.5 if self.training else 0.0)


class Multihead(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x, x, x, need_weights=True)[1]


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return self.dropout((x @ x.transpose(-2, -1) / 8)[:, None].softmax(-1))


OWN_DROPOUT = {
    "scaled_dot_product_attention": Fused,
    "multi_head_attention_forward": lambda: Multihead(64, 1, dropout=0.5, batch_first=True),
    "softmax": Softmax,
}


@pytest.mark.parametrize("way", OWN_DROPOUT)
def test_the_models_own_attention_dropout_still_acts(way: str) -> None:
    torch.manual_seed(0)
    model, x = OWN_DROPOUT[way](), 0.1 * torch.randn(8, 64, 64)
    attemper.apply(model, "dropkey(0.2)", targets="")
    weights = model.train()(x)  # values are the identity, so that what comes out are the weights themselves
    share = 1 - 0.8 * 0.5
    error = (share * (1 - share) / weights.numel()) ** 0.5
    assert (weights == 0).double().mean().item() == pytest.approx(share, abs=4 * error)
    sums = weights.sum(-1)
    assert sums.std() > 0.05, "inverted dropout does not renormalise its rows"
    assert sums.mean().item() == pytest.approx(1, abs=0.05)


def test_the_models_own_dropout_is_the_only_one_left_at_rate_zero() -> None:
    vit = family("timm-vit")
    model, handle = tempered(vit, RECIPES[0])
    for block in model.blocks:
        block.attn.attn_drop.p = 0.5
    plain = copy.deepcopy(model)
    attemper.Tempered.of(plain).remove()
    handle.set_rate(0)
    assert_same(train(model, vit), train(plain, vit))
