"""Skipless blocks, against blocks that were written by hand without their skips."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import NoSiteError, ParameterError
from attemper.methods import Skipless
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}
KINDS = {"attention": (True, False), "mlp": (False, True), "both": (True, True)}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoder(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(48, 3, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3)


# -------------------------------------------------------------------------------------------------- blocks by hand
def add(x, branch, removed):
    return branch if removed else x + branch


def timm_block(block, no_attention, no_mlp):
    def forward(x, **_):
        x = add(x, block.ls1(block.attn(block.norm1(x))), no_attention)
        return add(x, block.ls2(block.mlp(block.norm2(x))), no_mlp)

    return forward


def encoder_block(layer, no_attention, no_mlp):
    def attend(x):
        return layer.self_attn(x, x, x, need_weights=False)[0]

    def mlp(x):
        return layer.linear2(layer.linear1(x).relu())

    def forward(x, **_):
        if layer.norm_first:
            x = add(x, attend(layer.norm1(x)), no_attention)
            return add(x, mlp(layer.norm2(x)), no_mlp)
        x = layer.norm1(add(x, attend(x), no_attention))
        return layer.norm2(add(x, mlp(x), no_mlp))

    return forward


def torchvision_block(block, no_attention, no_mlp):
    def forward(x):
        y = block.ln_1(x)
        x = add(x, block.self_attention(y, y, y, need_weights=False)[0], no_attention)
        return add(x, block.mlp(block.ln_2(x)), no_mlp)

    return forward


def bert_outputs(layer, no_attention, no_mlp):
    for output, removed in ((layer.attention.output, no_attention), (layer.output, no_mlp)):
        output.forward = lambda hidden, x, o=output, r=removed: o.LayerNorm(add(x, o.dense(hidden), r))


def by_hand(name, removes, blocks=(0, 1, 2)):
    model = encoder(name == "pre-norm") if name in ("post-norm", "pre-norm") else build(FAMILY[name])
    kinds = {"timm-vit": timm_block, "torchvision-vit": torchvision_block}
    layers = {
        "timm-vit": lambda: model.blocks,
        "torchvision-vit": lambda: model.encoder.layers,
        "hf-bert": lambda: model.bert.encoder.layer,
    }.get(name, lambda: model.layers)()
    for i, layer in enumerate(layers):
        here = removes if i in blocks else (False, False)
        if name == "hf-bert":
            bert_outputs(layer, *here)
        else:
            layer.forward = kinds.get(name, encoder_block)(layer, *here)
    return model


def model_and_inputs(name):
    if name in ("post-norm", "pre-norm"):
        return encoder(name == "pre-norm"), {"args": (randn(2, 7, 48),)}
    return build(FAMILY[name]), FAMILY[name].inputs()


NAMES = ["timm-vit", "post-norm", "pre-norm", "hf-bert", "torchvision-vit"]


@pytest.mark.parametrize("skip", list(KINDS))
@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_skips_is_one_written_without_them(name, skip):
    model, inputs = model_and_inputs(name)
    attemper.apply(model, f"skipless({skip})")
    expected = by_hand(name, KINDS[skip])
    for training in (True, False):
        given = call(model.train(training), inputs)
        torch.testing.assert_close(given, call(expected.train(training), inputs), atol=1e-5, rtol=1e-4)
        with torch.no_grad():  # where an encoder would take its fast path
            torch.testing.assert_close(call(model, inputs), given, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(given, call(by_hand(name, (False, False)).eval(), inputs), atol=1e-3)


@pytest.mark.parametrize("name", ["timm-vit", "pre-norm", "hf-bert"])
def test_only_the_chosen_blocks_lose_theirs(name):
    model, inputs = model_and_inputs(name)
    attemper.apply(model, "skipless(attention, blocks=[0, 2])")
    expected = call(by_hand(name, (True, False), blocks=(0, 2)).train(), inputs)
    torch.testing.assert_close(call(model.train(), inputs), expected, atol=1e-5, rtol=1e-4)
    single, _ = model_and_inputs(name)
    attemper.apply(single, Skipless("both", blocks=1))
    expected = call(by_hand(name, (True, True), blocks=(1,)).train(), inputs)
    torch.testing.assert_close(call(single.train(), inputs), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["timm-vit", "post-norm", "hf-bert", "torchvision-vit", "timm-swin", "hf-pvt"])
def test_restoring_gives_the_model_back_bit_for_bit(name):
    model, inputs = model_and_inputs(name)
    before = [call(model.train(mode), inputs) for mode in (True, False)]
    state = copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    tempered = attemper.apply(model, "skipless(both)")
    assert not torch.allclose(call(model, inputs), before[1], atol=1e-4)
    with tempered.disabled():
        torch.testing.assert_close(call(model, inputs), before[1], atol=1e-5, rtol=1e-5)
    tempered.remove()
    for mode, expected in zip((True, False), before, strict=True):
        assert torch.equal(call(model.train(mode), inputs), expected)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_gradients_are_those_of_the_model_written_without_them():
    model, inputs = model_and_inputs("timm-vit")
    expected = by_hand("timm-vit", (True, False)).train()
    attemper.apply(model.train(), "skipless")
    for m in (model, expected):
        call(m, inputs).square().sum().backward()
    for (name, given), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(given.grad, other.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_without_the_attention_skip_conditioning_worsens_with_depth():
    import timm

    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 12, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options).double().eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)

    def conditions(recipe):
        """κ of the token matrix behind every block, the median over some images."""
        found = []
        hooks = [
            block.register_forward_hook(lambda _, __, out: found.append(torch.linalg.cond(out).median().item()))
            for block in model.blocks
        ]
        tempered = attemper.apply(model, recipe)
        with torch.no_grad():
            model(randn(4, 3, 32, 32).double())
        tempered.remove()
        for hook in hooks:
            hook.remove()
        return found

    with_skips, without, no_mlp_skip = conditions("none"), conditions("skipless"), conditions("skipless(mlp)")
    assert max(with_skips) < 1e3
    assert without[0] < without[1] < without[2] < without[3], "until float64 is exhausted"
    assert all(kappa > 1e13 for kappa in without[3:])
    assert with_skips[-1] < no_mlp_skip[-1] < without[-1], "the attention skip matters most"


def test_compiled_as_in_eager_mode():
    model, inputs = model_and_inputs("pre-norm")
    attemper.apply(model.train(), "skipless(attention, blocks=0)")
    eager = call(model, inputs)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(call(compiled, inputs), eager, atol=1e-6, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------- bad input
def test_a_shortcut_that_pools_and_projects_is_a_skip_connection():
    """Where MViTv2 halves the resolution, the skip goes through a pool, and at the first block of a stage a layer."""
    model, inputs = build(FAMILY["timm-mvitv2"]).train(), FAMILY["timm-mvitv2"].inputs()
    tempered = attemper.apply(model, "skipless")
    out = call(model, inputs)
    tempered.remove()
    whole = call(model, inputs)
    for stage in model.stages:
        for block in stage.blocks:
            block._shortcut_pool = lambda x, size: torch.zeros(())
    torch.testing.assert_close(out, call(model, inputs))
    assert not torch.allclose(out, whole)


def test_what_is_not_there_cannot_be_removed():
    model = build(FAMILY["timm-vit"])
    with pytest.raises(ParameterError, match="blocks: there is no block 3; the model has blocks 0 … 2"):
        attemper.apply(model, "skipless(attention, blocks=[0, 3])")
    with pytest.raises(NoSiteError, match="acts on blocks"):
        attemper.apply(nn.Linear(3, 3), "skipless")
    with pytest.raises(NoSiteError, match="acts on feed-forward networks"):
        attemper.apply(build(FAMILY["hand-written"]), "skipless(mlp)", targets=FAMILY["hand-written"].targets)
    for options, message in (
        ({"skip": "none"}, "skip must be one of attention, mlp, both; got 'none'"),
        ({"blocks": []}, "blocks must be a list of block indices"),
        ({"blocks": [-1]}, "blocks must be a list of block indices"),
        ({"blocks": [0.5]}, "blocks must be a list of block indices"),
    ):
        with pytest.raises(ParameterError, match=message):
            Skipless(**options)
    assert not any("_attemper" in module.__dict__ for module in model.modules())
