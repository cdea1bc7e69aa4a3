"""Attention of one module in several calls: what treats them as one is refused, what does not acts in each of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import UnmetError
from plain_blocks import HEADS, WIDTH, Attention, Block, model_of, tokens


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def of_each_query(attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([attend(part, k, v) for part in q.split(2, 2)], 2)


def of_each_head(attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([attend(*parts) for parts in zip(*(t.split(1, 1) for t in (q, k, v)), strict=True)], 1)


def of_each_head_without_axis(attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([attend(q[:, h], k[:, h], v[:, h]) for h in range(HEADS)], 1)


class InPieces(Attention):
    def __init__(self, pieces, attend, tells_heads: bool) -> None:
        super().__init__()
        self.pieces, self.attend = pieces, attend
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        del self.qkv
        if not tells_heads:
            del self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.proj(self.pieces(self.attend, q, k, v).transpose(1, 2).flatten(2))


def model(pieces, attend=fused, tells_heads: bool = True) -> nn.Module:
    def block() -> nn.Module:
        made = Block()
        made.attn = InPieces(pieces, attend, tells_heads)
        return made

    return model_of(block)  # type: ignore[arg-type]


def trained(network: nn.Module, recipe: str) -> attemper.Tempered:
    """The handle behind a training pass."""
    tempered = attemper.apply(network, recipe, targets={"attention": "*.attn"})
    network(tokens())
    return tempered


@pytest.mark.parametrize("recipe", ["explicit(v=1)", "explicit(q=1, k=1)", "explicit(av=1)", "arora(v=1)"])
@pytest.mark.parametrize("attend", [fused, written])
def test_penalties_of_queries_in_chunks_are_refused_and_not_counted_for_every_chunk(attend, recipe):
    with pytest.raises(UnmetError, match="computes attention more than once from the same values"):
        trained(model(of_each_query, attend), recipe)


class Cached(InPieces):
    """Token after token, keys and values from a cache."""

    def forward(self, x: Tensor) -> Tensor:
        cache: list[tuple[Tensor, Tensor]] = []
        found = []
        for token in x.split(1, 1):
            q, k, v = (layer(token).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            cache.append((k, v))
            found.append(self.attend(q, *(torch.cat(each, 2) for each in zip(*cache, strict=True))))
        return self.proj(torch.cat(found, 2).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("recipe", ["explicit(v=1)", "explicit(q=1, k=1)", "explicit(av=1)", "arora(v=1)"])
@pytest.mark.parametrize("attend", [fused, written])
def test_penalties_of_keys_from_a_cache_are_refused(attend, recipe):
    network = model(of_each_query, attend)
    for block in network:
        block.attn.__class__ = Cached
    with pytest.raises(UnmetError, match="keys that several runs of its projections made"):
        trained(network, recipe)


@pytest.mark.parametrize("recipe", ["drophead(0.5)", "dropkey(0.5, share=heads)", "hardmask(0.5, k=2, share=heads)"])
@pytest.mark.parametrize("attend", [fused, written])
@pytest.mark.parametrize("pieces", [of_each_head, of_each_head_without_axis])
@pytest.mark.parametrize("tells_heads", [True, False])
def test_what_treats_heads_together_is_refused_where_each_has_a_call_of_its_own(tells_heads, pieces, attend, recipe):
    with pytest.raises(UnmetError, match="heads"):
        trained(model(pieces, attend, tells_heads), recipe)


@pytest.mark.parametrize("attend", [fused, written])
@pytest.mark.parametrize("pieces", [of_each_query, of_each_head, of_each_head_without_axis])
def test_what_drops_every_key_by_itself_acts_in_every_call(pieces, attend):
    tempered = trained(model(pieces, attend), "dropkey(0.5)")
    masks = tempered.masks(tempered.pass_seed)
    for name in ("0.attn", "1.attn"):
        assert [key.call for key in masks if key.site == name] == list(range(3 if pieces is of_each_query else HEADS))


def test_a_module_that_runs_twice_counts_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    torch.manual_seed(0)
    twice = nn.Sequential(Twice()).train()
    tempered = attemper.apply(twice, "explicit(v=1)")
    seen: list[Tensor] = []
    handle = twice[0].block.attn.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    twice(tokens())
    handle.remove()
    weight = twice[0].block.attn.qkv.weight[2 * WIDTH :]
    expected = sum(0.2**2 / 2 * (x @ weight.T).square().sum() / x.shape[:2].numel() for x in seen)
    assert len(seen) == 2
    torch.testing.assert_close(tempered.penalty(), expected)
