"""Methods of another package can do all that ours can: they declare what they need, and the core asks for no class."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import attemper
from attemper.errors import AttemperError, ConflictError, NoSiteError, UnmetError
from attemper.methods.registry import methods_by_name
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}

SOURCE = '''
import dataclasses
from typing import ClassVar

import torch

from attemper.methods.base import Method, Paper
from attemper.methods.rates import Scheduled
from attemper.methods.kinds import BlockMap, BranchMap, Penalty, TokenMap, WeightMap
from attemper.ops.perturbation import Perturbation

PAPER = Paper("Methods of another package", "2026")


@dataclasses.dataclass(frozen=True)
class Centre(Method, TokenMap):
    """Subtract a learnt share of the mean of all real tokens."""

    name: ClassVar[str] = "centre"
    summary: ClassVar[str] = "subtract the mean token"
    paper: ClassVar[Paper] = PAPER
    where: str = "mlp_end"

    @property
    def positions(self):
        return (self.where,)

    @property
    def always(self):
        return True

    def parameter(self, channels):
        return torch.full((channels,), 0.5)

    def map_tokens(self, x, tokens, stream):
        real = torch.ones(x.shape[:2], dtype=torch.bool) if tokens.real is None else tokens.real
        weight = real[..., None].to(x.dtype)
        mean = (x * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        share = 0.5 if tokens.parameter is None else tokens.parameter
        return x - share * mean


@dataclasses.dataclass(frozen=True)
class Jitter(Scheduled, TokenMap):
    """Noise on every token by itself."""

    name: ClassVar[str] = "jitter"
    summary: ClassVar[str] = "noise on tokens"
    paper: ClassVar[Paper] = PAPER
    stochastic: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = False
    replaces_own: ClassVar[str] = "mlp_dropout"

    @property
    def positions(self):
        return ("mlp_end",)

    def map_tokens(self, x, tokens, stream):
        batch, count, channels = x.shape
        return x * (1 + self.p * stream.keep((batch, 1, count, channels), 0.5).squeeze(1))


@dataclasses.dataclass(frozen=True)
class Norms(Method, Penalty):
    """The squared norm of attention's output, and of what goes into the first layer of an MLP."""

    name: ClassVar[str] = "norms"
    summary: ClassVar[str] = "penalise norms"
    paper: ClassVar[Paper] = PAPER
    named_only: ClassVar[bool] = True
    out: float = 1.0
    unit: bool = False

    @property
    def needs_unit_rows(self):
        return "unit=true" if self.unit else None

    def wants_attention(self, place):
        return True

    def wants_mlp(self, place):
        return True

    def attention_terms(self, record, place):
        return {"out": self.out * record.out.square().mean()}

    def mlp_terms(self, which, record, place):
        return {which: self.out * record.x.square().mean()} if which == "ff1" else {}


@dataclasses.dataclass(frozen=True)
class Shrink(Scheduled, WeightMap):
    """Projections shrunk by a random factor."""

    name: ClassVar[str] = "shrink"
    summary: ClassVar[str] = "shrink weights"
    paper: ClassVar[Paper] = PAPER
    stochastic: ClassVar[bool] = True

    def map_weight(self, weight, stream):
        return weight * (1 - self.p)


@dataclasses.dataclass(frozen=True)
class Halfway(Scheduled, BlockMap):
    """Part of the way through a block, for each sample."""

    name: ClassVar[str] = "halfway"
    summary: ClassVar[str] = "interpolate blocks"
    paper: ClassVar[Paper] = PAPER
    stochastic: ClassVar[bool] = True

    def map_block(self, before, after, stream):
        return after + self.p * (before - after)


@dataclasses.dataclass(frozen=True)
class Stir(Scheduled, BlockMap):
    """A block map that mixes tokens."""

    name: ClassVar[str] = "stir"
    summary: ClassVar[str] = "mix tokens behind blocks"
    paper: ClassVar[Paper] = PAPER
    stochastic: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True

    def map_block(self, before, after, stream):
        return after + self.p * after.mean(1, keepdim=True)


