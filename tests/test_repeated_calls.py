"""What a pass decided for the attention calls of a module holds in later passes, and only as long as they are alike."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.errors import UnmetError
from attemper.tempering.attention import AttentionAction
from attemper.tempering.repeated import RepeatedAttention
from attemper.tempering.subclassing import is_tempered, state_of

RECIPES = (
    "dropkey(0.3)",
    "hardmask(0.4, k=2)",
    "blur",
    "dropattention(0.3)",
    "drophead(0.4)",
    "dropkey(0.2) + cb(branch=attention)",
)


class Attention(nn.Module):
    """Attention whose call may be another one in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)
        self.how = "plain"

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "softmax":
            out = (q * 0.5 @ k.mT).softmax(-1) @ v
        elif self.how == "mask":
            mask = torch.zeros(batch, 1, 1, tokens).masked_fill(torch.arange(tokens) == tokens - 1, -torch.inf)
            out = F.scaled_dot_product_attention(q, k, v, mask)
        elif self.how == "none":
            out = v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.how == "causal")
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, 16))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), Attention()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def call_by(self, how: str) -> None:
        for block in self.blocks:
            block[1].how = how


def actions(model: nn.Module) -> list[AttentionAction]:
    found = [action for m in model.modules() if is_tempered(m) for action in state_of(m).actions]
    return [action for action in found if isinstance(action, AttentionAction)]


def tempered(recipe: str) -> tuple[Net, attemper.Tempered]:
    torch.manual_seed(0)
    model = Net().train()
    return model, attemper.apply(model, recipe, targets=["blocks.*.1"])


def passed(model: nn.Module, x: Tensor, seed: int, repeated: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The output of a pass and all gradients; repeated: decisions of earlier passes may be used."""
    with monkeypatch.context() as patch:
        if not repeated:
            patch.setattr(AttentionAction, "may_repeat", lambda self: False)
        torch.manual_seed(seed)
        out = model(x)
        grads = torch.autograd.grad(out.square().sum(), [p for p in model.parameters() if p.requires_grad])
    return [out.detach(), *grads]


@pytest.fixture
def repetitions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that were served by a decision of an earlier pass."""
    served: list[str] = []
    original = RepeatedAttention.attend

    def attend(self: RepeatedAttention, *args: Any, **kwargs: Any) -> Tensor:
        out = original(self, *args, **kwargs)
        if self.full is None:
            served.append(self.action.place.name)
        return out

    monkeypatch.setattr(RepeatedAttention, "attend", attend)
    return served


@pytest.mark.parametrize("recipe", RECIPES)
def test_later_passes_draw_and_compute_what_a_first_one_would(
    recipe: str, repetitions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, _), (other, _) = tempered(recipe), tempered(recipe)
    x = torch.randn(3, 7, 16)
    for seed in range(4):
        ours = passed(one, x, seed, True, monkeypatch)
        plain = passed(other, x, seed, False, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert len(repetitions) == 2 * 2  # the first pass is watched, the second one decides


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["plain", "causal", "mask", "softmax"]), st.integers(2, 5)), max_size=6))
def test_whatever_changes_between_passes_is_seen(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        (one, _), (other, _) = tempered("dropkey(0.3)"), tempered("dropkey(0.3)")
        for seed, (how, tokens) in enumerate([("plain", 5), ("plain", 5), *steps]):
            x = torch.randn(2, tokens, 16)
            for model in (one, other):
                model.call_by(how)
            ours, plain = (passed(m, x, seed, m is one, monkeypatch) for m in (one, other))
            for a, b in zip(ours, plain, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_blur_follows_a_module_that_writes_softmax_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, _), (other, _) = tempered("blur"), tempered("blur")
    x = torch.randn(2, 7, 16)
    for seed, how in enumerate(["plain", "plain", "softmax", "softmax", "plain"]):
        for model in (one, other):
            model.call_by(how)
        ours, plain = (passed(m, x, seed, m is one, monkeypatch) for m in (one, other))
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_module_that_stops_computing_attention_is_an_error_in_later_passes_too() -> None:
    model, _ = tempered("dropkey(0.3)")
    for _ in range(3):
        model(torch.randn(2, 5, 16))
    model.call_by("none")
    with pytest.raises(UnmetError, match="computed no attention"):
        model(torch.randn(2, 5, 16))


def change_rate(handle: attemper.Tempered) -> None:
    handle.set_rate(0.6)


def rest(handle: attemper.Tempered) -> None:
    handle.set_rate(0.0)


@pytest.mark.parametrize("change", [change_rate, rest])
def test_a_new_rate_acts_at_once(change: Callable[[attemper.Tempered], None], monkeypatch: pytest.MonkeyPatch) -> None:
    (one, first), (other, second) = tempered("dropkey(0.3)"), tempered("dropkey(0.3)")
    x = torch.randn(3, 7, 16)
    for seed in range(3):
        passed(one, x, seed, True, monkeypatch)
        passed(other, x, seed, False, monkeypatch)
    change(first)
    change(second)
    ours, plain = passed(one, x, 9, True, monkeypatch), passed(other, x, 9, False, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_eval_average_and_disabled_are_not_mixed_up() -> None:
    model, handle = tempered("dropkey(0.3) + cb(branch=attention)")
    plain, _ = tempered("cb(branch=attention)")
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 7, 16)
    for _ in range(3):
        model(x)
    with handle.disabled():
        disabled = model(x)
    model.eval()
    plain.eval()
    evaluated = model(x)
    assert torch.equal(evaluated, plain(x))
    assert not torch.equal(disabled, evaluated)  # cb is off, too
    averaged = handle.average(lambda: model(x), passes=3)
    assert not torch.equal(averaged, evaluated)
    assert torch.equal(model(x), evaluated)


def test_a_checkpointed_block_draws_again_what_it_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tempered("dropkey(0.4)")
    x = torch.randn(2, 7, 16)
    for seed in range(3):
        passed(model, x, seed, True, monkeypatch)
    expected = passed(model, x, 5, True, monkeypatch)
    forwards = [block.forward for block in model.blocks]
    for block, forward in zip(model.blocks, forwards, strict=True):
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
    found = passed(model, x, 5, True, monkeypatch)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_copies_and_pickles_decide_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=2, embed_dim=24, num_heads=2)
    attemper.apply(model.train(), "dropkey(0.3)")
    x = torch.randn(2, 3, 32, 32)
    for seed in range(3):
        passed(model, x, seed, True, monkeypatch)
    expected = passed(model, x, 7, True, monkeypatch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for a, b in zip(passed(other, x, 7, True, monkeypatch), expected, strict=True):
            assert torch.equal(a, b)


def test_ever_new_lengths_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.tempering.repeated.MOST", 5)
    model, _ = tempered("dropkey(0.3)")
    for tokens in range(2, 20):
        model(torch.randn(1, tokens, 16))
    assert all(len(action.decisions.known) <= 5 for action in actions(model))
