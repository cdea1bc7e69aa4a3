"""Probes on attention: every head of every family has its row, and nothing about the model changes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import NoSiteError, ParameterError, UnmetError, WrappedModelError
from attemper.probes import PROBES, diagnose
from attemper.probes.attention import head_statistics, see
from attemper.probes.diagnosis import find_attention
from attemper.probes.table import HeadRow
from attemper.probes.tokens import BlockWatch, block_watches
from attemper.probes.watching import AttentionWatch, looking
from attemper.sites import Geometry
from families import RECOGNISED, VIT, Family, build, call, family, timm_model

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = [each.name for each in RECOGNISED]


def batch_of(kind: Family):
    inputs = kind.inputs()
    if "args" not in inputs:
        return inputs
    if len(inputs) == 1:
        return inputs["args"]
    return dict(zip(("tgt", "memory"), inputs["args"], strict=True)) | {k: v for k, v in inputs.items() if k != "args"}


def doubled(batch):
    if isinstance(batch, dict):
        return {name: doubled(part) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(doubled, batch))
    return batch.double() if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch


# ------------------------------------------------------------------------------------------------------- the families
@pytest.mark.parametrize("kind", RECOGNISED, ids=IDS)
def test_every_head_of_every_family_has_its_row_and_the_pass_leaves_no_trace(kind):
    model, batch = build(kind).train(), batch_of(kind)
    modes = [module.training for module in model.modules()]
    classes, attributes = [type(m) for m in model.modules()], [set(m.__dict__) for m in model.modules()]
    before = []
    for mode in (True, False):
        torch.manual_seed(7)
        before.append(call(model.train(mode), kind.inputs()))
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    table = diagnose(model, batch, targets=kind.targets)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for mode in (False, True):  # the last one moves the statistics of batch norms
        torch.manual_seed(7)
        assert torch.equal(call(model.train(mode), kind.inputs()), before[0 if mode else 1])
    assert len({row.site for row in table.heads}) == kind.attentions
    assert table.notes == ()
    for row in table.heads:
        assert row.entropy is not None
        assert 0 < row.normalised <= 1 + 1e-6
        assert row.logit_max > 0
        assert row.q_norm > 0
        assert set(row.flags) <= {"uniform", "duplicate", "sink, broadcast"}  # random weights of small models
    if kind.grids != (None,):
        assert any(row.distance is not None and row.distance > 0 for row in table.heads)
    assert {row.block for row in table.tokens} == {row.block for row in table.heads}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("kind", RECOGNISED, ids=IDS)
def test_outputs_are_the_same_bits_while_being_looked_at(kind, training):
    model = build(kind).train(training)
    sites = find_attention(model, kind.targets)
    seen = []
    watches = [
        (site.module, AttentionWatch(site, lambda s, c: seen.append(head_statistics(c, frozenset(PROBES), s.geometry))))
        for site in sites.attentions
    ]
    watches += block_watches(model, sites, BlockWatch, lambda block, place, tokens: seen.append(tokens))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # nothing inside of it can be seen, so it is off while looking
    try:
        torch.manual_seed(3)
        plain = call(model, kind.inputs())
        expected = torch.rand(4)
        torch.manual_seed(3)
        with looking(watches):
            watched = call(model, kind.inputs())
        drawn = torch.rand(4)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    assert torch.equal(watched, plain)
    assert torch.equal(drawn, expected), "the generator stands where it would stand"
    assert len(seen) > len(sites.attentions)
    if training:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found, wanted = (
            torch.autograd.grad(out.float().square().mean(), parameters, allow_unused=True, materialize_grads=True)
            for out in (watched, plain)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


RECIPES = [
    "dropkey(0.3)",
    "cb",
    "hardmask(0.3)",
    "skipless",
    "dropkey(0.2) + explicit(v=1e-3) + cb",
    "blur",
    "drophead(0.3)",
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["timm-vit", "hf-bert", "torchvision-vit", "nn-mha"])
def test_a_tempered_model_is_seen_like_the_plain_one_and_keeps_its_random_stream(name, recipe):
    kind = family(name)
    plain, batch = build(kind), batch_of(kind)
    if name == "nn-mha" and recipe != "dropkey(0.3)":
        pytest.skip("this family has nothing but attention")
    if name == "torchvision-vit" and "explicit" in recipe:
        recipe = "dropkey(0.2) + cb"
    model = copy.deepcopy(plain)
    tempered = attemper.apply(model, recipe)
    torch.manual_seed(5)
    first = call(model.train(), kind.inputs())
    table = diagnose(model, batch)
    torch.manual_seed(5)
    assert torch.equal(call(model.train(), kind.inputs()), first), "the same draws as before"
    if not any(word in recipe for word in ("cb", "skipless")):  # those change what later blocks get, in eval mode too
        assert table.heads == diagnose(plain, batch).heads
    else:
        first_block = [row for row in table.heads if row.block == 0]
        assert first_block == [row for row in diagnose(plain, batch).heads if row.block == 0]
    tempered.remove()
    assert torch.equal(call(model.eval(), kind.inputs()), call(plain.eval(), kind.inputs()))


@pytest.mark.parametrize("name", ["hf-vit", "hf-bert", "hf-beit", "hf-pvt"])
def test_entropies_of_a_family_are_those_of_the_maps_that_it_returns(name):
    kind = family(name)
    model, batch = build(kind).double().eval(), doubled(batch_of(kind))
    rows = diagnose(model, batch, ["entropy"]).heads
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager") if name != "hf-pvt" else None
    with torch.no_grad():
        maps = eager(**batch, output_attentions=True).attentions
    expected = torch.cat([torch.special.entr(m).sum(-1).mean((0, 2)) for m in maps])
    found = torch.tensor([row.entropy for row in rows], dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-6, "the library rounds its maps to float32"


def test_entropies_behind_the_second_door_are_those_of_the_weights_that_it_returns():
    model = build(family("torchvision-vit")).double().eval()
    maps = []
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            plain = module.forward

            def forward(q, k, v, plain=plain, **_):
                out, weights = plain(q, k, v, need_weights=True, average_attn_weights=False)
                maps.append(weights)
                return out, None

            module.forward = forward
    (x,) = doubled(batch_of(family("torchvision-vit")))
    with torch.no_grad():
        model(x)
    for module in model.modules():
        module.__dict__.pop("forward", None)
    expected = torch.cat([torch.special.entr(m).sum(-1).mean((0, 2)) for m in maps])
    found = torch.tensor([row.entropy for row in diagnose(model, x, "entropy").heads], dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["timm-vit", "timm-swin"])
def test_fused_and_unfused_attention_tell_the_same(name):
    """Of Swin's windows too, with position bias and shifted masks."""
    kind = family(name)
    fused, batch = build(kind).double(), doubled(batch_of(kind))
    unfused = copy.deepcopy(fused)
    for model, value in ((fused, True), (unfused, False)):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = value
    probes = ("entropy", "distance", "logits")
    for a, b in zip(diagnose(fused, batch, probes).heads, diagnose(unfused, batch, probes).heads, strict=True):
        for column in ("entropy", "normalised", "to_uniform", "distance", "logit_max", "k_norm"):
            assert abs(getattr(a, column) - getattr(b, column)) < 1e-10, column


