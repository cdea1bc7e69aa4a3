"""Every mask of a pass can be had again from the seed of the pass, wherever it was drawn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper import methods
from attemper.errors import UnsupportedError
from attemper.methods import blur, kinds
from attemper.methods.learning import SoftDrop
from attemper.ops.perturbation import Perturbation, WeightDropout
from attemper.ops.stream import Stream, site_word
from attemper.tempering.replay import MaskKey
from families import build, call, family


class Change(NamedTuple):
    """What a function of a method made of a tensor."""

    function: str
    before: Tensor
    after: Tensor


Seen = dict[tuple[str, int, int], list[Change]]
"""Method, word of the site, number of the call → what the method changed."""


def spy(monkeypatch: pytest.MonkeyPatch, seen: Seen, owner: Any, function: str, changed: int = 0) -> None:
    """Note what a function of a method does. changed: which argument it changes."""
    original: Callable[..., Any] = getattr(owner, function)

    def watched(self: Any, *args: Any) -> Any:
        stream, before = args[-1], args[changed].detach().clone()
        out = original(self, *args)
        after = out[0] if isinstance(out, tuple) else out
        changes = seen.setdefault((self.name, stream.site, stream.call), [])
        if after is not args[changed]:
            changes.append(Change(function, before, after.detach().clone()))
        return out

    monkeypatch.setattr(owner, function, watched)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the methods did in the passes of a test."""
    found: Seen = {}
    for owner in (methods.DropKey, methods.DropAttention, methods.HardMask, SoftDrop):
        spy(monkeypatch, found, owner, "perturb_logits")
    for owner in (methods.DropAttention, WeightDropout):
        spy(monkeypatch, found, owner, "perturb_weights")
    spy(monkeypatch, found, methods.DropHead, "perturb_heads")
    spy(monkeypatch, found, methods.DropPath, "map_branch")
    spy(monkeypatch, found, methods.LayerDrop, "map_block", changed=1)
    spy(monkeypatch, found, methods.FeedForwardDropout, "map_tokens")
    spy(monkeypatch, found, methods.DropConnect, "map_weight")
    return found


def word(key: MaskKey) -> int:
    """The word of the site where something was drawn, by the names that the documentation gives sites."""
    module, _, side = key.site.partition(":")
    if side == "output_weights":
        return site_word(f"{module}:{key.method}")
    if key.method in ("dropkey", "dropattention", "drophead", "hardmask", "blur", "dropout", "dropconnect"):
        return site_word(key.site)
    return site_word(f"{module}:{key.method}:{side}" if side else f"{module}:{key.method}")


def expected(change: Change, keep: Tensor) -> Tensor:
    """What a method makes of a tensor, up to a factor, by a mask that was drawn."""
    keep = keep.expand(change.before.shape)
    if change.function in ("perturb_logits", "perturb_weights"):
        hidden = -50 if change.function == "perturb_logits" else 0  # some models hide keys by −100
        allowed = change.before > hidden
        keep = keep | ~(keep & allowed).any(-1, keepdim=True)
    return change.before.masked_fill(~keep, -torch.inf if change.function == "perturb_logits" else 0.0)


