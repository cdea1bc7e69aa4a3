"""Context broadcasting, against its formulas and against models whose layers were rewritten by hand."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.errors import ConflictError, NoSiteError, ParameterError
from attemper.methods import ContextBroadcast
from attemper.methods.broadcast import context_broadcast
from attemper.tempering.layers import from_tokens, to_tokens
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(given, expected, atol=1e-6):
    torch.testing.assert_close(given, expected, atol=atol, rtol=1e-5)


FORMULAS = {
    "cb": lambda x: (x + x.mean(1, keepdim=True)) / 2,
    "cb_s": lambda x: (x + x.mean(1, keepdim=True)) / 2,
    "gate": lambda x: x * (x[:, :1] + 1),
    "hybrid": lambda x: x * x[:, :1] + (x + x.mean(1, keepdim=True)) / 2,
}


# -------------------------------------------------------------------------------------------------------- the formulas
@pytest.mark.parametrize("variant", list(FORMULAS))
def test_each_variant_is_its_formula(variant):
    x = randn(2, 5, 4).double()
    torch.testing.assert_close(context_broadcast(x, variant), FORMULAS[variant](x), atol=1e-14, rtol=0)


def test_cb_s_scales_the_mean_channel_by_channel():
    x, scale = randn(2, 5, 4), torch.tensor([0.0, 1.0, 2.0, -1.0])
    same(context_broadcast(x, "cb_s", scale=scale), (x + scale * x.mean(1, keepdim=True)) / 2)


def test_the_mean_leaves_padding_out():
    x = randn(2, 5, 4)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    out = context_broadcast(x, "hybrid", real=real)
    mean = torch.stack([x[0].mean(0), x[1, :3].mean(0)])[:, None]
    same(out, x * x[:, :1] + (x + mean) / 2)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("batch_first", (2, 6, 4)),
        ("batch_first", (2, 2, 3, 4)),
        ("sequence_first", (6, 2, 4)),
        ("channels_first", (2, 4, 2, 3)),
        ("batch_first", (6, 4)),
    ],
)
def test_tokens_come_back_in_the_layout_they_came_in(layout, shape):
    x = randn(*shape)
    tokens = to_tokens(x, layout)
    assert tokens.shape == ((1 if len(shape) == 2 else 2), 6, 4)
    assert torch.equal(from_tokens(tokens, x, layout), x)
    spread = from_tokens(tokens.mean(1, keepdim=True).expand_as(tokens), x, layout)
    axes = {("batch_first", 3): 1, ("batch_first", 4): (1, 2), ("sequence_first", 3): 0, ("channels_first", 4): (2, 3)}
    same(spread, x.mean(axes.get((layout, len(shape)), 0), keepdim=True).expand_as(x))


# ---------------------------------------------------------------------------------------------------------- positions
def rewritten(name, change, position="end", branch="mlp"):
    """The family's model with its MLPs (and attention branches) written out by hand."""
    model = build(FAMILY[name])

    def mlp_forward(mlp, x):
        x = change(x) if position == "front" else x
        hidden = mlp.norm(mlp.drop1(mlp.act(mlp.fc1(x))))
        out = mlp.fc2(change(hidden) if position == "mid" else hidden)
        return mlp.drop2(change(out) if position == "end" else out)

    for block in model.blocks:
        if branch != "attention":
            block.mlp.forward = lambda x, mlp=block.mlp: mlp_forward(mlp, x)
        if branch != "mlp":
            proj = block.attn.proj
            proj.forward = lambda x, layer=proj: change(nn.functional.linear(x, layer.weight, layer.bias))
    return model


@pytest.mark.parametrize("position", ["front", "mid", "end"])
@pytest.mark.parametrize("variant", list(FORMULAS))
def test_a_model_with_it_is_one_rewritten_by_hand(variant, position):
    inputs = FAMILY["timm-vit"].inputs()
    model = build(FAMILY["timm-vit"])
    attemper.apply(model, f"cb({variant}, position={position})")
    by_hand = rewritten("timm-vit", FORMULAS[variant], position)
    same(call(model.train(), inputs), call(by_hand.train(), inputs))
    same(call(model.eval(), inputs), call(by_hand.eval(), inputs))
    assert not torch.allclose(call(model, inputs), call(build(FAMILY["timm-vit"]).eval(), inputs), atol=1e-4)


@pytest.mark.parametrize("branch", ["attention", "both"])
def test_the_attention_branch_ends_after_its_projection(branch):
    inputs = FAMILY["timm-vit"].inputs()
    model = build(FAMILY["timm-vit"]).train()
    attemper.apply(model, f"cb(branch={branch})")
    same(call(model, inputs), call(rewritten("timm-vit", FORMULAS["cb"], branch=branch).train(), inputs))


