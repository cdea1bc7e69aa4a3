"""Attention however it is written: how softmax and products are spelt, and how the axes of logits are arranged.

Every spelling is compared with one that calls `scaled_dot_product_attention` and has the same weights: outputs,
penalties and gradients must be the same under the same seed.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attemper

WIDTH, HEADS, TOKENS, SAMPLES, SEED = 8, 2, 6, 3, 5
EACH = WIDTH // HEADS
SOFTMAX = {
    "function": lambda x, dim: F.softmax(x, dim),
    "method": lambda x, dim: x.softmax(dim),
    "torch": lambda x, dim: torch.softmax(x, dim=dim),
    "special": lambda x, dim: torch.special.softmax(x, dim),
    "module": lambda x, dim: nn.Softmax(dim)(x),
    "sequential": lambda x, dim: nn.Sequential(nn.Softmax(dim=dim), nn.Identity())(x),
    "dtype": lambda x, dim: F.softmax(x, dim=dim, dtype=torch.float64).to(x.dtype),
}
AXES = ("four", "folded", "heads_in_front", "five", "windows", "queries_last", "heads_last")
PRODUCTS = ("at", "matmul", "einsum", "bmm", "baddbmm")
RECIPES = (
    "dropkey(0.5)", "dropkey(0.5, share=queries)", "dropkey(0.5, share=heads)", "dropattention(0.5, rescale=inverted)",
    "hardmask(0.5, k=2)", "blur(5.0)", "blur(5.0) + dropkey(0.4)", "drophead(0.5)",
    "explicit(q=0.3, k=0.2, v=0.5, av=0.4)", "explicit(q=0.3, k=0.2, v=0.5, av=0.4, expectation=exact)",
    "arora(v=0.5)", "dropconnect(0.5)",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Spelling:
    softmax: str = "method"
    axes: str = "four"
    product: str = "at"
    tokens_first: bool = False
    packed: bool = True
    talks: bool = False
    """Whether a view and dropout at rate 0 stand between softmax and the values."""


FUSED = Spelling("fused")


class Attention(nn.Module):
    def __init__(self, how: Spelling) -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens_first = self.how.tokens_first
        q, k, v = self.qkv(x.transpose(0, 1) if tokens_first else x).chunk(3, -1)
        # (B, H, N, e), by way of (N, B, …) where tokens come first
        order = (1, 2, 0, 3) if tokens_first else (0, 2, 1, 3)
        q, k, v = (t.unflatten(-1, (HEADS, EACH)).permute(order) for t in (q, k, v))
        out = self.attend(q, k, v).transpose(1, 2).flatten(2)
        if tokens_first:
            return self.proj(out.transpose(0, 1)).transpose(0, 1)
        return self.proj(out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, N, e) in and out; in between, axes as the spelling has them."""
        how, (samples, _, tokens, _) = self.how, q.shape
        if how.softmax == "fused":
            return F.scaled_dot_product_attention(q, k, v)
        q = q * EACH**-0.5
        if how.axes == "queries_last":
            weights = self.softmax(torch.einsum("bhjd,bhid->bhji", k, q), 2)
            return torch.einsum("bhji,bhjd->bhid", weights, v)
        if how.axes == "heads_last":
            weights = self.softmax(torch.einsum("bhid,bhjd->bijh", q, k), -2)
            return torch.einsum("b i j h, b h j d -> b h i d", weights, v)
        if how.axes == "folded":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        elif how.axes == "heads_in_front":
            q, k, v = (t.transpose(0, 1).reshape(-1, tokens, EACH) for t in (q, k, v))
        elif how.axes == "five":
            q, k, v = (t[:, None] for t in (q, k, v))
        elif how.axes == "windows":  # samples as windows of one image, behind the heads
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = self.multiply(self.softmax(self.multiply(q, k.transpose(-2, -1)), -1), v)
        if how.axes == "heads_in_front":
            return out.unflatten(0, (HEADS, -1)).transpose(0, 1)
        return out[0].transpose(0, 1) if how.axes == "windows" else out.reshape(samples, HEADS, tokens, EACH)

    def softmax(self, logits: Tensor, dim: int) -> Tensor:
        weights = SOFTMAX[self.how.softmax](logits, dim)
        if self.how.talks:
            weights = F.dropout(weights.view(1, *weights.shape), 0.0).squeeze(0) * 1.0
        return weights

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        how = self.how.product
        if how in ("bmm", "baddbmm") and left.dim() == 3:
            zero = left.new_zeros(1, 1, 1)
            return torch.bmm(left, right) if how == "bmm" else torch.baddbmm(zero, left, right, beta=0.5)
        if how == "einsum":
            return torch.einsum("...ij,...jk->...ik", left, right)
        return torch.matmul(left, right) if how == "matmul" else left @ right


class Block(nn.Module):
    def __init__(self, how: Spelling) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(how)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def model_of(how: Spelling) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, WIDTH), Block(how), Block(how), nn.Linear(WIDTH, 3)).train()


def inputs() -> Tensor:
    return torch.randn(SAMPLES, TOKENS, 4, generator=torch.Generator().manual_seed(1))


