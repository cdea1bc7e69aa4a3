"""A call that is a part of a larger one (`attention(…, at=Offsets(…))`): it drops what the larger one drops there."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attemper
from attemper.errors import ParameterError
from attemper.methods import (
    Blur,
    DropAttention,
    DropConnect,
    DropHead,
    DropKey,
    DropPath,
    FeedForwardDropout,
    HardMask,
    LayerDrop,
)  # fmt: skip
from attemper.methods.kinds import Tokens
from attemper.ops.perturbation import Perturbation, WeightDropout
from attemper.ops.stream import Offsets, Stream

SHAPE = SAMPLES, HEADS, QUERIES, KEYS = 4, 6, 7, 13


def learnt(method: Perturbation) -> Perturbation:
    """With a rate of its own for every head, or for the block."""
    value = torch.linspace(-0.1, 0.05, HEADS if method.each == "head" else 1)
    return method.with_value(value)


WHOLE_ROWS: dict[str, Perturbation] = {
    "dropkey(share=queries)": DropKey(0.5, share="queries"),
    "dropkey(share=heads)": DropKey(0.43, share="heads"),
    "dropkey(structure=block)": DropKey(0.5, structure="block", grid=(3, 4), prefix=1),
    "dropkey(structure=cross, share=heads)": DropKey(0.4, structure="cross", share="heads", grid=(3, 4), prefix=1),
    "dropkey(learn)": learnt(DropKey("learn")),
    "dropkey(learn, each=head)": learnt(DropKey("learn", each="head")),
    "dropattention(unit=column)": DropAttention(0.4, unit="column", rescale="normalize"),
    "dropattention(unit=column, w=3)": DropAttention(0.4, unit="column", w=3, rescale="normalize"),
    "dropattention(rescale=inverted)": DropAttention(0.4, rescale="inverted"),
    "dropattention(detach=true)": DropAttention(0.4, detach=True, rescale="normalize"),
    "dropattention(learn, unit=column)": learnt(DropAttention("learn", unit="column", rescale="normalize")),
    "hardmask": HardMask(0.5, k=4),
    "hardmask(share=heads)": HardMask(0.5, k=4, share="heads", fill="neg_inf"),
    "hardmask(learn, share=heads)": learnt(HardMask("learn", k=4, share="heads", each="head")),
    "blur": Blur(1.5),
    "a model's own dropout": WeightDropout(0.4),
}
SINGLE_KEYS: dict[str, Perturbation] = {
    "dropkey": DropKey(0.4),
    "dropattention": DropAttention(0.4, rescale="normalize"),
    "drophead": DropHead(0.5),
}
CALLS = {**WHOLE_ROWS, **SINGLE_KEYS}


@functools.cache
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    sizes = ((QUERIES, 8), (KEYS, 8), (KEYS, 5))
    q, k, v = (torch.randn(SAMPLES, HEADS, *size, generator=draw, dtype=torch.float64) for size in sizes)
    return q, k, v


def whole_call(method: Perturbation, seed: int, causal: bool) -> Tensor:
    return attemper.attention(*inputs(), methods=[DropHead(0.1), method], seed=seed, is_causal=causal, impl="reference")


@st.composite
def parts(draw: st.DrawFn) -> tuple[Offsets, tuple[slice, ...]]:
    """A part of the samples, heads and queries of a call."""
    first = [draw(st.integers(0, n - 1)) for n in SHAPE[:3]]
    many = [draw(st.integers(1, n - begin)) for n, begin in zip(SHAPE, first, strict=False)]
    return Offsets(*first, heads=HEADS), tuple(slice(a, a + n) for a, n in zip(first, many, strict=True))


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=8, deadline=None)
@given(part=parts(), seed=st.integers(0, 3), causal=st.booleans())
def test_a_part_of_the_samples_heads_and_queries_is_a_part_of_the_call(name, part, seed, causal):
    at, (samples, heads, queries) = part
    q, k, v = inputs()
    given = attemper.attention(
        q[samples, heads, queries], k[samples, heads], v[samples, heads], methods=[DropHead(0.1), CALLS[name]],
        seed=seed, is_causal=causal, at=at,
    )  # fmt: skip
    wanted = whole_call(CALLS[name], seed, causal)[samples, heads, queries]
    torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["dropkey", "dropattention"])
@settings(max_examples=10, deadline=None)
@given(first=st.integers(1, KEYS - 1), seed=st.integers(0, 3), at=parts())
def test_a_part_of_the_keys_is_a_part_of_the_call(name, first, seed, at):
    """What a part keeps, seen through values that are unit vectors, is what the whole call keeps of its keys."""
    q = torch.zeros(SAMPLES, HEADS, QUERIES, 8)
    k, v = torch.zeros(SAMPLES, HEADS, KEYS, 8), torch.eye(KEYS).expand(SAMPLES, HEADS, -1, -1)
    whole = attemper.attention(q, k, v, methods=[CALLS[name]], seed=seed, impl="reference") > 0
    part = attemper.attention(
        q, k[:, :, first:], v[:, :, first:], methods=[CALLS[name]], seed=seed, at=Offsets(key=first), impl="reference"
    )
    lost = ~whole[..., first:].any(-1)
    assert torch.equal((part > 0)[..., first:][~lost], whole[..., first:][~lost])


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_what_needs_whole_rows_refuses_a_part_of_the_keys(name):
    q, k, v = inputs()
    with pytest.raises(ParameterError, match=r"needs whole rows of keys.*has the keys 5 to 12 of"):
        attemper.attention(q, k[:, :, 5:], v[:, :, 5:], methods=[CALLS[name]], seed=1, at=Offsets(key=5))


def test_parts_that_make_no_sense_are_refused():
    q, k, v = inputs()
    with pytest.raises(ParameterError, match="at= needs a seed"):
        attemper.attention(q, k, v, methods=[DropKey(0.1)], at=Offsets(sample=1))
    for at in (Offsets(sample=-1), Offsets(query=1.5), Offsets(head=True), Offsets(key=2**31)):
        with pytest.raises(ParameterError, match=r"at\.\w+ must be"):
            attemper.attention(q, k, v, methods=[DropKey(0.1)], seed=1, at=at)
    with pytest.raises(ParameterError, match=r"at\.heads is 6, and this call has the heads 1 to 6"):
        attemper.attention(q, k, v, methods=[DropKey(0.1)], seed=1, at=Offsets(head=1, heads=6))
    with pytest.raises(ParameterError, match="must say how many there are"):
        attemper.attention(q, k, v, methods=[DropHead(0.1)], seed=1, at=Offsets(head=1))


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_causal_numbers_are_those_of_the_larger_call(impl):
    q, k, v = inputs()
    keys = slice(None, QUERIES)
    whole = attemper.attention(q, k[:, :, keys], v[:, :, keys], is_causal=True, methods=[DropHead(0.3)], seed=2)
    for first in range(QUERIES):
        given = attemper.attention(
            q[:, :, first:], k[:, :, keys], v[:, :, keys], is_causal=True, methods=[DropHead(0.3)], seed=2,
            at=Offsets(query=first), impl=impl,
        )  # fmt: skip
        torch.testing.assert_close(given, whole[:, :, first:], rtol=1e-10, atol=1e-12)


def test_queries_that_come_before_all_keys_see_nothing():
    q, k, v = inputs()
    given = attemper.attention(q, k, v, is_causal=True, methods=[DropHead(0.0)], seed=2, at=Offsets(query=2, key=4))
    assert not given[:, :, :2].any()
    assert (given[:, :, 2:] != 0).all()


# Methods outside of attention.


def stream(at: Offsets) -> Stream:
    return Stream(torch.tensor(4), 1, site=-77, call=3, at=at)


@settings(max_examples=20, deadline=None)
@given(part=parts(), channel=st.integers(0, KEYS - 1))
def test_methods_on_tokens_branches_blocks_and_weights_act_on_parts(part, channel):
    at, (samples, _, tokens) = part
    here = stream(at._replace(key=channel))
    x = inputs()[1][:, 0, :QUERIES]  # (samples, tokens, channels)
    channels = slice(min(channel, x.shape[2] - 1), None)
    x_here, here = x[samples, tokens, channels], here.placed(at._replace(key=channels.start))
    everywhere = stream(Offsets())

    def equal(given: Tensor, whole: Tensor) -> bool:
        return torch.equal(given, whole[samples, tokens, channels])

    of_all = Tokens(None, None)
    assert equal(
        FeedForwardDropout(0.5).map_tokens(x_here, of_all, here),
        FeedForwardDropout(0.5).map_tokens(x, of_all, everywhere),
    )
    assert equal(DropPath(0.5).map_branch(x_here, here), DropPath(0.5).map_branch(x, everywhere))
    assert equal(LayerDrop(0.5).map_block(-x_here, x_here, here), LayerDrop(0.5).map_block(-x, x, everywhere))
    weight = x[0]
    of_rows = stream(Offsets(3, 2, tokens.start, channels.start))
    given = DropConnect(0.5).map_weight(weight[tokens, channels], of_rows)
    assert torch.equal(given, DropConnect(0.5).map_weight(weight, everywhere)[tokens, channels])


def test_all_parts_together_are_the_call():
    q, k, v = inputs()
    methods = [DropKey(0.3), DropHead(0.4), HardMask(0.5, k=3, share="heads")]
    rows = []
    for sample in (0, 2):
        samples = slice(sample, sample + 2)
        heads = []
        for head in (0, 3):
            places = samples, slice(head, head + 3)
            at = Offsets(sample, head, heads=HEADS)
            heads.append(attemper.attention(*(x[places] for x in (q, k, v)), methods=methods, seed=6, at=at))
        rows.append(torch.cat(heads, 1))
    whole = attemper.attention(q, k, v, methods=methods, seed=6)
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-10, atol=1e-12)