@pytest.mark.parametrize("name", ["timm-vit", "hf-bert", "torchvision-vit", "nn-encoder", "torchvision-swin"])
def test_mid_and_end_are_equal_for_cb(name):
    outputs = []
    for position in ("mid", "end", "front"):
        model = build(FAMILY[name]).train()
        attemper.apply(model, ContextBroadcast(position=position))
        outputs.append(call(model, FAMILY[name].inputs()))
    same(outputs[0], outputs[1], 1e-5)
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-5)


def test_mid_and_end_differ_for_gate_and_for_a_trained_cb_s():
    for recipe in ("cb(gate{})", "cb(cb_s{})"):
        outputs = []
        for position in ("", ", position=mid"):
            model = build(FAMILY["timm-vit"]).train()
            attemper.apply(model, recipe.format(position))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.startswith("attemper."):
                        parameter.copy_(randn(*parameter.shape, seed=1))
            outputs.append(call(model, FAMILY["timm-vit"].inputs()))
        assert not torch.allclose(*outputs, atol=1e-4), recipe


# ------------------------------------------------------------------------------------------------- padding and layouts
def encoder(batch_first=True, norm_first=False, nested=True):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def encoder_by_hand(model, x, padding=None):
    """A post-norm encoder with CB at the end of its MLPs; x (B, N, d)."""
    real = torch.ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding
    for layer in model.layers:
        attn = layer.self_attn
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in nn.functional.linear(x, attn.in_proj_weight, attn.in_proj_bias).chunk(3, -1)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
        x = layer.norm1(x + attn.out_proj(out.transpose(1, 2).flatten(2)))
        hidden = layer.linear2(layer.linear1(x).relu())
        mean = torch.stack([h[r].mean(0) for h, r in zip(hidden, real, strict=True)])[:, None]
        x = layer.norm2(x + (hidden + mean) / 2)
    return x


@pytest.mark.parametrize("mode", ["train", "eval", "eval without gradients"])
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_leaves_padding_out_in_training_and_past_its_fast_path(mode, padded):
    model = encoder()
    x, padding = randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    mask = padding if padded else None
    expected = encoder_by_hand(model, x, mask)
    model.train(mode == "train")
    before = model(x, src_key_padding_mask=mask)
    tempered = attemper.apply(model, "cb")
    with torch.set_grad_enabled(mode != "eval without gradients"):
        given = model(x, src_key_padding_mask=mask)
    real = ~padding if padded else torch.ones_like(padding)
    same(given[real], expected[real], 1e-5)
    tempered.remove()
    assert torch.equal(model(x, src_key_padding_mask=mask), before)


def test_an_encoder_with_the_sequence_first():
    first, second = encoder(batch_first=False).train(), encoder().train()
    second.load_state_dict(first.state_dict())
    attemper.apply(first, "cb")
    x = randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    given = first(x.transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1)
    same(given[~padding], encoder_by_hand(second, x, padding)[~padding], 1e-5)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_bert_leaves_padding_out(kind):
    family = FAMILY["hf-bert"]
    inputs = family.inputs()
    alone = {name: value[1:, :6] for name, value in inputs.items()}
    model = build(family).train()
    model.set_attn_implementation(kind)
    attemper.apply(model, "cb(branch=both)")
    padded, unpadded = call(model, inputs)[1:], call(model, alone)
    same(padded, unpadded, 1e-5)
    inputs["input_ids"][1, 6:] = 7
    same(call(model, inputs)[1:], unpadded, 1e-5)


def test_padding_of_one_pass_is_forgotten_in_the_next():
    model, plain = encoder().train(), encoder()
    attemper.apply(model, "cb")
    x, padding = randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[:, 2:] = True
    model(x, src_key_padding_mask=padding)
    same(model(x), encoder_by_hand(plain, x), 1e-5)


class CheckpointedNetwork(nn.TransformerEncoderLayer):
    """Its feed-forward network alone is computed again in backward, and its attention is not."""

    again: str | None = None

    def _ff_block(self, x):
        if self.again is None:
            return super()._ff_block(x)
        return checkpoint(super()._ff_block, x, use_reentrant=self.again == "reentrant")


