"""Random small models: every recipe acts as its formula says, or is refused with a reason; nothing in between."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attemper
from attemper.errors import AttemperError
from one_seed import draw_from

WIDTH, HEADS, TOKENS, SAMPLES, SEED = 8, 4, 6, 3, 5
RECIPES = (
    "dropkey(0.5)", "dropattention(0.5, rescale=inverted)", "hardmask(0.5, k=2)", "blur(5.0)", "drophead(0.5)",
    "explicit(q=0.3, k=0.2, v=0.5, av=0.4, ff=0.6)", "explicit(v=0.5)", "arora(v=0.5)", "cb", "cb(branch=attention)",
    "graying(dct, where=tokens)", "skipless(attention)", "skipless(mlp)", "skipless(both)", "droppath(0.5)",
    "layerdrop(0.9)", "ffdropout(0.5)", "dropconnect(0.5)",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a model is written."""

    attention: str  # sdpa, function, method, module, folded
    packed: bool
    inside: bool  # whether blocks add their branches themselves
    container: str  # list, sequential, own
    scale: bool
    parallel: bool
    gate: bool  # squeeze-and-excite behind the feed-forward network


class Attention(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.spec, self.heads = spec, HEADS
        if spec.packed:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x):
        how, samples, tokens = self.spec.attention, x.shape[0], x.shape[1]
        projected = self.qkv(x).chunk(3, -1) if self.spec.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.view(samples, tokens, self.heads, -1).transpose(1, 2) for t in projected)
        if how == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v)
        elif how == "folded":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5, dim=-1)
            out = torch.bmm(weights, v).unflatten(0, (samples, self.heads))
        else:
            logits = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            if how == "function":
                weights = F.softmax(logits, dim=-1)
            else:
                weights = logits.softmax(-1) if how == "method" else self.softmax(logits)
            out = weights @ v
        return self.proj(out.transpose(1, 2).reshape(samples, tokens, WIDTH))


class Gate(nn.Module):
    """Squeeze-and-excite."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x):
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean(1, keepdim=True)))))


class FeedForward(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = Gate() if spec.gate else nn.Identity()

    def forward(self, x):
        return self.gate(self.fc2(F.gelu(self.fc1(x))))


class Branches(nn.Module):
    """The parts of one block."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(spec), FeedForward(spec)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(2))

    def scaled(self, gamma, branch):
        return gamma * branch if self.spec.scale else branch


class Block(Branches):
    def forward(self, x):
        if self.spec.parallel:
            h = self.norm1(x)
            return x + self.scaled(self.gamma1, self.attn(h)) + self.scaled(self.gamma2, self.mlp(h))
        x = x + self.scaled(self.gamma1, self.attn(self.norm1(x)))
        return x + self.scaled(self.gamma2, self.mlp(self.norm2(x)))


class Net(nn.Module):
    """Two blocks, held and run in one of the ways that people have."""

    def __init__(self, spec):
        super().__init__()
        torch.manual_seed(3)
        self.spec = spec
        made = [Block(spec) if spec.inside else self.parts(spec) for _ in range(2)]
        if spec.container == "own":
            self.first, self.second = made
        elif spec.container == "list" or not spec.inside:
            self.blocks = nn.ModuleList(made)
        else:
            self.blocks = nn.Sequential(*made)
        self.head = nn.Linear(WIDTH, 4)

    @staticmethod
    def parts(spec):
        """Attention and feed-forward network with their norms, whose branches the model adds itself."""
        branches = Branches(spec)
        return nn.ModuleList([
            nn.Sequential(branches.norm1, branches.attn), nn.Sequential(branches.norm2, branches.mlp)
        ])  # fmt: skip

    def held(self):
        return [self.first, self.second] if self.spec.container == "own" else list(self.blocks)

    def forward(self, x):
        if not self.spec.inside:
            for attend, feed in self.held():
                x = attend(x) + x
                x = feed(x) + x
        elif self.spec.container == "sequential":
            x = self.blocks(x)
        else:
            for block in self.held():
                x = block(x)
        return self.head(x.mean(1))


