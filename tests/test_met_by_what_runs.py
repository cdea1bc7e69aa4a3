"""Attention is known by what runs: modules that only their calls give away, and softmaxes that are no attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError, UnmetError
from attemper.sites import find_sites
from attemper.tempering.looking import look_at, seen

WIDTH, HEADS = 8, 2
EACH = WIDTH // HEADS


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, EACH)).transpose(1, 2)


class Mixer(nn.Module):
    """Attention whose class, layers and attributes have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.soft = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.a(x)), split(self.b(x)), split(self.c(x))
        weights = self.soft(q @ k.mT * EACH**-0.5)
        return x + self.d((weights @ v).transpose(1, 2).flatten(2))


class Core(nn.Module):
    """Attention without weights, as in several tutorials."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=2), v)


class Folded(nn.Module):
    """Heads in front of samples, and a core that only sees three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.w_qs, self.w_ks, self.w_vs = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, EACH)) for layer in (self.w_qs, self.w_ks, self.w_vs))
        q, k, v = (t.permute(2, 0, 1, 3).contiguous().view(-1, x.shape[1], EACH) for t in (q, k, v))
        out = self.core(q, k, v).view(HEADS, -1, x.shape[1], EACH)
        return x + out.permute(1, 2, 0, 3).flatten(2)


class Head(nn.Module):
    """One head, as in a well-known lecture."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, EACH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return F.softmax(q @ k.transpose(-2, -1) * EACH**-0.5, dim=-1) @ v


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(HEADS)])
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


def model_of(*kinds: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), *(kind() for kind in kinds), nn.Linear(WIDTH, 3)).train()


def inputs() -> Tensor:
    return torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Mixer, ["1", "2"]), (Folded, ["1", "2"]), (Heads, ["1.heads.0", "1.heads.1", "2.heads.0", "2.heads.1"])],
)
def test_modules_are_found_by_what_they_compute(kind: type[nn.Module], names: list[str]) -> None:
    model = model_of(kind, kind)
    assert find_sites(model).attentions == ()
    tempered = attemper.apply(model, "dropkey(0.5)")
    assert [row.site for row in tempered.summary()] == names
    assert [row.block for row in tempered.summary()] == [0 if name[0] == "1" else 1 for name in names]
    x = inputs()
    assert not torch.equal(model(x), model.eval()(x))


def test_folded_heads_in_a_core_without_weights_are_told_from_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: torch.tensor(5, dtype=torch.int64))
    model = model_of(Folded)
    x = model[0](inputs())
    layer = model[1]
    q, k, v = (split(F.linear(x, each.weight, each.bias)) for each in (layer.w_qs, layer.w_ks, layer.w_vs))
    weights = (q @ k.mT).softmax(-1)
    kept = attemper.keep_mask(5, (3, 1, 1, HEADS), 0.5).view(3, HEADS)
    kept = kept | ~kept.any(1, keepdim=True)
    out = weights @ v * (kept * HEADS / kept.sum(1, keepdim=True))[..., None, None]
    attemper.apply(model, "drophead(0.5)")
    torch.testing.assert_close(model[1](x), x + out.transpose(1, 2).flatten(2))


def test_penalties_of_heads_that_are_modules_add_up() -> None:
    model = model_of(Heads)
    tempered = attemper.apply(model, "explicit(q=0.3, k=0.2, v=0.5, av=0.7)")
    out, x = model(inputs()), model[0](inputs())
    total = torch.zeros(())
    for head in model[1].heads:
        q, k, v = (x @ layer.weight.T for layer in (head.query, head.key, head.value))
        attended = (q @ k.mT * EACH**-0.5).softmax(-1) @ v
        terms = (0.5 * (q @ k.mT).square().sum(), 0.5 * v.square().sum(), 0.7 * attended.square().sum())
        total = total + sum(terms) * 0.2**2 / 2 / (3 * 6)
    torch.testing.assert_close(tempered.penalty(), total)
    del out


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [("drophead(0.5)", "each head is a module of its own"), ("dropkey(0.5, share=heads)", "each head is a module")],
)
def test_heads_that_are_modules_know_nothing_of_each_other(recipe: str, reason: str) -> None:
    def train() -> None:
        model = model_of(Heads)
        attemper.apply(model, recipe)
        model(inputs())

    with pytest.raises(UnmetError, match=reason):
        train()


# ---------------------------------------------------------------------------------------------- what is no attention
class Experts(nn.Module):
    """A mixture: softmax over experts, whose outputs are summed by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        each = torch.stack([expert(x) for expert in self.experts], 2)
        return torch.einsum("bne,bned->bnd", weights, each)