@pytest.mark.parametrize("again", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("recipe", ["cb", "cb(hybrid, prefix=1)"])
def test_a_network_that_is_computed_again_leaves_out_the_padding_of_its_own_pass(recipe, again):
    torch.manual_seed(0)
    layer = CheckpointedNetwork(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    attemper.apply(model, recipe)
    x, padding = randn(2, 5, 16).double(), torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 2:] = True

    def gradients():
        some = model(x, src_key_padding_mask=padding)[~padding]
        others = model(x, src_key_padding_mask=padding.flip(0))[~padding.flip(0)]
        total = some.square().sum() + others.sum() + model(x).cos().sum()
        model.zero_grad()
        total.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients()
    for each in model.layers:
        each.again = again
    for one, other in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["torchvision-swin", "timm-swin"])
def test_the_mean_of_a_feature_map_runs_over_all_of_it(name):
    family = FAMILY[name]
    model, by_hand = build(family).train(), build(family).train()
    attemper.apply(model, "cb")
    for module in list(by_hand.modules()):
        if type(module).__name__ in ("MLP", "Mlp"):
            last = module.fc2 if name == "timm-swin" else module[3]
            last.register_forward_hook(
                lambda _, __, out: (out + out.mean(tuple(range(1, out.dim() - 1)), keepdim=True)) / 2
            )
    same(call(model, family.inputs()), call(by_hand, family.inputs()), 1e-5)


# ---------------------------------------------------------------------------------------------------- its parameters
def test_cb_s_starts_as_cb_and_its_scales_are_parameters_of_the_model():
    family = FAMILY["timm-vit"]
    model, plain = build(family).train(), build(family).train()
    attemper.apply(model, "cb(cb_s, branch=both)")
    attemper.apply(plain, "cb(branch=both)")
    out = call(model, family.inputs())
    same(out, call(plain, family.inputs()))
    added = {name: p for name, p in model.named_parameters() if name.startswith("attemper.")}
    assert len(added) == 2 * 3
    assert all(p.shape == (48,) and (p == 1).all() and p.requires_grad for p in added.values())
    assert set(model.state_dict()) - set(plain.state_dict()) == set(added)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in added.values())


def test_its_scales_move_with_the_model():
    family = FAMILY["timm-vit"]
    model = build(family)
    attemper.apply(model, "cb(cb_s)")
    model.to(torch.float64).train()
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert call(model, {"args": (family.inputs()["args"][0].double(),)}).dtype == torch.float64
    model.to("meta")
    assert all(p.is_meta for p in model.parameters())