# ------------------------------------------------------------------------------------------------ the same by hand
class ByHand:
    """The same computation written down with a method's formula in it; collects the penalty on the way."""

    def __init__(self, net, method):
        self.net, self.method, self.name, self.penalty = net, method, method.name, 0.0

    def keep(self, *shape):
        return attemper.keep_mask(SEED, shape, self.method.p)

    def project(self, x, layer):
        if self.name != "dropconnect":
            return F.linear(x, layer.weight, layer.bias)
        rows, columns = layer.weight.shape
        kept = self.keep(1, 1, rows, columns).view(rows, columns)
        return F.linear(x, torch.where(kept, layer.weight / (1 - self.method.p), 0.0), layer.bias)

    def square(self, product):
        """½ · mean over tokens and samples of a squared norm, times p²: explicit's paper form."""
        return self.method.p**2 / 2 * product.square().sum() / (product.shape[0] * TOKENS)

    def attention(self, module, x):
        if module.spec.packed:
            layers = [module.qkv]
            projected = self.project(x, module.qkv).chunk(3, -1)
            weights = module.qkv.weight.chunk(3)
        else:
            layers = [module.q, module.k, module.v]
            projected = [self.project(x, layer) for layer in layers]
            weights = [layer.weight for layer in layers]
        q, k, v = (t.view(SAMPLES, TOKENS, HEADS, -1).transpose(1, 2) for t in projected)
        inside = [self.method] if self.name in ("dropkey", "dropattention", "hardmask", "blur", "drophead") else []
        out = attemper.attention(q, k, v, methods=inside, seed=SEED, impl="reference")
        self.penalise_attention(x, *weights, q, k)
        out = self.project(out.transpose(1, 2).reshape(SAMPLES, TOKENS, WIDTH), module.proj)
        return self.broadcast(out) if self.name == "cb" and self.method.branch == "attention" else out

    def penalise_attention(self, x, w_q, w_k, w_v, q, k):
        if self.name == "arora":
            p = self.method.p
            each = (w_v.square().sum(0) * x.square().flatten(0, 1).mean(0)).sum()
            self.penalty += self.method.v * p / (1 - p) * each
        if self.name != "explicit":
            return
        heads = lambda t: t.view(SAMPLES, TOKENS, HEADS, -1).transpose(1, 2)  # noqa: E731
        queries, keys, values = heads(x @ w_q.T), heads(x @ w_k.T), heads(x @ w_v.T)
        logits = self.square(queries @ keys.transpose(-2, -1))
        attended = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ values
        self.penalty += (self.method.q + self.method.k) * logits + self.method.v * self.square(values)
        self.penalty += self.method.av * self.square(attended)

    @staticmethod
    def broadcast(x):
        return (x + x.mean(1, keepdim=True)) / 2

    def dropped(self, x):
        kept = self.keep(x.shape[0], 1, x.shape[1], x.shape[2]).squeeze(1)
        return torch.where(kept, x / (1 - self.method.p), 0.0)

    def feed_forward(self, module, x):
        hidden = F.gelu(F.linear(x, module.fc1.weight, module.fc1.bias))
        if self.name == "ffdropout":
            hidden = self.dropped(hidden)
        out = F.linear(hidden, module.fc2.weight, module.fc2.bias)
        if self.name == "ffdropout":
            out = self.dropped(out)
        if self.name == "explicit" and self.method.ff:
            for inputs, layer in ((x, module.fc1), (hidden, module.fc2)):
                self.penalty += self.method.ff * self.square(inputs @ layer.weight.T)
        if self.name == "cb" and self.method.branch == "mlp":
            out = self.broadcast(out)
        return F.linear(out, torch.eye(WIDTH)) if isinstance(module.gate, nn.Identity) else gated(module.gate, out)

    def add(self, x, branch, attention):
        if self.name == "skipless" and self.method.skip in ("both", "attention" if attention else "mlp"):
            return branch
        if self.name == "droppath":
            kept = self.keep(SAMPLES, 1, 1, 1).view(SAMPLES, 1, 1)
            branch = torch.where(kept, branch / (1 - self.method.p), 0.0)
        return x + branch

    def block(self, block, x):
        spec, before = self.net.spec, x
        if not spec.inside:
            (norm1, attn), (norm2, mlp) = block
            x = self.add(x, self.attention(attn, norm1(x)), True)
            x = self.add(x, self.feed_forward(mlp, norm2(x)), False)
            return x if self.name != "layerdrop" or bool(self.keep(1, 1, 1, 1)) else before
        attended = block.scaled(block.gamma1, self.attention(block.attn, block.norm1(x)))
        if spec.parallel:
            x = self.add(torch.zeros_like(x) if self.name == "skipless" else x, attended, True)  # they share one skip
            fed = block.scaled(block.gamma2, self.feed_forward(block.mlp, block.norm1(before)))
            x = x + fed if self.name == "skipless" else self.add(x, fed, False)
        else:
            x = self.add(x, attended, True)
            x = self.add(x, block.scaled(block.gamma2, self.feed_forward(block.mlp, block.norm2(x))), False)
        if self.name == "layerdrop":
            return x if bool(self.keep(1, 1, 1, 1)) else before
        return x

    def __call__(self, x):
        if self.name == "graying":
            x = self.method.map_tokens(x, attemper.methods.kinds.Tokens(None), None)
        for block in self.net.held():
            x = self.block(block, x)
        return F.linear(x.mean(1), self.net.head.weight, self.net.head.bias)


