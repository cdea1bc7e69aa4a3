"""Masks that people write themselves, by −1e9 or −1e4 and on whatever device: nothing that is hidden is ever shown."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import ConflictError
from attemper.tempering import trial
from attemper.tempering.padding import allowed_keys

WIDTH, TOKENS = 16, 6
FILLS = [-math.inf, pytest.param(torch.finfo(torch.float32).min, marks=pytest.mark.slow), -1e9, -1e4]


class Mixing(nn.Module):
    """Attention of which neither its name nor the names of its layers tell, with a mask that is made on the CPU."""

    def __init__(self, fill: float, causal: bool) -> None:
        super().__init__()
        self.fill, self.causal = fill, causal
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        samples, tokens, _ = x.shape
        q, k, v = self.inward(x).view(samples, tokens, 3, 2, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // 2)
        if self.causal:
            logits = logits.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), self.fill)
        if padding is not None:
            logits = logits.masked_fill(padding[:, None, None], self.fill)
        return self.outward((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, fill: float, causal: bool) -> None:
        super().__init__()
        self.mixing, self.norms = Mixing(fill, causal), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in "ab")
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x + self.mixing(self.norms[0](x), padding)
        return x + self.mlp(self.norms[1](x))


class Network(nn.Module):
    def __init__(self, fill: float = -1e9, causal: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fill, causal) for _ in range(2))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, padding)
        return x


def made(**options: object) -> Network:
    torch.manual_seed(0)
    return Network(**options).train()  # type: ignore[arg-type]


def moved(model: nn.Module, one: Tensor, other: Tensor, *more: Tensor, tries: int = 10) -> Tensor:
    """How far outputs differ between two inputs under the same random numbers, at most, by token."""
    worst = torch.zeros(TOKENS)
    for seed in range(tries):
        outputs = []
        for x in (one, other):
            torch.manual_seed(seed)
            outputs.append(model(x, *more))
        worst = worst.maximum((outputs[0] - outputs[1]).abs().amax((0, 2)))
    return worst.detach()


def pair() -> tuple[Tensor, Tensor]:
    """Two inputs that differ in the last token."""
    x = torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, torch.cat([x[:, :-1], x[:, -1:].flip(-1)], 1)


ON_ATTENTION = ["dropkey(0.5)", "dropkey(0.5, share=heads)", "dropattention(0.5)", "hardmask(0.5, k=2)", "blur(3.0)"]


@pytest.mark.parametrize("recipe", ON_ATTENTION)
@pytest.mark.parametrize("fill", FILLS)
def test_no_token_sees_its_future(recipe: str, fill: float) -> None:
    model = made(fill=fill)
    tempered = attemper.apply(model, recipe)
    assert [row.site for row in tempered.summary()] == ["layers.0.mixing", "layers.1.mixing"]
    worst = moved(model, *pair())
    assert worst[:-1].max() == 0
    assert worst[-1] > 0


@pytest.mark.parametrize("recipe", ON_ATTENTION)
@pytest.mark.parametrize("fill", FILLS)
def test_padding_reaches_no_token(recipe: str, fill: float) -> None:
    model, padding = made(fill=fill, causal=False), torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[:, -1] = True
    attemper.apply(model, recipe)
    assert moved(model, *pair(), padding)[:-1].max() == 0


class Windowed(Mixing):
    """Hides what is further away than a window, which short sequences never are; or, from some pass on, the future."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        where = torch.arange(x.shape[1])
        seen = (where[:, None] - where).abs() < 32
        if self.causal:
            seen = seen.tril()
        q, k, v = self.inward(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.fill == -math.inf:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            out = (q @ k.mT).masked_fill(~seen, self.fill).softmax(-1) @ v
        return self.outward(out.transpose(1, 2).flatten(2))


class Asking(Network):
    """Cannot be run without a mask, so that no pass tells its attention before training."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, padding)


@pytest.mark.parametrize("recipe", ["cb", "cb(cb_s)", "graying(where=tokens)"])
@pytest.mark.parametrize("fill", FILLS)
def test_padding_that_attention_of_no_known_kind_hides_is_not_mixed_in(recipe: str, fill: float) -> None:
    padding = torch.zeros(3, TOKENS, dtype=torch.bool)
    torch.manual_seed(0)
    model = Asking(fill, causal=False).train()
    attemper.apply(model, recipe)
    model(pair()[0], padding)
    padding[0, -1] = True
    model = Asking(fill, causal=False).train()
    attemper.apply(model, recipe)
    with pytest.raises(ConflictError, match="hides"):
        model(pair()[0], padding)
    model = Asking(fill, causal=False).train()
    attemper.apply(model, recipe, targets={"attention": "*.mixing"})
    if recipe.startswith("cb"):
        assert moved(model, *pair(), padding.expand(3, TOKENS))[:-1].max() > 0, "where the last token is none"
        padding[:, -1] = True
        assert moved(model, *pair(), padding)[:-1].max() == 0


@pytest.mark.parametrize("later", ["longer", "causal"])
@pytest.mark.parametrize("recipe", ["cb", "graying(where=tokens)"])
@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_a_mask_that_hides_nothing_at_first_is_looked_at_again(recipe: str, fill: float, later: str) -> None:
    model = made(fill=fill, causal=False)
    for layer in model.layers:
        layer.mixing = Windowed(fill, False)
    attemper.apply(model, recipe)
    for _ in range(3):
        model(pair()[0])
    x = pair()[0] if later == "causal" else torch.randn(2, 40, WIDTH)
    for layer in model.layers:
        layer.mixing.causal = later == "causal"
    with pytest.raises(ConflictError, match=r"'layers\.0\.mixing' hides some tokens from others"):
        model(x)


@pytest.mark.parametrize("recipe", ["cb", "graying(where=tokens)"])
@pytest.mark.parametrize("fill", FILLS)
def test_what_mixes_tokens_is_refused_where_they_are_hidden_from_each_other(
    recipe: str, fill: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(fill=fill)
    with pytest.raises(ConflictError, match=r"'layers\.0\.mixing' hides some tokens from others"):
        attemper.apply(model, recipe)
    monkeypatch.setattr(trial, "MOST_WEIGHTS", 0)  # a model too large to be copied is refused when it runs
    attemper.apply(model, recipe)
    with pytest.raises(ConflictError, match=r"'layers\.0\.mixing' hides some tokens from others"):
        model(pair()[0])


class Told(Network):
    """Hides what its caller says, which no input that is made up tells."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            layer.mixing.causal = mask is not None
            x = layer(x)
        return x


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compiled_model_shows_nothing_that_is_hidden_either(fullgraph: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Told().train(), pair()[0]
    attemper.apply(model, "cb")
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match=r"hides some tokens from others|cannot be read off its mask"):
        compiled(x, torch.ones(TOKENS, TOKENS).tril())
    torch._dynamo.reset()
    plain = Network(causal=False).train()
    attemper.apply(plain, "cb")
    expected = copy.deepcopy(plain)(x)
    torch.testing.assert_close(torch.compile(plain, backend="eager", fullgraph=fullgraph)(x), expected)


@pytest.mark.parametrize("fill", [-1e9, -1e4])
def test_a_mean_of_tokens_leaves_padding_out(fill: float) -> None:
    model, padding = made(fill=fill, causal=False), torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[:, -1] = True
    attemper.apply(model, "cb")
    assert moved(model, *pair(), padding)[:-1].max() < 1e-6


class Pooled(nn.Module):
    """Attention outside of the blocks that nothing recognises before it runs: its input cannot be made up."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.network, self.causal = Network(causal=False), causal

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        x, tokens = self.network(x), lengths[0]
        logits = x @ x.transpose(1, 2)
        if self.causal:
            logits = logits + torch.full((tokens, tokens), -1e9).triu(1)
        return logits.softmax(-1) @ x


def test_tokens_that_unknown_attention_hides_are_not_mixed() -> None:
    x = pair()[0]
    for causal in (True, False):
        model = Pooled(causal).train()
        tempered = attemper.apply(model, "cb", targets={"attention": "network"})
        if not causal:
            model(x, [TOKENS])
            continue
        with pytest.raises(ConflictError, match=r"cb mixes tokens.*was not recognised as attention, hides tokens"):
            model(x, [TOKENS])
        tempered.remove()
        attemper.apply(model, "cb", targets={"attention": "network"}, partial=True)
        model(x, [TOKENS])


def test_a_blur_that_cannot_be_followed_to_softmax_is_refused() -> None:
    class Capped(Mixing):
        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            q, k, v = self.inward(x).chunk(3, -1)
            return self.outward((q @ k.mT).tanh().softmax(-1) @ v)

    model = made()
    model.layers[1].mixing = Capped(-1e9, False)
    with pytest.raises(attemper.errors.UnsupportedError, match="is more than factors, masks and position biases"):
        attemper.apply(model, "blur(1.0)")


@pytest.mark.parametrize("fill", FILLS)
def test_masks_are_told_from_numbers_that_are_merely_low(fill: float) -> None:
    logits = 4000 * torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    distance = -0.7 * (torch.arange(4096) - torch.arange(4096)[:, None]).abs()
    assert allowed_keys(logits).all(), "logits of a network that explodes"
    assert allowed_keys(distance[::512]).all(), "a bias that grows with distance"
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    assert torch.equal(allowed_keys((logits / 400).masked_fill(hidden, fill)), ~hidden.expand(logits.shape))
    assert not allowed_keys(torch.full((2, 1, 1, 5), fill)).any()
