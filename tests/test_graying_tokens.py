"""Token graying on tokens: padding neither counts nor changes, and causal models are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import attemper
from attemper.errors import ConflictError, UnmetError
from attemper.methods import TokenGraying
from attemper.methods.kinds import Tokens
from grays import randn


@pytest.mark.parametrize("kind", ["dct", "svd"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_neither_counts_nor_changes(kind, side):
    method = TokenGraying(kind, where="tokens")
    x, lengths, tokens = randn(4, 9, 6), (9, 5, 1, 3), 9
    real = torch.stack([torch.arange(tokens) < length for length in lengths])
    real = real.flip(1) if side == "left" else real
    out = method.gray(x, real)
    for sample, length in enumerate(lengths):
        alone = method.gray(x[sample, real[sample]][None])[0]
        torch.testing.assert_close(out[sample, real[sample]], alone, atol=1e-9, rtol=1e-9)
        assert torch.equal(out[sample, ~real[sample]], x[sample, ~real[sample]])
        assert len(alone) == length


def test_no_padding_is_the_same_as_all_tokens_real():
    x = randn(3, 8, 5)
    for kind in ("dct", "svd"):
        method = TokenGraying(kind, where="tokens")
        torch.testing.assert_close(method.gray(x, torch.ones(3, 8, dtype=torch.bool)), method.gray(x))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["dct", "svd"])
def test_ids_of_padding_do_not_move_real_tokens_of_bert(kind, implementation):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        attn_implementation=implementation,
    )  # fmt: skip
    model = BertModel(config).eval()
    attemper.apply(model, f"graying({kind}, where=tokens)")
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    ids = torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 10]])
    first = model(ids, attention_mask=mask).last_hidden_state
    ids[0, 3:] = torch.tensor([41, 17])
    second = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(first[mask.bool()], second[mask.bool()], atol=1e-6, rtol=0)
    alone = model(ids[:1, :3]).last_hidden_state
    torch.testing.assert_close(second[0, :3], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_of_torchs_encoder_is_kept_out(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    attemper.apply(model, "graying(svd, where=tokens)")
    x, hidden = randn(2, 6, 16, dtype=torch.float32), torch.arange(6) >= torch.tensor([[4], [6]])

    def run(x):
        out = model(x if batch_first else x.transpose(0, 1), src_key_padding_mask=hidden)
        return out if batch_first else out.transpose(0, 1)

    first = run(x)
    x[0, 4:] += 3.0
    torch.testing.assert_close(run(x)[~hidden], first[~hidden], atol=1e-6, rtol=0)


class Block(nn.Module):
    """A block that is told of padding in a way that no argument shows."""

    def __init__(self, width=12):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)
        self.hidden = None

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        mask = None if self.hidden is None else ~self.hidden[:, None, None]
        out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask)
        x = x + self.proj(out.squeeze(1))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def test_padding_that_no_argument_tells_of_is_an_error_and_not_a_leak():
    model = nn.Sequential(Block(), Block()).eval()
    attemper.apply(model, "graying(svd, where=tokens)", targets=["0", "1"])
    x = randn(2, 5, 12, dtype=torch.float32)
    model(x)
    model[0].hidden = torch.arange(5) >= torch.tensor([[3], [5]])
    with pytest.raises(ConflictError, match="graying acts before it, where that padding is not known"):
        model(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"padding is not known|ConflictError"):
        torch.compile(model, backend="eager")(x)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("training", [True, False])
def test_causal_models_refuse_it_in_both_modes(implementation, training, monkeypatch):
    model = GPT2Model(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=2, attn_implementation=implementation))
    model.train(training)
    with pytest.raises(ConflictError, match="graying cannot act in this block"):
        attemper.apply(model, "graying(where=tokens)")
    monkeypatch.setattr("attemper.tempering.trial.MOST_WEIGHTS", 0)  # larger models are refused when they run
    attemper.apply(model, "graying(where=tokens)")
    with pytest.raises(ConflictError, match="graying cannot act in this block"):
        model(torch.tensor([[3, 4, 5, 6]]))


@pytest.mark.parametrize("recipe", ["graying(where=tokens)", "cb"])
def test_a_mask_that_hides_tokens_behind_batches_that_were_only_padded_is_refused_too(recipe):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train()
    attemper.apply(model, recipe)
    x, hidden = randn(2, 5, 16, dtype=torch.float32), torch.arange(5) >= torch.tensor([[3], [5]])
    model(x, src_key_padding_mask=hidden)
    with pytest.raises(ConflictError, match="cannot act in this block"):
        model(x, mask=torch.ones(5, 5, dtype=torch.bool).tril(-2), src_key_padding_mask=hidden)


# ------------------------------------------------------------------------------------------ what blocks are called with
class Map(nn.Module):
    """A block on feature maps; `last`: whether their channels are the last axis."""

    def __init__(self, last: bool):
        super().__init__()
        self.last, self.attn = last, nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        tokens = x.flatten(1, 2) if self.last else x.flatten(2).mT
        out = self.attn(tokens, tokens, tokens, need_weights=False)[0]
        return x + (out if self.last else out.mT).reshape(x.shape)


@pytest.mark.parametrize("last", [True, False])
def test_the_channels_of_a_feature_map_are_told_by_their_number(last):
    torch.manual_seed(0)
    model, x = nn.Sequential(Map(last)), torch.randn(2, 5, 6, 8)
    x = x if last else x.permute(0, 3, 1, 2).contiguous()
    tokens = x.flatten(1, 2) if last else x.flatten(2).mT
    grayed = TokenGraying(where="tokens", eps=0.5).map_tokens(tokens, Tokens(None), None)
    expected = model(grayed.reshape(x.shape) if last else grayed.mT.reshape(x.shape))
    attemper.apply(model, "graying(where=tokens, eps=0.5)")
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("shape", [(2, 8, 6, 8), (2, 5, 6, 7)])
def test_a_feature_map_whose_channels_cannot_be_told_is_refused(shape):
    model = nn.Sequential(Map(True))
    attemper.apply(model, "graying(where=tokens, eps=0.5)")
    with pytest.raises(UnmetError, match=r"which axis has their 8 channels cannot be told"):
        model(torch.randn(shape))


class Named(nn.Module):
    """Blocks that are called with names, or with something else than a tensor first."""

    def __init__(self, listed: bool):
        super().__init__()
        self.listed, self.layers = (
            listed,
            nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in "ab"),
        )
        if listed:
            for layer in self.layers:
                layer.__class__ = OfHistory

    def forward(self, x):
        for layer in self.layers:
            x = layer([x]) if self.listed else layer(src=x)
        return x


class OfHistory(nn.TransformerEncoderLayer):
    def forward(self, history):
        return super().forward(history[-1])


def test_blocks_that_are_called_by_name_are_grayed():
    model, x = Named(False).train(), torch.randn(2, 5, 8)
    expected = model(TokenGraying(where="tokens", eps=0.5).map_tokens(x, Tokens(None), None))
    attemper.apply(model, "graying(where=tokens, eps=0.5)")
    torch.testing.assert_close(model(x), expected)


def test_a_block_that_gets_a_list_is_refused():
    model = Named(True)
    attemper.apply(model, "graying(where=tokens, eps=0.5)")
    with pytest.raises(UnmetError, match=r"its first argument is no tensor \(list\)"):
        model(torch.randn(2, 5, 8))
