"""A recipe acts as it says, or the first training pass ends with an error that names what it did not reach."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError, UnmetError
from plain_blocks import HEADS, WIDTH, Attention, Block, Mlp, model_of, tokens


# -------------------------------------------------------------------------------------------- layers that do not run
class PastItsForward(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.fc1.weight)), self.fc2.weight)


class WithFunctionalMlp(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = PastItsForward()


@pytest.mark.parametrize("recipe", ["cb", "ffdropout(0.5)", "explicit(ff=1)"])
def test_layers_whose_forward_does_not_run_are_named(recipe: str) -> None:
    model = model_of(WithFunctionalMlp)
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match=r"did not run: .*'0\.mlp\.fc2' \(Linear\).*partial=True"):
        model(tokens())
    with pytest.raises(UnmetError):
        model(tokens())


def test_what_acts_nowhere_is_an_error_even_in_part() -> None:
    model = model_of(WithFunctionalMlp)
    attemper.apply(model, "ffdropout(0.5)", partial=True)
    with pytest.raises(UnmetError, match="ffdropout had no effect"):
        model(tokens())
    mixed = nn.Sequential(Block(), WithFunctionalMlp()).train()
    attemper.apply(mixed, "ffdropout(0.5)", partial=True)
    mixed(tokens())


class Experts(nn.Module):
    """A mixture that runs one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[1](x)


class WithExperts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()


@pytest.mark.parametrize("recipe", ["ffdropout(0.5)", "explicit(ff=1)", "droppath(0.5)", "layerdrop(0.5)"])
def test_experts_that_a_pass_leaves_out_are_no_error(recipe: str) -> None:
    model = model_of(WithExperts)
    assert {row.block for row in attemper.apply(model, recipe).summary()} == {0, 1}, "experts are no blocks"
    model(tokens())


class DropsLayers(nn.Module):
    """A model that skips layers of its own."""

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self.layerdrop, self.skipped = 0.5, skipped
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        self.skipped -= 1
        return x if self.skipped >= 0 else self.layers[0](x)


def test_a_model_that_drops_layers_of_its_own_has_more_than_one_pass() -> None:
    model = DropsLayers(3).train()
    attemper.apply(model, "dropkey(0.5)")
    for _ in range(5):
        model(tokens())
    never = DropsLayers(1000).train()
    attemper.apply(never, "dropkey(0.5)")
    for _ in range(9):
        never(tokens())
    with pytest.raises(UnmetError, match="did not run"):
        never(tokens())


def test_later_passes_are_not_watched_and_evaluation_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(Block)
    tempered = attemper.apply(model, "dropkey(0.5)")
    watched = []
    started = attemper.tempering.coverage.CallWatch
    monkeypatch.setattr("attemper.tempering.coverage.CallWatch", lambda *args: watched.append(1) or started(*args))
    model.eval()(tokens())
    assert not watched
    for _ in range(3):
        model.train()(tokens())
    assert len(watched) == 1
    copy.deepcopy(model)(tokens())
    assert len(watched) == 1, "a copy of what was checked is the same model"
    tempered.set_rate(0.2)
    model(tokens())
    assert len(watched) == 2, "what was idle before may act now"


def test_a_pass_without_gradients_tells_nothing_of_penalties() -> None:
    model = model_of(WithFunctionalMlp)
    attemper.apply(model, "explicit(ff=1)")
    with torch.no_grad():
        model(tokens())
    with pytest.raises(UnmetError, match="explicit would act"):
        model(tokens())


# ----------------------------------------------------------------------------------------------- weights of projections
class Product(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 1.0, self.bias)


@pytest.mark.parametrize(("layer", "missing"), [("qkv", "q, k, v"), ("proj", "out")])
def test_a_weight_that_is_used_in_another_way_is_an_error(layer: str, missing: str) -> None:
    model = model_of(Block)
    before = getattr(model[1].attn, layer)
    setattr(model[1].attn, layer, Product(before.in_features, before.out_features))
    attemper.apply(model, "dropconnect(0.9)")
    with pytest.raises(UnmetError, match=rf"'1\.attn' \(Attention\) computed its {missing} projection.*dropconnect"):
        model(tokens())


