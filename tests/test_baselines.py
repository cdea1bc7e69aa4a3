"""DropHead, LayerDrop, DropPath, dropout in the MLP and DropConnect, against formulas on the same random stream."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import attemper
from attemper import attention, keep_mask
from attemper.errors import ConflictError, ParameterError
from attemper.methods import DropConnect, DropHead, DropPath, FeedForwardDropout, LayerDrop
from attemper.methods.drophead import drophead
from attemper.methods.kinds import Tokens
from attemper.ops.stream import Stream
from families import FAMILIES, build, call
from one_seed import draw_from

FAMILY = {family.name: family for family in FAMILIES}
SEED = 7
P = 0.4


@pytest.fixture
def one_seed(monkeypatch):
    """Every draw in a model starts from SEED, so that its masks can be written down."""
    draw_from(SEED, monkeypatch)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stream(seed=SEED):
    return Stream(torch.tensor(seed))


def same(given, expected, atol=1e-5):
    torch.testing.assert_close(given, expected, atol=atol, rtol=1e-4)


def near(share, p, draws):
    return abs(float(share) - p) < 4 * math.sqrt(p * (1 - p) / draws)


# ------------------------------------------------------------------------------------------------------------ DropHead
@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_drophead_scales_what_is_left_by_heads_over_kept(impl):
    q, k, v = (randn(5, 4, 6, 3, seed=i).double() for i in range(3))
    plain = attention(q, k, v)
    given = attention(q, k, v, methods=DropHead(P), seed=SEED, impl=impl)
    keep = keep_mask(SEED, (5, 1, 1, 4), P).view(5, 4)
    assert not keep.all()
    expected = torch.zeros_like(plain)
    for b in range(5):
        kept = keep[b] if keep[b].any() else torch.ones(4, dtype=torch.bool)
        for h in range(4):
            if kept[h]:
                expected[b, h] = plain[b, h] * 4 / int(kept.sum())
    same(given, expected, 1e-12)


def test_drophead_never_drops_all():
    out = drophead(torch.ones(2, 3, 1, 1), torch.tensor([[False] * 3, [True, False, False]]))
    assert out.flatten().tolist() == [1, 1, 1, 3, 0, 0]
    heads = DropHead(0.95).perturb_heads(torch.ones(4000, 2, 1, 1), stream())
    assert (heads.sum(1) == 2).all(), "H in all, whatever is kept"


def test_drophead_drops_heads_of_each_sample_at_its_rate():
    heads = DropHead(0.3).perturb_heads(torch.ones(2000, 8, 1, 1), stream()).view(2000, 8)
    assert near((heads == 0).float().mean(), 0.3 - 0.3**8, 16000)
    assert len({tuple(row) for row in (heads == 0).tolist()}) > 100


# ----------------------------------------------------------------------------------------------------------- LayerDrop
def test_layerdrop_skips_the_block_for_the_whole_batch_without_rescaling():
    before, after = randn(3, 4, 5), randn(3, 4, 5, seed=1)
    seen = set()
    for seed in range(20):
        out = LayerDrop(P).map_block(before, after, stream(seed))
        kept = bool(keep_mask(seed, (1, 1, 1, 1), P))
        assert torch.equal(out, after if kept else before)
        seen.add(kept)
    assert seen == {True, False}


def test_layerdrop_drops_blocks_at_their_rates():
    before, after = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    kept = [LayerDrop(0.3).map_block(before, after, stream(seed)).item() for seed in range(2000)]
    assert near(1 - sum(kept) / 2000, 0.3, 2000)


@pytest.mark.parametrize("name", ["timm-vit", "hf-bert", "nn-encoder", "torchvision-vit"])
def test_a_model_whose_blocks_are_all_dropped_passes_its_input_through(name, monkeypatch):
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
    family = FAMILY[name]
    model, plain = build(family).train(), build(family).train()
    attemper.apply(model, "layerdrop(0.9)")
    for module in plain.modules():
        if type(module).__name__ in ("Block", "BertLayer", "TransformerEncoderLayer", "EncoderBlock"):
            module.forward = lambda x, *_, **__: x
    same(call(model, family.inputs()), call(plain, family.inputs()))


# ----------------------------------------------------------------------------- DropPath and feed-forward dropout
def test_droppath_takes_a_sample_or_leaves_it():
    x = randn(6, 3, 4)
    keep = keep_mask(SEED, (6, 1, 1, 1), P).view(6, 1, 1)
    given = DropPath(P).map_branch(x, stream())
    assert torch.equal(given, torch.where(keep, x / (1 - P), torch.zeros_like(x)))
    many = DropPath(0.3).map_branch(torch.ones(8000, 1, 1, 1), stream())
    assert near((many == 0).float().mean(), 0.3, 8000)
    assert abs(many.mean() - 1) < 0.05, "the expectation stays"


def test_ffdropout_is_inverted_dropout_of_every_entry():
    x = randn(2, 5, 8)
    keep = keep_mask(SEED, (2, 1, 5, 8), P).view(2, 5, 8)
    given = FeedForwardDropout(P).map_tokens(x, Tokens(None), stream())
    assert torch.equal(given, torch.where(keep, x / (1 - P), torch.zeros_like(x)))
    many = FeedForwardDropout(0.3).map_tokens(torch.ones(20, 40, 50), Tokens(None), stream())
    assert near((many == 0).float().mean(), 0.3, 40000)


def paths_by_hand(name, keep):
    """The model whose residual branches are multiplied by keep (B,), one factor per sample."""
    model = build(FAMILY[name]).train()
    ends = (".attn", ".mlp", ".self_attn", ".linear2", ".output.dense", ".self_attention")
    if name == "timm-swinv2":
        ends = (".norm1", ".norm2")  # its branches end with a norm

    def scaled(_, __, out):
        x = out[0] if isinstance(out, tuple) else out
        x = x * keep.view(-1, *[1] * (x.dim() - 1))
        return (x, *out[1:]) if isinstance(out, tuple) else x

    for where, module in model.named_modules():
        if where.endswith(ends):
            module.register_forward_hook(scaled)
    return model


@pytest.mark.parametrize("name", ["timm-vit", "nn-encoder", "hf-bert", "torchvision-vit", "timm-swinv2"])
def test_droppath_in_a_model_scales_its_branches_sample_by_sample(name, one_seed, monkeypatch):
    draw_from(1, monkeypatch)
    family = FAMILY[name]
    model = build(family).train()
    attemper.apply(model, f"droppath({P})")
    keep = keep_mask(1, (2, 1, 1, 1), P).view(2)
    assert keep.any()
    assert not keep.all()
    same(call(model, family.inputs()), call(paths_by_hand(name, keep / (1 - P)), family.inputs()))


@pytest.mark.parametrize("name", ["timm-vit", "nn-encoder", "hf-bert"])
def test_ffdropout_in_a_model_drops_hidden_and_output_activations(name, one_seed):
    family = FAMILY[name]
    model, by_hand = build(family).train(), build(family).train()
    attemper.apply(model, f"ffdropout({P})")

    def dropped(x):
        batch, tokens, width = x.shape
        return x * keep_mask(SEED, (batch, 1, tokens, width), P).squeeze(1) / (1 - P)

    for where, module in by_hand.named_modules():
        if where.endswith((".fc2", ".linear2", ".output.dense")) and "attention" not in where:
            module.register_forward_pre_hook(lambda _, args: (dropped(args[0]),))
            module.register_forward_hook(lambda _, __, out: dropped(out))
    same(call(model, family.inputs()), call(by_hand, family.inputs()))


# --------------------------------------------------------------------------------------------------------- DropConnect
def dropped_weight(weight):
    keep = keep_mask(SEED, (1, 1, weight.shape[0], weight[0].numel()), P).view(weight.shape)
    return torch.where(keep, weight / (1 - P), torch.zeros_like(weight))


PROJECTIONS = {
    "timm-vit": (".qkv.weight", ".proj.weight"),
    "timm-beit": (".qkv.weight", ".proj.weight"),
    "nn-encoder": (".in_proj_weight", ".out_proj.weight"),
    "nn-mha": (".in_proj_weight", ".out_proj.weight"),
    "hf-vit": (".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".o_proj.weight"),
    "hand-written": (".to_qkv.weight", ".out.weight"),
}


@pytest.mark.parametrize("name", list(PROJECTIONS))
def test_dropconnect_reaches_all_four_projections(name, one_seed):
    family = FAMILY[name]
    model, by_hand = build(family).train(), build(family).train()
    found = 0
    for where, parameter in by_hand.named_parameters():
        if where.endswith(PROJECTIONS[name]) and "patch" not in where:
            parameter.data = dropped_weight(parameter.data)
            found += 1
    assert found == family.attentions * len(PROJECTIONS[name])
    before = {where: parameter.clone() for where, parameter in model.named_parameters()}
    attemper.apply(model, f"dropconnect({P})", targets=family.targets)
    same(call(model, family.inputs()), call(by_hand, family.inputs()))
    assert all(torch.equal(parameter, before[where]) for where, parameter in model.named_parameters())


def test_dropconnect_keeps_the_expectation_and_drops_at_its_rate():
    weight = DropConnect(0.3).map_weight(torch.ones(200, 100), stream())
    assert near((weight == 0).float().mean(), 0.3, 20000)
    assert weight.unique().tolist() == pytest.approx([0, 1 / 0.7])


def test_only_kept_weights_get_a_gradient(one_seed):
    model = build(FAMILY["nn-mha"]).train()
    attemper.apply(model, f"dropconnect({P})")
    call(model, FAMILY["nn-mha"].inputs()).square().sum().backward()
    weight = model.attention.in_proj_weight
    assert torch.equal(weight.grad == 0, dropped_weight(weight.detach()) == 0)


# -------------------------------------------------------------------------------------------------- schedules and modes
@pytest.mark.parametrize("method", ["drophead", "layerdrop", "droppath", "ffdropout", "dropconnect"])
def test_rates_follow_the_schedule_and_evaluation_is_untouched(method):
    family = FAMILY["timm-vit"]
    model = build(family)
    evaluated, trained = call(model.eval(), family.inputs()), call(model.train(), family.inputs())
    tempered = attemper.apply(model, f"{method}(0.6, schedule=decreasing)")
    rates = {row.block: row.rate for row in tempered.summary() if row.method == method}
    assert rates == pytest.approx({0: 0.6, 1: 0.4, 2: 0.2})
    torch.manual_seed(4)
    assert not torch.allclose(call(model, family.inputs()), trained, atol=1e-5)
    tempered.set_rate(0.0)
    same(call(model, family.inputs()), trained, 1e-6)
    assert torch.equal(call(model.eval(), family.inputs()), evaluated)
    with pytest.raises(ParameterError, match=r"p must be a number in \[0, 1\), got 1"):
        attemper.methods.DropHead(1)


# ----------------------------------------------------------------------------------------- a dropout of the model's own
def timm_vit(**options):
    import timm

    size = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **size, **options)


def nn_encoder(dropout):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True), 2)


def hf(name, config, **options):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return getattr(transformers, name)(getattr(transformers, config)(**sizes, **options))


def whisper():
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    options = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8}
    return WhisperEncoder(transformers.WhisperConfig(d_model=16, **options, dropout=0.3, activation_dropout=0.2))


def torchvision_vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, dropout=0.2, num_classes=5)


def torchvision_swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 24, [1, 2], [2, 4], [4, 4], stochastic_depth_prob=0.3, num_classes=5)


OWN = {
    "timm drop path": ("droppath", lambda: timm_vit(drop_path_rate=0.2), "blocks.1.drop_path1", "drop_prob"),
    "torchvision drop path": ("droppath", torchvision_swin, "features.3.0.stochastic_depth", "p"),
    "timm dropout": ("ffdropout", lambda: timm_vit(proj_drop_rate=0.2), "blocks.0.mlp.drop1", "p"),
    "nn dropout": ("ffdropout", lambda: nn_encoder(0.2), "layers.0.dropout", "p"),
    "bert dropout": (
        "ffdropout",
        lambda: hf("BertModel", "BertConfig", vocab_size=20),
        "encoder.layer.0.output.dropout",
        "p",
    ),
    "whisper dropout": ("ffdropout", whisper, "layers.0", "activation_dropout"),
    "torchvision dropout": ("ffdropout", torchvision_vit, "encoder.layers.encoder_layer_0.mlp.2", "p"),
}


def rates(model, method):
    """Every rate of the model's own that the method would meet."""
    names = ("drop_prob", "p") if method == "droppath" else ("p", "activation_dropout", "dropout")
    found = {}
    for where, module in model.named_modules():
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, float):
                found[where, name] = value
    return found


