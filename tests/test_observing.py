"""A penalty only observes: with it alone, a module computes what it would compute anyway, to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attemper
from attemper.errors import UnsupportedError

PENALTIES = "explicit(q=1, k=1, v=1) + arora(q=1, v=1)"


def run(module, *args, seed=0, **kwargs):
    torch.manual_seed(seed)
    out, weights = module(*args, **kwargs)
    return out.detach(), weights, torch.get_rng_state()


@settings(max_examples=80, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 3]),
    width=st.sampled_from([1, 5, 8, 24]),
    tokens=st.integers(1, 33),
    keys=st.integers(1, 33),
    batch=st.integers(1, 3),
    inputs=st.sampled_from(["self", "cross", "three"]),
    mask=st.sampled_from([None, "bool", "additive", "per head", "causal"]),
    padding=st.booleans(),
    need_weights=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "bias": st.booleans(),
            "add_bias_kv": st.booleans(),
            "add_zero_attn": st.booleans(),
            "dropout": st.sampled_from([0.0, 0.3]),
            "batch_first": st.booleans(),
            "dtype": st.sampled_from([torch.float32, torch.float64]),
        }
    ),
)
def test_multihead_attention_computes_the_same_bits(
    heads, width, tokens, keys, batch, inputs, mask, padding, need_weights, options
):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(heads * width, heads, **options)
    keys = tokens if inputs == "self" else keys
    x, y, z = (torch.randn(batch, n, heads * width, dtype=options["dtype"]) for n in (tokens, keys, keys))
    args = {"self": (x, x, x), "cross": (x, y, y), "three": (x, y, z)}[inputs]
    if not options["batch_first"]:
        shared = {id(t): t.transpose(0, 1).contiguous() for t in (x, y, z)}
        args = tuple(shared[id(t)] for t in args)
    extra = options["add_bias_kv"] or options["add_zero_attn"]
    kwargs = {"need_weights": need_weights}
    if mask == "causal" and tokens == keys and not extra:
        kwargs |= {"attn_mask": nn.Transformer.generate_square_subsequent_mask(tokens, dtype=x.dtype)}
        kwargs |= {"is_causal": not need_weights}
    elif mask in ("bool", "additive", "per head"):
        shape = (batch * heads, tokens, keys) if mask == "per head" else (tokens, keys)
        hidden = torch.rand(shape) < 0.3
        hidden[..., 0] = False
        kwargs["attn_mask"] = hidden if mask == "bool" else torch.randn(shape, dtype=x.dtype)
    if padding:
        hidden = torch.arange(keys) >= torch.randint(1, keys + 1, (batch, 1))
        float_mask = "attn_mask" in kwargs and kwargs["attn_mask"].dtype != torch.bool
        kwargs["key_padding_mask"] = (
            torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, -torch.inf) if (float_mask) else hidden
        )
    expected = run(module, *args, **kwargs)
    tempered = attemper.apply(module, PENALTIES)
    given = run(module, *args, **kwargs)
    assert torch.equal(given[0], expected[0])
    assert need_weights == (given[1] is not None)
    assert not need_weights or torch.equal(given[1], expected[1])
    assert torch.equal(given[2], expected[2]), "a penalty draws nothing"
    assert tempered.penalty() > 0


class Fused(nn.Module):
    """Attention through the fused call, with its own dropout and grouped heads where asked for."""

    def __init__(self, dropout, groups):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 24 // groups), nn.Linear(24, 24 // groups)
        self.proj = nn.Linear(24, 24)
        self.dropout, self.groups = dropout, groups

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = (part(x).unflatten(-1, (4 // self.groups, 6)).transpose(1, 2) for part in (self.k, self.v))
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=self.groups > 1)
        return self.proj(out.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_fused_call_computes_the_same_bits_with_the_models_own_dropout_too(dropout, groups):
    torch.manual_seed(0)
    module, x = Fused(dropout, groups), torch.randn(3, 11, 24)
    expected = run(module, x)
    tempered = attemper.apply(module, PENALTIES, targets=[""])
    given = run(module, x)
    assert torch.equal(given[0], expected[0])
    assert torch.equal(given[2], expected[2])
    assert tempered.penalty() > 0


def test_an_implementation_that_is_asked_for_is_obeyed_or_refused_where_penalties_only_observe():
    module, x = nn.MultiheadAttention(24, 2, batch_first=True), torch.randn(2, 5, 24)
    attemper.apply(module, PENALTIES, impl="triton")
    with pytest.raises(UnsupportedError, match="impl='triton' gives no attention weights"):
        module(x, x, x)
    with pytest.raises(UnsupportedError, match="impl='triton' cannot serve this call"):
        module(x, x, x, need_weights=False)