def test_an_output_projection_that_is_not_known_is_refused() -> None:
    class Named(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.last = self.proj
            del self.proj

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return self.last(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    with pytest.raises(NoSiteError, match="dropconnect needs the output projection of '0'"):
        attemper.apply(nn.Sequential(Named()), "dropconnect(0.5)")


def test_bert_loses_weights_of_its_output_projection_too() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes))
    rows = attemper.apply(model.train(), "dropconnect(0.9)").summary()
    assert "encoder.layer.0.attention.output.dense" in [row.site for row in rows]
    torch.manual_seed(1)
    model(torch.arange(6)[None]).last_hidden_state.square().sum().backward()
    for name, parameter in model.encoder.layer[0].attention.named_parameters():
        if name.endswith("weight") and parameter.dim() == 2:
            assert (parameter.grad == 0).float().mean() > 0.5, name


def test_values_in_another_order_are_not_penalised_as_if_they_were_in_this_one() -> None:
    class Interleaved(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model = nn.Sequential(Interleaved()).train()
    attemper.apply(model, "explicit(v=1)")
    with pytest.raises(UnmetError, match="another order"):
        model(tokens())


# --------------------------------------------------------------------------------------- attention outside of the sites
class Hidden(nn.Module):
    """Attention that nobody can tell from outside: its class is called something else, and so are its layers."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes = axes
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.a(x), self.b(x)
        if self.axes == 4:
            q, k = q[:, None], k[:, None]
        weights = F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.1).to(x.dtype)
        return torch.matmul(weights, k).view(x.shape)


class Router(nn.Module):
    """A softmax that is no attention: nothing is multiplied with its weights as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x).softmax(-1)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("recipe", ["dropkey(0.5)", "dropconnect(0.5)", "explicit(v=1)", "cb(branch=attention)"])
def test_attention_outside_of_every_site_is_named(recipe: str, axes: int) -> None:
    model = nn.Sequential(Block(), Hidden(axes)).train()
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match=r"1 attention call ran outside .*'1' \(Hidden\).*targets=.*partial=True"):
        model(tokens())


@pytest.mark.parametrize("options", [{"partial": True}, {"targets": "0"}])
def test_attention_outside_may_be_meant(options: dict[str, object]) -> None:
    model = nn.Sequential(Block(), Hidden(3)).train()
    attemper.apply(model, "dropkey(0.5)", **options)
    model(tokens())


@pytest.mark.parametrize("recipe", ["ffdropout(0.5)", "cb"])
def test_methods_on_other_things_do_not_mind_attention_outside(recipe: str) -> None:
    model = nn.Sequential(Block(), Hidden(3)).train()
    attemper.apply(model, recipe)
    model(tokens())


def test_a_softmax_that_is_no_attention_is_no_error() -> None:
    model = nn.Sequential(Block(), Router()).train()
    attemper.apply(model, "dropkey(0.5)")
    model(tokens())


def test_the_inputs_of_methods_that_mix_tokens_need_more_than_one() -> None:
    model = model_of(Block)
    attemper.apply(model, "cb")
    with pytest.raises(UnmetError, match=r"cb had no effect.*only one"):
        model(tokens()[:, :1])


def test_drophead_needs_more_than_one_head() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 1, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).train()
    attemper.apply(model, "drophead(0.5)")
    with pytest.raises(UnmetError, match=r"drophead had no effect.*single head"):
        model(tokens())


def test_a_softmax_module_made_on_the_spot_is_attention() -> None:
    class TextSelfAttention(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            weights = nn.Softmax(dim=-1)(q @ k.transpose(-2, -1))
            return self.proj((weights @ v).transpose(1, 2).flatten(2))

    model = nn.Sequential(TextSelfAttention()).train()
    assert [row.site for row in attemper.apply(model, "dropkey(0.5)").summary()] == ["0"]
    assert not torch.equal(model(tokens()), model(tokens()))


def test_a_mask_that_the_block_means_in_another_way_is_an_error_and_not_silence() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # 0: may attend, as in Longformer
            return super().forward(x + 0 * attention_mask[..., None])

    class WithMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Masked(), Masked()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, attention_mask=torch.zeros(x.shape[:2], dtype=torch.int64))
            return x

    model = WithMask().train()
    attemper.apply(model, "graying(where=tokens, eps=0.5)")
    with pytest.raises(attemper.errors.AttemperError, match="padding"):
        model(tokens())
