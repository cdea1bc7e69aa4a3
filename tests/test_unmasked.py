"""Attention of timm that is called without a mask is not watched for padding; any other call is."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

import attemper
from attemper.errors import HiddenTokensError
from attemper.tempering.interception import AttentionInterceptor
from attemper.tempering.repeated import RepeatedAttention
from attemper.tempering.subclassing import state_of
from attemper.tempering.unmasked import masks_of

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


class Own(Attention):
    """A user's, who hides what nobody asked to hide."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return super().forward(x, attn_mask, is_causal=x.shape[1] > 20)


def model(recipe: str = "cb") -> nn.Module:
    torch.manual_seed(0)
    made = timm.create_model("vit_tiny_patch16_224", **SIZES).train()
    attemper.apply(made, recipe)
    return made


def passed(made: nn.Module, x: Tensor, **masks: object) -> list[Tensor]:
    torch.manual_seed(1)
    out = made(x, **masks)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tuple(made.parameters()))]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What watches attention, each time that it does."""
    found: list[str] = []
    for kind in (RepeatedAttention, AttentionInterceptor):
        begin = kind.__init__

        def begun(self: object, *args: object, begin: object = begin) -> None:
            found.append(type(self).__name__)
            begin(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(kind, "__init__", begun)
    return found


def test_which_code_hands_its_mask_on() -> None:
    assert masks_of(Attention.forward) == (("attn_mask", 1), ("is_causal", 2))
    for other in (WindowAttention.forward, Own.forward, nn.MultiheadAttention.forward, F.linear, None):
        assert masks_of(other) is None


def test_later_passes_are_not_watched_and_compute_the_same(watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = model(), torch.randn(3, 3, 32, 32)
    results = [passed(made, x) for _ in range(3)]
    watched.clear()
    results.append(passed(made, x))
    assert watched == []
    made.eval()
    with torch.no_grad():
        made(x)
    assert len(watched) >= 2
    monkeypatch.setattr("attemper.tempering.unmasked.masks_of", lambda function: None)
    for ours in results:
        assert all(torch.equal(a, b) for a, b in zip(ours, passed(model(), x), strict=True))


def test_masks_that_come_later_are_seen(watched: list[str]) -> None:
    made, other, x = model(), model(), torch.randn(3, 3, 32, 32)
    for _ in range(3):
        passed(made, x)
    mask = torch.ones(3, 1, 1, 17, dtype=torch.bool)
    mask[1, ..., 11:] = False
    ours = passed(made, x, attn_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(ours, passed(other, x, attn_mask=mask), strict=True))
    without = passed(made, x)
    assert not torch.equal(without[0], ours[0])
    assert all(torch.equal(a, b) for a, b in zip(without, passed(model(), x), strict=True))
    watched.clear()
    with pytest.raises(HiddenTokensError, match="is causal"):
        passed(made, x, is_causal=True)


def test_a_new_layout_is_watched_at_first(watched: list[str]) -> None:
    made = model()
    for _ in range(3):
        passed(made, torch.randn(3, 3, 32, 32))
    watched.clear()
    for _ in range(2):
        passed(made, torch.randn(5, 3, 32, 32))
    assert len(watched) >= 2 * 2  # a new layout is decided anew
    watched.clear()
    passed(made, torch.randn(5, 3, 32, 32))
    assert watched == []


def test_another_forward_is_watched(watched: list[str]) -> None:
    made, x = model(), torch.randn(3, 3, 32, 32)
    for _ in range(3):
        passed(made, x)
    watched.clear()
    with pytest.MonkeyPatch.context() as patch:
        forward = Attention.forward

        def causal(self: Attention, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            return forward(self, x, attn_mask, True)

        patch.setattr(Attention, "forward", causal)
        with pytest.raises(HiddenTokensError, match="is causal"):
            passed(made, x)
    assert watched


def test_another_fused_call_is_watched(watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = model(), torch.randn(3, 3, 32, 32)
    for _ in range(3):
        passed(made, x)
    sdpa = F.scaled_dot_product_attention

    def masked(q: Tensor, k: Tensor, v: Tensor, **given: object) -> Tensor:
        return sdpa(q, k, v, **{**given, "is_causal": True})  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", masked)
    with pytest.raises(HiddenTokensError, match="is causal"):
        passed(made, x)


def test_methods_that_act_in_attention_are_never_left_out(watched: list[str]) -> None:
    made, x = model("cb + dropkey(0.5)"), torch.randn(3, 3, 32, 32)
    for _ in range(3):
        passed(made, x)
    watched.clear()
    passed(made, x)
    assert watched == ["RepeatedAttention"] * 2


def test_copies_and_pickles_find_out_for_themselves() -> None:
    made, x = model(), torch.randn(3, 3, 32, 32)
    wanted = [passed(made, x) for _ in range(3)][-1]
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        (action,) = state_of(other.blocks[0].attn).actions
        assert not action.unmasked.inputs
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(passed(other, x), wanted, strict=True))
        assert action.unmasked.inputs