def same_places(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same zeros and the same −inf."""
    return torch.equal(one == 0, other == 0) and torch.equal(one == -torch.inf, other == -torch.inf)


class Case(NamedTuple):
    family: str
    recipe: str


CASES = [
    Case("timm-vit", "dropkey(0.4)"),
    Case("timm-vit", "dropkey(0.4, share=queries) + drophead(0.4)"),
    Case("timm-vit", "dropkey(0.4, share=heads) + droppath(0.4)"),
    Case("timm-vit", "dropkey(0.3, structure=block) + ffdropout(0.4)"),
    Case("timm-vit", "dropkey(0.3, structure=cross) + dropattention(0.3)"),
    Case("timm-vit", "dropattention(0.4, unit=column, w=2) + layerdrop(0.5) + dropconnect(0.3)"),
    Case("timm-vit", "dropattention(0.4, rescale=inverted) + drophead(0.4) + ffdropout(0.2) + droppath(0.5)"),
    Case("timm-swin", "dropkey(0.4) + droppath(0.4) + ffdropout(0.2)"),
    Case("hf-bert", "dropkey(0.4) + dropconnect(0.3) + layerdrop(0.5)"),
    Case("hf-falcon", "dropkey(0.4, schedule=decreasing) + drophead(0.4) + ffdropout(0.2) + droppath(0.5)"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.recipe}")
def test_masks_are_those_that_acted_in_the_pass(case: Case, seen: Seen) -> None:
    model = build(family(case.family)).train()
    tempered = attemper.apply(model, case.recipe, impl="reference")
    inputs = family(case.family).inputs()
    seen.clear()
    call(model, inputs)
    assert tempered.pass_seed is not None
    masks = tempered.masks(tempered.pass_seed)
    for key, keep in masks.items():
        for change in seen[key.method, word(key), key.call]:
            if change.function == "map_block":
                assert torch.equal(change.before, change.after) == bool(keep)
            else:
                assert same_places(expected(change, keep), change.after)
    assert {(key.method, word(key), key.call) for key in masks} == seen.keys()
    assert {method.name for method in tempered.methods} == {key.method for key in masks}


def test_a_models_own_dropout_is_replayed_with_the_methods(seen: Seen) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer.self_attn.dropout = 0.4
    tempered = attemper.apply(layer, "dropkey(0.3)", impl="reference")
    seen.clear()
    layer(torch.randn(3, 6, 16))
    assert tempered.pass_seed is not None
    masks = tempered.masks(tempered.pass_seed)
    assert list(masks) == [("self_attn", "dropkey", 0), ("self_attn", "dropout", 0)]
    (change,) = seen["dropout", site_word("self_attn"), 0]
    assert same_places(expected(change, masks["self_attn", "dropout", 0]), change.after)


def test_hard_masking_gives_its_coins_again(seen: Seen) -> None:
    model = build(family("nn-encoder")).train()
    tempered = attemper.apply(model, "hardmask(0.5, k=3)", impl="reference")
    seen.clear()
    call(model, family("nn-encoder").inputs())
    assert tempered.pass_seed is not None
    for key, keep in tempered.masks(tempered.pass_seed).items():
        (change,) = seen["hardmask", word(key), key.call]
        largest = change.before >= change.before.topk(3, -1).values[..., -1:]
        assert torch.equal(change.before != change.after, largest & ~keep)


def test_a_learnt_rate_gives_the_shares_that_it_kept(seen: Seen) -> None:
    model = build(family("nn-encoder")).train()
    tempered = attemper.apply(model, "dropkey(learn, schedule=[0.5, 0.5, 0.5], each=head, entropy=0)", impl="reference")
    seen.clear()
    call(model, family("nn-encoder").inputs())
    assert tempered.pass_seed is not None
    for key, share in tempered.masks(tempered.pass_seed).items():
        (change,) = seen["dropkey", word(key), key.call]
        assert not share.requires_grad
        rows = (share > 0.5).any(-1)  # the others would have lost every key
        torch.testing.assert_close((change.after - change.before)[rows], share.log()[rows])


def test_blur_gives_its_width_again(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[Tensor] = []
    original = blur.gaussian
    monkeypatch.setattr(blur, "gaussian", lambda sigma, *args: widths.append(sigma) or original(sigma, *args))
    model = build(family("nn-encoder")).train()
    tempered = attemper.apply(model, "blur(1.5)")
    widths.clear()
    call(model, family("nn-encoder").inputs())
    assert tempered.pass_seed is not None
    assert list(tempered.masks(tempered.pass_seed).values()) == widths


def test_the_grid_that_a_pass_found_is_that_of_its_masks(seen: Seen) -> None:
    model = build(family("hf-segformer")).train()
    tempered = attemper.apply(model, "dropkey(0.3, structure=cross)", impl="reference", partial=True)
    seen.clear()
    call(model, family("hf-segformer").inputs())
    assert tempered.pass_seed is not None
    masks = tempered.masks(tempered.pass_seed)
    assert len(masks) > 0
    for key, keep in masks.items():
        (change,) = seen["dropkey", word(key), key.call]
        assert same_places(expected(change, keep), change.after)


def test_any_logged_seed_gives_the_masks_of_its_own_pass(seen: Seen) -> None:
    model = build(family("timm-vit")).train()
    tempered = attemper.apply(model, "dropkey(0.4) + droppath(0.3)", impl="reference")
    inputs, logged, passes = family("timm-vit").inputs(), [], []
    for _ in range(3):
        seen.clear()
        call(model, inputs)
        logged.append(tempered.pass_seed)
        passes.append(dict(seen))
    seen.clear()
    again = attemper.apply(build(family("timm-vit")).train(), "dropkey(0.4) + droppath(0.3)")
    call(again.model, inputs)
    for seed, changes in zip(logged, passes, strict=True):
        assert seed is not None
        for key, keep in again.masks(seed).items():
            for change in changes[key.method, word(key), key.call]:  # of a block that was tried out, several
                assert same_places(expected(change, keep), change.after)


def test_rates_are_those_of_now() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    tempered = attemper.apply(layer, "dropkey(0.1)")
    layer(torch.randn(2, 40, 16))
    tempered.set_rate(0.7)
    mask = tempered.masks(5)["self_attn", "dropkey", 0]
    assert torch.equal(mask, attemper.keep_mask(5, (2, 2, 40, 40), 0.7, site="self_attn"))


def test_a_block_that_runs_twice_in_a_pass_has_two_masks() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x)[:, :3])

    model = Twice()
    tempered = attemper.apply(model, "dropkey(0.4)")
    model(torch.randn(2, 5, 16))
    masks = tempered.masks(5)
    assert {key.call: tuple(mask.shape) for key, mask in masks.items()} == {0: (2, 2, 5, 5), 1: (2, 2, 3, 3)}
    by_hand = attemper.keep_mask(5, (2, 2, 3, 3), 0.4, site="layer.self_attn", call=1)
    assert torch.equal(masks["layer.self_attn", "dropkey", 1], by_hand)


def test_a_pass_that_is_computed_again_leaves_the_shapes_of_the_last_pass() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self[0], x, use_reentrant=False, preserve_rng_state=False)
            return out

    model = Checkpointed(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
    tempered = attemper.apply(model, "dropkey(0.4)")
    first = model(torch.randn(2, 5, 16))
    model(torch.randn(3, 4, 16))
    first.sum().backward()
    assert [tuple(mask.shape) for mask in tempered.masks(5).values()] == [(3, 2, 4, 4)]


def test_probing_and_evaluating_leave_the_last_training_pass_as_it_is() -> None:
    model = build(family("timm-vit")).train()
    tempered = attemper.apply(model, "dropkey(0.4)")
    assert tempered.pass_seed is None
    call(model, family("timm-vit").inputs())
    seed = tempered.pass_seed
    model.eval()
    call(model, family("timm-vit").inputs())
    attemper.diagnose(model, family("timm-vit").inputs()["args"][0])
    assert tempered.pass_seed == seed


@pytest.mark.parametrize(
    ("kind", "method", "shape"),
    [
        (Perturbation, methods.DropKey(0.4), (2, 3, 4, 64)),
        (Perturbation, methods.DropAttention(0.4, rescale="inverted"), (2, 3, 4, 64)),
        (Perturbation, methods.DropHead(0.4), (2, 3, 4, 64)),
        (kinds.TokenMap, methods.FeedForwardDropout(0.4), (2, 4, 5)),
        (kinds.BranchMap, methods.DropPath(0.4), (9, 4, 5)),
        (kinds.BlockMap, methods.LayerDrop(0.4), (2, 4, 5)),
        (kinds.WeightMap, methods.DropConnect(0.4), (7, 5)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_method_of_another_package_need_not_say_what_it_keeps(kind: Any, method: Any, shape: tuple[int, ...]) -> None:
    for seed in range(20):
        stream = Stream(torch.tensor(seed), 1, site=5, call=2)
        assert torch.equal(kind.drawn(method, shape, stream), method.drawn(shape, stream).expand(shape))


def test_without_a_pass_it_is_said_what_to_do() -> None:
    tempered = attemper.apply(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), "dropkey(0.1)")
    with pytest.raises(UnsupportedError, match=r"no pass drew.*keep_mask"):
        tempered.masks(5)


def test_compiled_passes_have_seeds_and_need_one_pass_without_a_compiler_for_their_shapes() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
    tempered = attemper.apply(model, "dropkey(0.4)")
    plain, x = copy.deepcopy(model), torch.randn(2, 5, 16)
    model[0].compile(backend="eager")
    model(x)
    seed = tempered.pass_seed
    assert seed is not None
    with pytest.raises(UnsupportedError, match=r"0\.self_attn ran in compiled code.*force_eager"):
        tempered.masks(seed)
    plain(x)
    with torch.compiler.set_stance("force_eager"):
        model(x)
    ours, theirs = tempered.masks(seed), attemper.Tempered.of(plain).masks(seed)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
