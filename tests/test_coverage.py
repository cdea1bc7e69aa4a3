"""A recipe acts as it says, or the first training pass ends with an error that names what it did not reach."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError, UnmetError
from attemper.methods.kinds import Tokens
from attemper.ops.stream import Stream

WIDTH, HEADS, TOKENS = 16, 2, 5


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """x + attention, x + MLP; subclasses write it in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def model_of(kind: type[nn.Module], depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(depth))).train()


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
        return x @ self.weight.T + self.bias


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


# ------------------------------------------------------------------------------------------------------------- blocks
class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Outside(nn.Module):
    """vit-pytorch's way: a layer is a list of two parts, and both sums are in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = attention(x) + x
            x = mlp(x) + x
        return x


def test_a_layer_that_is_a_list_is_one_block_of_a_schedule() -> None:
    tempered = attemper.apply(Outside(), "dropkey(0.4, schedule=decreasing) + ffdropout(0.4, schedule=decreasing)")
    assert {(row.block, row.rate) for row in tempered.summary()} == {(0, 0.4), (1, 0.2)}
    assert {row.site for row in tempered.summary() if row.block == 0} == {"layers.0.0", "layers.0.1.net.3"}


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless", "graying(where=tokens, eps=0.5)"])
def test_a_list_cannot_be_skipped(recipe: str) -> None:
    with pytest.raises(NoSiteError, match=r"cannot act on block 'layers\.0', a ModuleList"):
        attemper.apply(Outside(), recipe)


class Parts(nn.Module):
    """Attention and MLPs listed apart: each is a block of its own, and neither adds anything."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = attention(x) + x
            x = mlp(x) + x
        return x


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless"])
def test_a_sum_outside_of_the_block_is_not_taken_for_granted(recipe: str) -> None:
    model = Parts().train()
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match=r"'attentions\.0'"):
        model(tokens())


class FeedForwardOutside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForwardOutside() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + layer.mlp(x)
        return x


def test_half_a_block_is_not_dropped_for_a_whole_one() -> None:
    model = Loop().train()
    attemper.apply(model, "layerdrop(0.5)")
    with pytest.raises(UnmetError, match="does not add its feed-forward network"):
        model(tokens())


class Widening(Block):
    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(super().forward(x))


def test_a_block_that_changes_the_shape_is_named_or_left_in_part() -> None:
    model = nn.Sequential(Block(), Widening()).train()
    attemper.apply(model, "layerdrop(0.5)")
    with pytest.raises(UnmetError, match=r"layerdrop cannot skip '1': this Widening gives another shape"):
        model(tokens())
    attemper.Tempered.of(model).remove()
    attemper.apply(model, "layerdrop(0.5)", partial=True)
    assert model(tokens()).shape == (2, TOKENS, 2 * WIDTH)
    alone = nn.Sequential(Widening()).train()
    attemper.apply(alone, "layerdrop(0.5)", partial=True)
    with pytest.raises(UnmetError, match="layerdrop had no effect"):
        alone(tokens())


# ------------------------------------------------------------------------------------------- blocks in other ways
class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        return x + self.attn(h) + self.mlp(h)


