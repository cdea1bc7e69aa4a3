"""What a checked pass has shown of a block's sums holds in later passes, and only as long as they are alike."""

from __future__ import annotations

import copy
import pickle

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
from attemper.tempering.repeated_sums import RepeatedSums, SumLog

RECIPES = ("droppath(0.4)", "skipless(mlp)", "droppath(0.3) + dropkey(0.2) + cb")
WAYS = ("plain", "in place", "swapped", "norm", "without", "other", "twice", "scaled")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A block that may do something else in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(8), Attention(), nn.LayerNorm(8), Mlp()
        self.how = "plain"

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(self.norm1(x))
        if self.how == "in place":
            x = x.clone()
            x += attended
        elif self.how == "scaled":
            x = x + attended * 0.5
        else:
            x = attended + x if self.how == "swapped" else x + attended
        if self.how == "without":
            return x
        if self.how == "other":  # no stream that anybody knows
            return self.mlp(x)
        out = x + self.mlp(self.norm2(x))
        if self.how == "twice":
            out = out + self.mlp(self.norm2(out))
        return self.norm1(out) if self.how == "norm" else out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def call_by(self, how: str) -> None:
        for block in self.blocks:
            block.how = how


def tempered(recipe: str) -> Net:
    torch.manual_seed(0)
    model = Net().train()
    attemper.apply(model, recipe)
    return model


def passed(model: nn.Module, x: Tensor, seed: int, repeated: bool = True) -> list[Tensor] | str:
    """The output of a pass and all gradients, or why it failed. repeated: what earlier passes showed may be used."""
    with pytest.MonkeyPatch.context() as patch:
        if not repeated:
            patch.setattr(SumLog, "known", lambda *_: None)
        torch.manual_seed(seed)
        try:
            out = model(x)
        except UnmetError as error:
            return str(error)
        params = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(out.square().sum(), params, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def assert_same(ours: list[Tensor] | str, wanted: list[Tensor] | str) -> None:
    if isinstance(ours, str) or isinstance(wanted, str):
        assert ours == wanted
    else:
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every block that ran as it was expected to, or was not: whether it did."""
    found: list[bool] = []
    original = RepeatedSums.end

    def end(self: RepeatedSums, out: object) -> object:
        full = original(self, out)
        found.append(full is None)
        return full

    monkeypatch.setattr(RepeatedSums, "end", end)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_later_passes_draw_and_compute_what_a_first_one_would(recipe: str, ended: list[bool]) -> None:
    one, other = tempered(recipe), tempered(recipe)
    for seed in range(4):
        x = torch.randn(3, 5 + seed, 8)
        assert_same(passed(one, x, seed), passed(other, x, seed, repeated=False))
    assert ended[-2:] == [True, True]  # where attention is tempered too, it first has to settle


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(RECIPES), st.lists(st.tuples(st.sampled_from(WAYS), st.integers(1, 3)), min_size=1, max_size=5))
def test_whatever_a_block_does_otherwise_is_seen(recipe: str, steps: list[tuple[str, int]]) -> None:
    one, other = tempered(recipe), tempered(recipe)
    for seed, (how, tokens) in enumerate([("plain", 3), ("plain", 3), *steps]):
        x = torch.randn(2, tokens, 8)
        one.call_by(how)
        other.call_by(how)
        assert_same(passed(one, x, seed), passed(other, x, seed, repeated=False))


def test_branches_that_change_places_are_seen(ended: list[bool]) -> None:
    model, other = tempered("skipless(mlp)"), tempered("skipless(mlp)")
    x = torch.randn(2, 4, 8)
    for seed in range(2):
        assert_same(passed(model, x, seed), passed(other, x, seed, repeated=False))
    for net in (model, other):  # the same functions with other weights
        for block in net.blocks:
            block.mlp.fc1.weight = nn.Parameter(block.mlp.fc1.weight.detach() * 2)
    assert_same(passed(model, x, 5), passed(other, x, 5, repeated=False))
    assert ended[-2:] == [False, False]


def test_a_block_that_is_never_the_same_is_expected_to_be_no_more(ended: list[bool]) -> None:
    model = tempered("droppath(0.3)")
    for seed in range(30):
        model.call_by(("plain", "norm")[seed % 2])
        passed(model, torch.randn(2, 3, 8), seed)
    assert len(ended) < 30


def test_copies_and_pickles_expect_nothing_of_the_original(ended: list[bool]) -> None:
    model = tempered("droppath(0.4)")
    x = torch.randn(4, 3, 8)
    for _ in range(3):
        wanted = passed(model, x, 9)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(3):
            assert_same(passed(made, x, 9), wanted)
    assert ended.count(True) >= 2 * 2 + 2 * 2


def test_checkpointed_blocks_compute_again_what_they_computed() -> None:
    model = tempered("droppath(0.4)")
    x = torch.randn(4, 3, 8)
    for _ in range(3):
        wanted = passed(model, x, 7)
    forwards = [block.forward for block in model.blocks]
    for block, forward in zip(model.blocks, forwards, strict=True):
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    for _ in range(2):
        found = passed(model, x, 7)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_a_model_of_timm_is_followed_only_once(ended: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.tempering.skips.straight", lambda forward: None)  # or it would be followed no more
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 2}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).train()
    attemper.apply(model, "droppath(0.3)")
    for seed in range(3):
        passed(model, torch.randn(2, 3, 32, 32), seed)
    assert ended == [True] * 4