def test_they_are_saved_and_loaded_and_a_plain_checkpoint_fits_strictly():
    family = FAMILY["timm-vit"]
    plain = build(family)
    model, other = build(family), build(family)
    attemper.apply(model, "cb(cb_s)")
    attemper.apply(other, "cb(cb_s)")
    for parameter in model.attemper.parameters():
        parameter.data = randn(48, seed=3)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(call(other.eval(), family.inputs()), call(model.eval(), family.inputs()))
    before = copy.deepcopy(list(model.attemper.parameters()))
    assert model.load_state_dict(plain.state_dict(), strict=True).missing_keys == []
    assert all(torch.equal(a, b) for a, b in zip(before, model.attemper.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain.load_state_dict(model.state_dict())


def test_a_copy_has_scales_of_its_own():
    family = FAMILY["timm-vit"]
    model = build(family).eval()
    attemper.apply(model, "cb(cb_s)")
    before = call(model, family.inputs())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        for parameter in twin.attemper.parameters():
            parameter.data.zero_()
        assert not torch.allclose(call(twin, family.inputs()), before, atol=1e-5)
        assert torch.equal(call(model, family.inputs()), before)


@pytest.mark.parametrize("recipe", ["cb(cb_s, branch=both)", "cb(hybrid)"])
def test_remove_takes_everything_away(recipe):
    family = FAMILY["timm-vit"]
    model = build(family).eval()
    before, keys = call(model, family.inputs()), list(model.state_dict())
    tempered = attemper.apply(model, recipe)
    assert not torch.equal(call(model, family.inputs()), before)
    with tempered.disabled():
        assert torch.equal(call(model, family.inputs()), before)
    tempered.remove()
    assert torch.equal(call(model, family.inputs()), before)
    assert list(model.state_dict()) == keys
    assert not hasattr(model, "attemper")


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", ["timm-vit-registers", "timm-swin", "nn-encoder", "hf-pvt"])
@pytest.mark.parametrize("variant", ["gate", "hybrid"])
def test_gate_and_hybrid_refuse_a_model_without_a_class_token(name, variant):
    model = build(FAMILY[name])
    with pytest.raises(NoSiteError, match=rf"cb\({variant}\)' needs a class token.*say so: prefix=1"):
        attemper.apply(model, f"cb({variant})")
    assert not any("_attemper" in module.__dict__ for module in model.modules())


# --------------------------------------------------------------------------------------------- a class token by prefix
@pytest.mark.parametrize("variant", ["gate", "hybrid"])
@pytest.mark.parametrize("position", ["front", "mid", "end"])
def test_prefix_says_that_the_first_token_is_a_class_token(position, variant):
    model = encoder(nested=False).double().eval()
    plain, x = copy.deepcopy(model), randn(2, 5, 16).double()
    recipe = f"cb({variant}, position={position}, prefix=1)".replace(", position=end", "")
    tempered = attemper.apply(model, recipe)
    assert attemper.render(tempered.methods) == recipe
    assert attemper.parse(recipe) == list(tempered.methods)

    def by_hand(layer, h):
        where = {name: FORMULAS[variant] if name == position else lambda t: t for name in ("front", "mid", "end")}
        h = layer.norm1(h + layer.self_attn(h, h, h, need_weights=False)[0])
        hidden = where["mid"](layer.activation(layer.linear1(where["front"](h))))
        return layer.norm2(h + where["end"](layer.linear2(hidden)))

    expected = x
    for layer in plain.layers:
        expected = by_hand(layer, expected)
    torch.testing.assert_close(model(x), expected, atol=1e-12, rtol=0)
    tempered.remove()
    assert torch.equal(model(x), plain(x))


def test_where_the_class_token_is_known_prefix_changes_nothing():
    family, outputs = FAMILY["timm-vit"], []
    for recipe in ("cb(gate)", "cb(gate, prefix=1)"):
        model = build(family).eval()
        attemper.apply(model, recipe)
        outputs.append(call(model, family.inputs()))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["hf-bert", "timm-swin", "timm-vit-registers"])
def test_prefix_serves_models_whose_class_token_nobody_knows(name):
    family = FAMILY[name]
    model = build(family).eval()
    before = call(model, family.inputs())
    attemper.apply(model, "cb(hybrid, prefix=1)")
    assert not torch.allclose(call(model, family.inputs()), before, atol=1e-4)
    call(model.train(), family.inputs()).sum().backward()


@pytest.mark.parametrize("variant", ["gate", "hybrid"])
def test_padding_on_the_left_is_not_taken_for_the_class_token(variant):
    model = encoder(nested=False).double().eval()
    attemper.apply(model, f"cb({variant}, prefix=1)")
    x = randn(2, 6, 16).double()
    padding = torch.tensor([[True, True, False, False, False, False], [False] * 6])
    out = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[0, 2:], model(x[:1, 2:])[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(out[1], model(x[1:])[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": 1}, "prefix belongs to variant=gate or hybrid, and variant is cb: its mean is over all tokens"),
        ({"variant": "cb_s", "prefix": 1}, "prefix belongs to variant=gate or hybrid, and variant is cb_s"),
        ({"variant": "gate", "prefix": 0}, "variant=gate needs a class token: prefix must be at least 1, got 0"),
        ({"variant": "hybrid", "prefix": -1}, "prefix must be a number .* got -1"),
        ({"variant": "hybrid", "prefix": True}, "prefix must be a number .* got True"),
    ],
)
def test_bad_prefixes_are_named(options, message):
    with pytest.raises(ParameterError, match=message):
        ContextBroadcast(**options)


def test_causal_attention_is_refused_with_the_reason():
    model = encoder(nested=False).train()
    attemper.apply(model, "cb")
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with pytest.raises(ConflictError, match=r"'layers.0.self_attn' is causal.*every token its future.*targets="):
        model(randn(2, 5, 16), mask=mask, is_causal=True)
    decoder = build(FAMILY["nn-decoder"]).train()
    attemper.apply(decoder, "cb")
    with pytest.raises(ConflictError, match="is causal"):
        call(decoder, FAMILY["nn-decoder"].inputs())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_hides_tokens_from_some_queries_is_refused(dtype):
    model = encoder(nested=False).train()
    attemper.apply(model, "cb")
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask = mask if dtype == torch.bool else torch.zeros(5, 5).masked_fill(mask, -torch.inf)
    with pytest.raises(ConflictError, match=r"'layers.0.self_attn' hides some tokens from others.*targets="):
        model.layers[0](randn(2, 5, 16), src_mask=mask)


def test_bad_parameters_are_named():
    for options, message in (
        ({"variant": "sum"}, "variant must be one of cb, cb_s, gate, hybrid; got 'sum'"),
        ({"branch": "head"}, "branch must be one of mlp, attention, both; got 'head'"),
        ({"position": "back"}, "position must be one of front, mid, end; got 'back'"),
    ):
        with pytest.raises(ParameterError, match=message):
            ContextBroadcast(**options)
