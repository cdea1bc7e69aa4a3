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
    tempered = attemper.apply(model, "cb")
    with pytest.raises(ConflictError, match=r"'decoder\.block\.0.* hides some tokens from others"):
        model(input_ids=ids, decoder_input_ids=ids)
    tempered.remove()
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
    attemper.apply(model, "cb")
    with pytest.raises(ConflictError, match=r"'layers\.0' is causal"):
        model(torch.randn(2, 5, 8))


def test_padding_is_told_by_the_attention_before_a_feed_forward_network():
    model = Alternating(causal=False).train()
    attemper.apply(model, "cb")
    x = torch.randn(2, 5, 8)
    real = torch.tensor([3, 5])[:, None] > torch.arange(5)
    mask = real[:, None, None]
    noisy = torch.where(real[..., None], x, torch.randn_like(x) * 9)
    first, second = model(x, mask), model(noisy, mask)
    torch.testing.assert_close(first[real], second[real])
