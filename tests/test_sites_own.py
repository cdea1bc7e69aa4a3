"""Attention of one's own: whatever its layers and its class are called, the same weights give the same results."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import attemper
from attemper.sites import find_sites

WIDTH, HEADS = 16, 2


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.project(x))
        weights = (q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class MHSA(SelfAttention):
    """Q and K by one layer, V by another."""

    def __init__(self) -> None:
        super().__init__()
        whole = self.qkv
        del self.qkv
        with torch.random.fork_rng():
            self.qk, self.v = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for part, rows in ((self.qk, slice(2 * WIDTH)), (self.v, slice(2 * WIDTH, None))):
                part.weight.copy_(whole.weight[rows])
                part.bias.copy_(whole.bias[rows])

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.qk(x).chunk(2, -1), self.v(x)


class MultiHead(MHSA):
    """Q by one layer, K and V by another."""

    def __init__(self) -> None:
        super().__init__()
        qk, v = self.qk, self.v
        del self.qk, self.v
        with torch.random.fork_rng():
            self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        with torch.no_grad():
            for name in ("weight", "bias"):
                whole = torch.cat((getattr(qk, name), getattr(v, name)))
                getattr(self.q, name).copy_(whole[:WIDTH])
                getattr(self.kv, name).copy_(whole[WIDTH:])

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), *self.kv(x).chunk(2, -1)


def network(kind: type[SelfAttention]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind()).train()


@pytest.mark.parametrize("recipe", ["dropkey(0.4)", "hardmask(0.3) + blur", "explicit(q=0.1, k=0.2, v=0.3, av=0.4)"])
@pytest.mark.parametrize("kind", [MHSA, MultiHead])
def test_how_layers_are_shared_makes_no_difference(kind: type[SelfAttention], recipe: str) -> None:
    results = []
    for one in (SelfAttention, kind):
        model = network(one)
        tempered = attemper.apply(model, recipe)
        torch.manual_seed(1)
        out = model(torch.linspace(-1, 1, 2 * 9 * WIDTH).view(2, 9, WIDTH))
        rows = [(row.block, row.component, row.value) for row in tempered.penalties()]
        (out.sum() + tempered.penalty()).backward()
        results.append((out.detach(), rows, model[0].proj.weight.grad))
    (out, rows, grad), (wanted, wanted_rows, wanted_grad) = results
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(grad, wanted_grad)
    assert [row[:2] for row in rows] == [row[:2] for row in wanted_rows]
    assert [row[2] for row in rows] == pytest.approx([row[2] for row in wanted_rows], rel=1e-4)


def test_a_softmax_under_another_name_is_not_attention() -> None:
    class Router(SelfAttention): ...

    with pytest.raises(attemper.errors.NoSiteError, match=r"acts on attention.*targets="):
        attemper.apply(nn.Sequential(Router()), "dropkey(0.1)")


def test_two_softmaxes_in_one_attention_are_left_alone() -> None:
    model = timm.create_model("convit_tiny", img_size=32, patch_size=8, depth=3, local_up_to_layer=2, embed_dim=16)
    sites = find_sites(model)
    assert [site.name for site in sites.attentions] == ["blocks.2.attn"]
    assert all("two softmaxes" in sites.left_alone[f"blocks.{block}.attn"] for block in (0, 1))