class ChannelAttention(nn.Module):
    """Cross-covariance: channels attend to channels, and all names say attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t).mT for t in self.qkv(x).chunk(3, -1))
        return x + ((q @ k.mT).softmax(-1) @ v).flatten(1, 2).mT


class Outlook(nn.Module):
    """Weights of a window come from a layer, and not from keys."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.attn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEADS * 9)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        weights = self.attn(x).view(batch, tokens, HEADS, 3, 3).permute(0, 2, 1, 3, 4).softmax(-1)
        values = split(self.v(x))[..., None, :].expand(batch, HEADS, tokens, 3, EACH)
        return x + (weights @ values).mean(3).transpose(1, 2).flatten(2)


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x).transpose(1, 2).softmax(-1) @ x


class Slots(nn.Module):
    """Slot attention: softmax over the slots, which are the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(3, WIDTH))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.slots.expand(x.shape[0], -1, -1))
        weights = (q @ self.k(x).mT).softmax(dim=1)
        return (weights / weights.sum(-1, keepdim=True)) @ self.v(x)


@pytest.mark.parametrize("kind", [Experts, ChannelAttention, Outlook])
def test_a_softmax_over_channels_or_experts_is_left_alone(kind: type[nn.Module]) -> None:
    model = model_of(Mixer, kind)
    tempered = attemper.apply(model, "dropkey(0.5)")
    assert [row.site for row in tempered.summary()] == ["1"]
    model(inputs())
    with pytest.raises(NoSiteError, match="acts on attention"):
        attemper.apply(model_of(kind), "dropkey(0.5)")


def test_what_attends_to_channels_is_named() -> None:
    tempered = attemper.apply(model_of(Mixer, ChannelAttention), "dropkey(0.5)")
    assert "left alone: 2, since its softmax is over channels" in str(tempered)
    with pytest.raises(NoSiteError, match=r"'1' was left alone: its softmax is over channels, not over keys\."):
        attemper.apply(model_of(ChannelAttention), "dropkey(0.5)")


def test_pooling_by_scores_is_left_alone_and_named() -> None:
    tempered = attemper.apply(model_of(Mixer, Pool), "dropkey(0.5)")
    assert "left alone: 2, since it weighs tokens by scores" in str(tempered)


def test_a_softmax_over_queries_is_refused() -> None:
    with pytest.raises(UnmetError, match="softmax over queries"):
        attemper.apply(model_of(Slots), "dropkey(0.5)", targets="1")
    attemper.apply(model_of(Mixer, Slots), "dropkey(0.5)")


@pytest.mark.parametrize("form", ["exp", "logsumexp"])
def test_a_softmax_that_is_written_out_is_refused_by_name(form: str) -> None:
    class Written(Mixer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = split(self.a(x)), split(self.b(x)), split(self.c(x))
            logits = q @ k.mT
            if form == "exp":
                weights = torch.exp(logits - logits.amax(-1, keepdim=True))
                weights = weights / weights.sum(-1, keepdim=True)
            else:
                weights = (logits - logits.logsumexp(-1, keepdim=True)).exp()
            return x + (weights @ v).transpose(1, 2).flatten(2)

    with pytest.raises(UnmetError, match=r"'2' \(Written\): attention by exp and a sum in place of softmax"):
        attemper.apply(model_of(Mixer, Written), "dropkey(0.5)")


def test_a_message_says_what_ran_in_modules_that_are_called_attention() -> None:
    class LinearAttention(ChannelAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split(t) for t in self.qkv(x).chunk(3, -1))
            return x + (F.relu(q) @ (F.relu(k).mT @ v)).transpose(1, 2).flatten(2)

    with pytest.raises(NoSiteError, match=r"2 modules are called LinearAttention \('1', …\); seen in them: no softmax"):
        attemper.apply(model_of(LinearAttention, LinearAttention), "dropkey(0.5)")


def test_a_model_that_replaces_its_modules_is_refused() -> None:
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mixer()

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                self.inner = Mixer()
            return self.inner(x)

    model = model_of(Switching)
    attemper.apply(model, "dropkey(0.5)")
    model.eval()(inputs())
    with pytest.raises(UnmetError, match=r"1 of the modules that are tempered were replaced.*'1\.inner'"):
        model.train()(inputs())


def test_a_single_key_is_told() -> None:
    model = model_of(Mixer)
    attemper.apply(model, "dropkey(0.5)")
    with pytest.raises(UnmetError, match=r"dropkey had no effect.*single key"):
        model(inputs()[:, :1])


def test_a_model_is_looked_at_once() -> None:
    seen.clear()
    calls = [look_at(model_of(Mixer)) for _ in range(3)]
    assert len(seen) == 1
    assert calls[0] == calls[2]
    assert len(calls[0]) == 1