class Combined(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        attention, mlp = self.attn(h), self.mlp(h)
        return attention + mlp + x


class Together(Block):
    """Both branches are computed before either is added."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        attention, mlp = self.attn(h), self.mlp(h)
        x = mlp + x
        return x + attention


class MlpFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm2(x))
        return x + self.attn(self.norm1(x))


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.position = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(1, TOKENS, WIDTH))
        self.cpe = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        x = x + self.cpe(x)
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.gamma * self.mlp(self.norm2(x))


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(self.mlp(x) + x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.add_(self.attn(self.norm1(x)))
        x += self.mlp(self.norm2(x))
        return x


class Overwriting(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.attn(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x


def by_hand(block: Block, x: Tensor) -> Tensor:
    """The block without the skip round attention."""
    if isinstance(block, Parallel):
        h = block.norm1(x)
        return block.attn(h) + block.mlp(h)
    if isinstance(block, Together):
        return block.attn(block.norm1(x))
    if isinstance(block, MlpFirst):
        return block.attn(block.norm1(x + block.mlp(block.norm2(x))))
    if isinstance(block, Scaled):
        x = x + block.position
        x = x + block.cpe(x)
        x = block.gamma * block.attn(block.norm1(x))
        return x + block.gamma * block.mlp(block.norm2(x))
    if isinstance(block, PostNorm):
        x = block.norm1(block.attn(x))
        return block.norm2(x + block.mlp(x))
    x = block.attn(block.norm1(x))
    return x + block.mlp(block.norm2(x))


WAYS = [Block, Parallel, Together, MlpFirst, Scaled, PostNorm, InPlace, Overwriting]


@pytest.mark.parametrize("way", WAYS)
def test_the_skip_round_attention_is_found_by_what_it_goes_round(way: type[Block]) -> None:
    model = model_of(way)
    expected = tokens()
    for block in model:
        expected = by_hand(block, expected)
    attemper.apply(model, "skipless")
    torch.testing.assert_close(model(tokens()), expected)
    torch.testing.assert_close(model.eval()(tokens()), expected)


@pytest.mark.parametrize("way", [*WAYS, Combined])
def test_a_dropped_block_gives_what_it_got(way: type[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of(way), tokens()
    attemper.apply(model, "layerdrop(0.5)")
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
    for _ in range(2):  # the second time, nothing is watched
        assert torch.equal(model(x.clone()), x)


@pytest.mark.parametrize("recipe", ["skipless", "skipless(mlp)", "droppath(0.5)"])
def test_one_sum_of_both_branches_is_refused(recipe: str) -> None:
    model = model_of(Combined)
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match="adds attention and the MLP in one sum"):
        model(tokens())


@pytest.mark.parametrize("recipe", ["{} + layerdrop(0.5)", "layerdrop(0.5) + {}"])
def test_a_dropped_block_keeps_what_was_done_before_it(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both, bare = model_of(Block), model_of(Block)
    attemper.apply(both, recipe.format("graying(where=tokens, eps=0.5)"))
    attemper.apply(bare, recipe.format("skipless(both)"))
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
    expected = attemper.methods.TokenGraying(where="tokens", eps=0.5).map_tokens(tokens(), Tokens(None), None)
    torch.testing.assert_close(both(tokens()), expected)
    assert torch.equal(bare(tokens()), tokens())


def test_an_addition_with_a_factor_is_not_taken_for_a_plain_one() -> None:
    class Weighted(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.add(x, self.attn(self.norm1(x)), alpha=0.5)
            return x + self.mlp(self.norm2(x))

    for recipe in ("skipless", "droppath(0.5)", "layerdrop(0.5)"):
        model = model_of(Weighted)
        attemper.apply(model, recipe)
        with pytest.raises(UnmetError, match="'0'"):
            model(tokens())


def test_a_skip_that_no_block_has_is_refused_at_once() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp_tokens, self.mlp_channels = Mlp(), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mlp_tokens(x)
            return x + self.mlp_channels(x)

    with pytest.raises(NoSiteError, match="skipless"):
        attemper.apply(model_of(Mixer), "skipless")
    model = model_of(Mixer)
    expected = tokens()
    for block in model:
        expected = block.mlp_channels(block.mlp_tokens(expected))
    attemper.apply(model, "skipless(mlp)")
    torch.testing.assert_close(model(tokens()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)"])
def test_compiled_blocks_are_checked_while_they_are_traced(recipe: str) -> None:
    model = model_of(Block)
    attemper.apply(model, recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    given = compiled(tokens())
    torch.manual_seed(3)
    torch.testing.assert_close(given, model(tokens()))
    outside = Parts().train()
    attemper.apply(outside, recipe)
    with pytest.raises(Exception, match="attentions"):
        torch.compile(outside, backend="aot_eager")(tokens())


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