def gated(gate, x):
    pooled = F.relu(F.linear(x.mean(1, keepdim=True), gate.fc1.weight, gate.fc1.bias))
    return x * torch.sigmoid(F.linear(pooled, gate.fc2.weight, gate.fc2.bias))


# ------------------------------------------------------------------------------------------------------- the property
def constant_seed(monkeypatch):
    """Let every draw of a seed be the same one."""
    draw_from(SEED, monkeypatch)


def outcome(spec, recipe):
    """'acts' where the tempered model does what the formula says, otherwise why it was refused."""
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    net, plain = Net(spec).train(), Net(spec).train()
    by_hand = ByHand(plain, attemper.parse(recipe)[0])
    try:
        tempered = attemper.apply(net, recipe)
        out = net(x)
        penalty = tempered.penalty()
    except AttemperError as error:
        return str(error)
    wanted = by_hand(x)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(penalty, torch.as_tensor(by_hand.penalty).to(penalty), atol=1e-6, rtol=1e-4)
    base = plain(x)
    assert by_hand.penalty != 0 or not torch.allclose(wanted, base, atol=1e-6), "the example itself must show an effect"
    (out.sum() + penalty).backward()
    (wanted.sum() + by_hand.penalty).backward()
    for (name, given_), expected in zip(net.named_parameters(), plain.parameters(), strict=False):
        if expected.grad is not None and given_.grad is not None:
            torch.testing.assert_close(given_.grad, expected.grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: n + m)
    return "acts"


SPECS = st.builds(
    Spec,
    attention=st.sampled_from(["sdpa", "function", "method", "module", "folded"]),
    packed=st.booleans(),
    inside=st.booleans(),
    container=st.sampled_from(["list", "sequential", "own"]),
    scale=st.booleans(),
    parallel=st.booleans(),
    gate=st.booleans(),
)


def check(spec, recipe):
    with pytest.MonkeyPatch.context() as patch:
        constant_seed(patch)
        said = outcome(spec, recipe)
    assert said == "acts" or len(said) > 40, "a refusal has a reason"


@settings(max_examples=60, deadline=None)
@given(SPECS, st.sampled_from(RECIPES))
def test_a_recipe_acts_as_its_formula_says_or_is_refused(spec, recipe):
    check(spec, recipe)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(SPECS, st.sampled_from(RECIPES))
def test_a_recipe_acts_as_its_formula_says_or_is_refused_on_many_more(spec, recipe):
    check(spec, recipe)


PLAIN = Spec("sdpa", True, True, "list", False, False, False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plain_model_is_served_by_every_recipe(recipe, monkeypatch):
    constant_seed(monkeypatch)
    assert outcome(PLAIN, recipe) == "acts"


@pytest.mark.parametrize("container", ["list", "own"])
@pytest.mark.parametrize("recipe", ["layerdrop(0.9)", "droppath(0.5)", "skipless(both)", "skipless(mlp)"])
def test_branches_that_the_model_adds_itself_are_found(recipe, container, monkeypatch):
    constant_seed(monkeypatch)
    assert outcome(dataclasses.replace(PLAIN, inside=False, container=container), recipe) == "acts"


@pytest.mark.parametrize("recipe", ["ffdropout(0.5)", "explicit(q=0.3, k=0.2, v=0.5, av=0.4, ff=0.6)"])
def test_squeeze_and_excite_is_left_alone(recipe, monkeypatch):
    constant_seed(monkeypatch)
    assert outcome(dataclasses.replace(PLAIN, gate=True), recipe) == "acts"