@pytest.mark.parametrize("kind", list(OWN))
def test_where_the_model_has_its_own_the_module_is_named_and_replace_sets_it_to_zero(kind):
    method, make, where, attribute = OWN[kind]
    model = make()
    before = rates(model, method)
    own = before[where, attribute]
    assert own > 0
    with pytest.raises(ConflictError, match=rf"'{where}' with {attribute}={own:.2}.*replace=true"):
        attemper.apply(model, f"{method}(0.1)")
    assert rates(model, method) == before
    assert not any("_attemper" in module.__dict__ for module in model.modules())
    tempered = attemper.apply(model, f"{method}(0.1, replace=true)")
    assert rates(model, method)[where, attribute] == 0.0
    with pytest.raises(ConflictError, match="own"):
        attemper.apply(make(), f"{method}(0.1)")
    tempered.remove()
    assert rates(model, method) == before


def test_replaced_dropout_in_a_whisper_layer_is_all_of_it():
    model = whisper()
    tempered = attemper.apply(model, "ffdropout(0.1, replace=true)")
    assert {(layer.activation_dropout, layer.dropout) for layer in model.layers} == {(0.0, 0.0)}
    tempered.remove()
    assert {(layer.activation_dropout, layer.dropout) for layer in model.layers} == {(0.2, 0.3)}


def test_dropout_elsewhere_is_no_reason_to_refuse():
    model = hf("BertModel", "BertConfig", vocab_size=20, hidden_dropout_prob=0.0)  # its attention dropout stays
    attemper.apply(model, "ffdropout(0.1) + droppath(0.1)")
    assert model.encoder.layer[0].attention.self.dropout.p == 0.1