@dataclasses.dataclass(frozen=True)
class Loud(Scheduled, Perturbation):
    """Weights that do not sum to one, and that shun `centre`."""

    name: ClassVar[str] = "loud"
    summary: ClassVar[str] = "louder weights"
    paper: ClassVar[Paper] = PAPER
    stages: ClassVar[tuple] = ("weights",)

    @property
    def uneven_rows(self):
        return "loud makes them larger"

    def conflict(self, other):
        return "loud and centre cancel each other" if other.name == "centre" else None

    def perturb_weights(self, weights, allowed, stream):
        return weights * (1 + self.p)
'''
NAMES = ("Centre", "Jitter", "Norms", "Shrink", "Halfway", "Stir", "Loud")


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """An installed distribution that adds its methods under the entry point."""
    (tmp_path / "outside_methods.py").write_text(textwrap.dedent(SOURCE))
    info = tmp_path / "outside_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-methods\nVersion: 1.0\n")
    entries = "".join(f"{name.lower()} = outside_methods:{name}\n" for name in NAMES)
    (info / "entry_points.txt").write_text(f"[attemper.methods]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))
    methods_by_name.cache_clear()
    yield
    sys.modules.pop("outside_methods", None)
    monkeypatch.undo()
    methods_by_name.cache_clear()


def small_bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config).eval()


def small_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )  # fmt: skip
    return LlamaModel(config).eval()


def words(*rows):
    return torch.tensor(rows)


# --------------------------------------------------------------------------------------------------- what they do
def test_recipes_know_them_and_write_them():
    recipe = "centre(entry) + jitter(0.2) + norms(out=2.0) + shrink(0.1) + halfway(0.3, schedule=decreasing)"
    assert attemper.render(attemper.parse(recipe)) == recipe
    assert {"centre", "stir"} <= {method.name for method in attemper.list_methods()}


def test_all_kinds_act_in_one_model_with_parameters_rates_and_a_ledger():
    family = FAMILY["timm-vit"]
    model = build(family).train()
    plain = {name for name, _ in model.named_parameters()}
    recipe = "centre + norms(out=2.0) + shrink(0.1) + halfway(0.3, schedule=decreasing) + dropkey(0.1)"
    tempered = attemper.apply(model, recipe)
    blocks = 3
    added = {name for name, _ in model.named_parameters()} - plain
    assert len(added) == blocks
    assert all(name.startswith("attemper.CENTRE_") for name in added)
    assert [row.rate for row in tempered.summary() if row.method == "halfway"] == pytest.approx([0.3, 0.2, 0.1])
    out = call(model, family.inputs())
    rows = tempered.penalties()
    assert [(row.method, row.component) for row in rows].count(("norms", "out")) == blocks
    assert [(row.method, row.component) for row in rows].count(("norms", "ff1")) == blocks
    (out.square().mean() + tempered.penalty()).backward()
    assert all(p.grad is not None and p.grad.any() for name, p in model.named_parameters() if name in added)
    tempered.set_rate(0.5, "halfway")
    assert [row.rate for row in tempered.summary() if row.method == "halfway"] == pytest.approx([0.5, 1 / 3, 1 / 6])
    tempered.remove()
    assert {name for name, _ in model.named_parameters()} == plain


def test_weight_and_block_maps_compute_what_they_say():
    family = FAMILY["timm-vit"]
    model, plain = build(family).train(), build(family).train()
    attemper.apply(model, "shrink(0.25)")
    for block in plain.blocks:
        for layer in (block.attn.qkv, block.attn.proj):
            layer.weight.data.mul_(0.75)
    torch.testing.assert_close(call(model, family.inputs()), call(plain, family.inputs()))
    other, plain = build(family).train(), build(family).train()
    attemper.apply(other, "halfway(0.5)")
    for block in plain.blocks:
        block.register_forward_hook(lambda _, args, out: out + 0.5 * (args[0] - out))
    torch.testing.assert_close(call(other, family.inputs()), call(plain, family.inputs()))


# ------------------------------------------------------------------------------------------- padding and the future
@pytest.mark.parametrize("where", ["mlp_front", "mlp_mid", "mlp_end", "attention_end", "entry"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_map_that_mixes_tokens_gets_the_padding_at_every_position(where, side):
    model = small_bert()
    attemper.apply(model, f"centre({where})")
    pad = (lambda a, b: [*b, *a]) if side == "left" else (lambda a, b: [*a, *b])
    mask = words(pad([1, 1, 1], [0, 0]), [1] * 5)
    one = model(words(pad([3, 4, 5], [0, 0]), [6, 7, 8, 9, 10]), attention_mask=mask).last_hidden_state
    two = model(words(pad([3, 4, 5], [41, 17]), [6, 7, 8, 9, 10]), attention_mask=mask).last_hidden_state
    torch.testing.assert_close(one[mask.bool()], two[mask.bool()], atol=1e-6, rtol=0)
    unmasked = model(words([6, 7, 8, 9, 10])).last_hidden_state
    torch.testing.assert_close(one[1:], unmasked, atol=1e-5, rtol=0)


@pytest.mark.parametrize("recipe", ["centre", "centre(entry)", "stir(0.1)", "graying(dct, where=tokens)"])
def test_what_mixes_tokens_is_refused_by_causal_models(recipe, monkeypatch):
    model = small_llama().train()
    with pytest.raises(ConflictError, match=r"is causal.*would show every token its future.*cannot act"):
        attemper.apply(model, recipe)
    monkeypatch.setattr("attemper.tempering.trial.MOST_WEIGHTS", 0)  # larger models are refused when they run
    attemper.apply(model, recipe)
    with pytest.raises(ConflictError, match=r"is causal.*would show every token its future.*cannot act"):
        model(words([3, 4, 5, 6]))


def test_what_treats_each_token_by_itself_is_not():
    model = small_llama().train()
    attemper.apply(model, "jitter(0.1)")
    outputs = []
    for last in (6, 17):
        torch.manual_seed(0)
        outputs.append(model(words([3, 4, 5, last])).last_hidden_state)
    torch.testing.assert_close(outputs[0][:, :3], outputs[1][:, :3])
    assert not torch.equal(outputs[0][:, 3], outputs[1][:, 3])


# ------------------------------------------------------------------------------------------- what does not go together
@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("norms(unit=true) + loud(0.1)", r"norms\(unit=true\) needs rows of attention that sum to 1, and loud makes"),
        ("centre + loud(0.1)", "loud and centre cancel each other"),
        ("norms(unit=true) + drophead(0.1)", "sum to 1, and drophead scales them"),
        ("explicit(av=1) + loud(0.1)", "sum to 1, and loud makes them larger"),
    ],
)
def test_conflicts_are_found_between_theirs_and_ours(recipe, reason):
    for order in (recipe, " + ".join(reversed(recipe.split(" + ")))):
        with pytest.raises(ConflictError, match=reason):
            attemper.apply(build(FAMILY["timm-vit"]), order)


def test_unit_rows_are_asked_of_the_models_own_dropout_too():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train()
    attemper.apply(model, "norms(unit=true)")
    with pytest.raises(ConflictError, match=r"norms\(unit=true\) needs rows.*dropout of its own \(0.2\)"):
        model(torch.randn(2, 5, 16))


def test_the_models_own_dropout_is_refused_for_a_method_that_stands_for_it():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    with pytest.raises(ConflictError, match=r"'jitter\(0.1\)': the model has its own"):
        attemper.apply(model, "jitter(0.1)")


# ------------------------------------------------------------------------------------------------------- the met-check
class Silent(nn.Module):
    """Looks like attention by its name and target, and computes none."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


@pytest.mark.parametrize("recipe", ["loud(0.1)", "norms(out=1.0)", "shrink(0.1)"])
def test_attention_that_is_not_met_is_an_error_for_them_too(recipe):
    model = nn.Sequential(Silent()).train()
    attemper.apply(model, recipe, targets=["0"])
    with pytest.raises(UnmetError, match="computed no attention"):
        model(torch.randn(2, 3, 8))


def test_a_model_without_their_site_is_refused():
    with pytest.raises(NoSiteError, match="centre"):
        attemper.apply(nn.Sequential(nn.Linear(4, 4)), "centre")


def test_a_name_that_exists_is_refused(tmp_path, monkeypatch):
    info = tmp_path / "again-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: again\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attemper.methods]\nagain = outside_methods:Centre\n")
    methods_by_name.cache_clear()
    with pytest.raises(AttemperError, match=r"of attemper\.methods names 'centre', which exists"):
        attemper.list_methods()