def test_autocast_does_not_make_the_figures_coarser():
    q, k, bias = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8), torch.randn(9, 9)
    for call_ in (see(q, k), see(q, k, bias)):
        exact = head_statistics(call_, frozenset(PROBES), Geometry((3, 3)))
        with torch.autocast("cpu", torch.bfloat16):
            given = head_statistics(call_, frozenset(PROBES), Geometry((3, 3)))
        assert torch.equal(given.entropy, exact.entropy)
        assert torch.equal(given.logit_max, exact.logit_max)
        assert torch.equal(given.distance, exact.distance)


def test_a_module_that_is_called_twice_has_one_row_per_head():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return x + self.attention(x, x, x, need_weights=False)[0]

    assert len(diagnose(Twice(), torch.randn(2, 5, 16)).heads) == 2


# -------------------------------------------------------------------------------------------------- flags and mistakes
def test_collapse_and_blow_up_are_flagged_with_block_and_head():
    model = build(family("timm-vit"))
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[16:32] *= 4e4  # the queries of head 1
    table = diagnose(model, batch_of(family("timm-vit")))
    flagged = {(row.block, row.head): row.flags for row in table.heads if set(row.flags) - {"uniform", "duplicate"}}
    assert flagged == {(1, 1): ("entropy collapse", "logit blow-up")}
    assert "block 1, head 1 (blocks.1.attn): entropy collapse" in table.flags
    assert " heads (block 1: 1): |logits| are above 100:" in str(table)
    assert table.to_dict()["heads"][4]["flags"] == ["entropy collapse", "logit blow-up"]
    assert HeadRow(0, "a", 0, entropy=math.nan).flags == ("not finite",)


def test_a_collapsed_head_is_flagged_behind_the_softmax_door_too():
    model = build(family("timm-swin"))
    with torch.no_grad():
        model.layers[0].blocks[0].attn.qkv.weight[:12] *= 4e4
    table = diagnose(model, batch_of(family("timm-swin")), ("entropy", "logits"))
    assert [(row.block, row.head) for row in table.heads if "entropy collapse" in row.flags] == [(0, 0)]


def test_what_cannot_be_probed_is_refused_with_a_reason():
    with pytest.raises(
        NoSiteError, match="Sequential has no attention that is recognised, so there is nothing to probe"
    ):
        diagnose(nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3))
    model = timm_model("vit_tiny_patch16_224", **VIT)()
    with pytest.raises(ParameterError, match=r"could not take the batch \(float32 \(2, 3, 31, 31\)\): Input height"):
        diagnose(model, torch.randn(2, 3, 31, 31))
    with pytest.raises(ParameterError, match="a batch must be a tensor, a tuple of arguments or a dict"):
        diagnose(model, "images")
    with pytest.raises(ParameterError, match="there is no probe 'entropi'"):
        diagnose(model, torch.randn(2, 3, 32, 32), ["entropi"])
    with pytest.raises(ParameterError, match="probes is empty"):
        diagnose(model, torch.randn(2, 3, 32, 32), [])
    with pytest.raises(WrappedModelError, match="compiled"):
        diagnose(torch.compile(model), torch.randn(2, 3, 32, 32))
    with pytest.raises(WrappedModelError, match=r"needs? a torch.nn.Module, got dict"):
        diagnose({}, torch.randn(2, 3))
    assert not any("_attemper" in module.__dict__ for module in model.modules()), "a mistake leaves no trace either"


def test_attention_that_is_computed_in_an_unknown_way_is_an_error_not_an_empty_table():
    class Odd(nn.Module):
        def forward(self, x):
            weights = (x @ x.transpose(-2, -1)).exp()
            return weights / weights.sum(-1, keepdim=True) @ x

    with pytest.raises(UnmetError, match="computed no attention by scaled_dot_product_attention"):
        diagnose(nn.Sequential(Odd()), torch.randn(2, 5, 8), targets="0")