def result(how: Spelling, recipe: str, passes: int = 1) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What the last of some passes gives: output, penalty, gradients."""
    model = model_of(how)
    tempered = attemper.apply(model, recipe)
    for _ in range(passes):
        model.zero_grad()
        out = model(inputs())
        penalty = tempered.penalty()
        (out.square().sum() + penalty).backward()
    return out.detach(), penalty.detach(), [parameter.grad for parameter in model.parameters()]


def check(how: Spelling, recipe: str, passes: int = 1) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda *args, **kwargs: torch.tensor(SEED, dtype=torch.int64))
        given_, wanted = result(how, recipe, passes), result(FUSED, recipe)
    torch.testing.assert_close(given_[0], wanted[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(given_[1], wanted[1], atol=1e-6, rtol=1e-4)
    for ours, theirs in zip(given_[2], wanted[2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


SPELLINGS = st.builds(
    Spelling,
    softmax=st.sampled_from(list(SOFTMAX)),
    axes=st.sampled_from(AXES),
    product=st.sampled_from(PRODUCTS),
    tokens_first=st.booleans(),
    talks=st.booleans(),
)


@settings(max_examples=20, deadline=None)
@given(SPELLINGS, st.sampled_from(RECIPES))
def test_the_spelling_makes_no_difference(how: Spelling, recipe: str) -> None:
    check(how, recipe)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(SPELLINGS, st.sampled_from(RECIPES), st.integers(1, 2))
def test_the_spelling_makes_no_difference_in_many_more(how: Spelling, recipe: str, passes: int) -> None:
    check(how, recipe, passes)


# ------------------------------------------------------------------------------------------------ by hand, and promises
def test_masks_of_folded_heads_are_those_of_their_sample_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against keep_mask, without any other part of Attemper."""
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: torch.tensor(SEED, dtype=torch.int64))
    for axes in ("folded", "heads_in_front"):
        model = nn.Sequential(Attention(Spelling(axes=axes))).train()
        attemper.apply(model, "dropkey(0.5)")
        x = torch.randn(SAMPLES, TOKENS, WIDTH)
        out, layer = model(x), model[0]
        keep = attemper.keep_mask(SEED, (SAMPLES, HEADS, TOKENS, TOKENS), 0.5, site="0")
        q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias).unflatten(-1, (3, HEADS, EACH)).permute(2, 0, 3, 1, 4)
        logits = (q @ k.mT * EACH**-0.5).masked_fill(~(keep | ~keep.any(-1, keepdim=True)), -torch.inf)
        wanted = layer.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, wanted)


EVERY = [Spelling(axes=axes, product=product) for axes, product in zip(AXES, [*PRODUCTS, *PRODUCTS], strict=False)]


@pytest.mark.parametrize("how", EVERY, ids=lambda how: how.axes)
def test_a_spelling_is_left_as_it_was(how: Spelling) -> None:
    """In eval mode, at rate zero, and after removal: bit for bit."""
    model, x = model_of(how), inputs()
    plain, keys = copy.deepcopy(model), list(model.state_dict())
    tempered = attemper.apply(model, "dropkey(0.5) + drophead(0.2)")
    assert torch.equal(model.eval()(x), plain.eval()(x))
    model.train()(x)
    tempered.set_rate(0.0)
    assert torch.equal(model(x), plain.train()(x))
    tempered.remove()
    assert list(model.state_dict()) == keys
    assert vars(model[1].attn).keys() == vars(plain[1].attn).keys()
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("how", EVERY, ids=lambda how: how.axes)
def test_penalties_leave_a_spelling_bit_for_bit(how: Spelling) -> None:
    model, x = model_of(how), inputs()
    plain = copy.deepcopy(model)
    tempered = attemper.apply(model, "explicit(q=1, k=1, v=1, av=1)")
    out, wanted = model(x), plain(x)
    assert torch.equal(out, wanted)
    assert tempered.penalty() > 0


@pytest.mark.parametrize(
    "how", [EVERY[1], pytest.param(EVERY[2], marks=pytest.mark.slow), EVERY[6]], ids=lambda how: how.axes
)
@pytest.mark.parametrize(
    "recipe", ["dropkey(0.5, share=heads) + drophead(0.5)", "blur(5.0) + explicit(q=1, v=1, av=1)"]
)
def test_what_a_trial_found_out_holds_in_compiled_code(how: Spelling, recipe: str) -> None:
    model = model_of(how)[:2]
    tempered = attemper.apply(model, recipe)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    results = []
    for forward, handle in ((compiled, attemper.Tempered.of(compiled._orig_mod)), (model, tempered)):
        torch.manual_seed(2)
        out = forward(inputs())
        results.append((out.detach(), handle.penalty().detach()))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


def test_tokens_and_samples_are_told_apart_where_there_are_as_many() -> None:
    recipe = "explicit(q=0.3, k=0.2, v=0.5, av=0.4, expectation=exact)"
    x, found = torch.randn(TOKENS, TOKENS, 4), []
    for how in (FUSED, Spelling(tokens_first=True), Spelling(tokens_first=True, axes="folded")):
        model = model_of(how)
        tempered = attemper.apply(model, recipe)
        out = model(x)
        found.append(tempered.penalty().item())
        del out
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)
