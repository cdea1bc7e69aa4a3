"""Blocks whose parts are listed once more inside of them, and feed-forward networks that are blocks by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import ConflictError
from attemper.sites import find_sites


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).train()


def test_a_block_that_lists_its_parts_is_one_block():
    sites = find_sites(t5())
    assert [block.name for block in sites.blocks] == [
        f"{half}.block.{i}" for half in ("encoder", "decoder") for i in (0, 1)
    ]
    assert [site.block for site in sites.attentions] == [0, 1, 2, 2, 3, 3]
    assert [mlp.block for mlp in sites.mlps] == [0, 1, 2, 3]


def test_tokens_of_a_causal_decoder_are_not_mixed_in_a_feed_forward_network_that_is_listed_by_itself():
    model, ids = t5(), torch.randint(1, 30, (2, 6))
    with pytest.raises(ConflictError, match=r"'decoder\.block\.0.* hides some tokens from others"):
        attemper.apply(model, "cb")
    attemper.apply(model, "cb", targets=["encoder.block.*"])
    other = ids.clone()
    other[:, -1] = 31
    first, second = (model(input_ids=ids, decoder_input_ids=each).logits for each in (ids, other))
    assert torch.equal(first[:, :-1], second[:, :-1]), "the future is not seen"


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal, self.qkv, self.proj = causal, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask=None):
        q, k, v = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return x + self.proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, mask=None):
        return x + self.fc2(self.fc1(x).relu())


class Alternating(nn.Module):
    """Attention and feed-forward networks in turn, in one list."""

    def __init__(self, causal):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Attention(causal), FeedForward(), Attention(causal), FeedForward()])

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_a_feed_forward_network_behind_causal_attention_refuses_what_mixes_tokens():
    model = Alternating(causal=True).train()
    with pytest.raises(ConflictError, match=r"'layers\.0' is causal"):
        attemper.apply(model, "cb")


def test_padding_is_told_by_the_attention_before_a_feed_forward_network():
    model = Alternating(causal=False).train()
    attemper.apply(model, "cb")
    x = torch.randn(2, 5, 8)
    real = torch.tensor([3, 5])[:, None] > torch.arange(5)
    mask = real[:, None, None]
    noisy = torch.where(real[..., None], x, torch.randn_like(x) * 9)
    first, second = model(x, mask), model(noisy, mask)
    torch.testing.assert_close(first[real], second[real])


# ------------------------------------------------------------------------------- attention whose core is another module
class Attend(nn.Module):
    """Attention without a weight of its own, as x-transformers and vit-pytorch have it."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class CoredAttention(nn.Module):
    def __init__(self, cores=1):
        super().__init__()
        self.heads, self.to_qkv, self.to_out = 2, nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.attend = Attend()
        if cores > 1:
            self.attend_again = Attend()

    def forward(self, x):
        q, k, v = self.to_qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        out = self.attend(q, k, v)
        out = self.attend_again(out, k, v) if hasattr(self, "attend_again") else out
        return self.to_out(out.transpose(1, 2).flatten(2))


class GatedUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 48)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, -1)
        return x * F.gelu(gate)


class NestedFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff = nn.Sequential(GatedUnit(), nn.Dropout(0.0), nn.Linear(24, 8))

    def forward(self, x):
        return self.ff(x)


class Sublayers(nn.Module):
    """x-transformers' way: every sublayer is a list of a norm and what is added."""

    def __init__(self):
        super().__init__()
        kinds = [CoredAttention, NestedFeedForward] * 2
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), kind()]) for kind in kinds)

    def forward(self, x):
        for norm, part in self.layers:
            x = x + part(norm(x))
        return x


def test_attention_is_what_has_the_projections_and_not_the_core_that_it_hands_them_to():
    sites = find_sites(Sublayers())
    assert [site.name for site in sites.attentions] == ["layers.0.1", "layers.2.1"]
    assert all(site.projections.packed and site.heads == 2 for site in sites.attentions)
    assert [(mlp.name, mlp.last) for mlp in sites.mlps] == [(f"layers.{i}.1", sites.mlps[i // 2].last) for i in (1, 3)]
    assert [type(mlp.firsts[0]) for mlp in sites.mlps] == [nn.Linear, nn.Linear]


def test_two_cores_of_one_attention_stay_two_sites():
    model = nn.Sequential(CoredAttention(cores=2), CoredAttention(cores=2))
    assert [site.name for site in find_sites(model).attentions] == [
        f"{i}.{core}" for i in (0, 1) for core in ("attend", "attend_again")
    ]


@pytest.mark.parametrize("recipe", ["explicit(v=1, ff=1)", "dropconnect(0.5)", "dropkey(0.5)", "droppath(0.5)", "cb"])
def test_what_needs_projections_finds_them_round_the_core(recipe):
    model = Sublayers().train()
    x = torch.randn(2, 5, 8)
    plain = model(x)
    tempered = attemper.apply(model, recipe)
    out = model(x)
    if recipe.startswith("explicit"):
        assert {row.component for row in tempered.penalties()} == {"v", "ff1", "ff2"}
    else:
        assert not torch.allclose(out, plain)


class Stage(nn.Module):
    """Lists blocks, and has a part with an MLP of its own before them."""

    def __init__(self, depth):
        super().__init__()
        self.downsample = nn.Sequential()
        self.downsample.add_module("part", NestedFeedForward())
        self.reduce = nn.Module()
        self.reduce.mlp = NestedFeedForward()
        self.blocks = nn.Sequential(*(NestedFeedForward() for _ in range(depth)))


def test_a_stage_is_no_block():
    model = nn.Sequential(Stage(1), Stage(2))
    assert [block.name for block in find_sites(model).blocks] == [
        "0.downsample.part", "0.reduce", "0.blocks.0", "1.downsample.part", "1.reduce", "1.blocks.0", "1.blocks.1",
    ]  # fmt: skip
