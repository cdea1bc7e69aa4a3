"""Calls that are a part of a larger one, in Triton's interpreter; run by `test_triton.py` with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper.kernels.attention.prepare import TAIL, drop_table
from attemper.methods import Blur, DropHead, DropKey, HardMask
from attemper.ops.perturbation import Perturbation
from attemper.ops.stream import Offsets, Stream, column_words, site_word, stream_words, threshold

METHODS = {
    "dropkey": [DropKey(0.5)],
    "dropkey(share=queries)": [DropKey(0.5, share="queries")],
    "dropkey(share=heads)": [DropKey(0.5, share="heads")],
    "hardmask": [HardMask(0.5, k=4)],
    "hardmask(share=heads, fill=neg_inf)": [HardMask(0.5, k=4, fill="neg_inf", share="heads")],
    "dropkey + hardmask + drophead + blur": [DropKey(0.3), HardMask(0.5, k=4), DropHead(0.4), Blur(2.0)],
}


@pytest.mark.parametrize("name", METHODS)
def test_a_part_of_a_call_equals_the_part_of_the_whole_call(name: str) -> None:
    q, k, v = (torch.randn(3, 4, tokens, 16) for tokens in (37, 21, 21))
    methods: list[Perturbation] = METHODS[name]
    impl = "gather" if "share" in name and "dropkey" in name else "triton"
    whole = attemper.attention(q, k, v, methods=methods, seed=9, impl="reference")
    for at, many in ((Offsets(1, 2, 16, 0, 4), (2, 2, 21)), (Offsets(2, 1, 5, 0, 4), (1, 3, 7))):
        samples, heads, queries = (slice(first, first + n) for first, n in zip(at, many, strict=False))
        parts = q[samples, heads, queries], k[samples, heads], v[samples, heads]
        given = attemper.attention(*parts, methods=methods, seed=9, at=at, impl=impl)
        torch.testing.assert_close(given, whole[samples, heads, queries], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_causal_queries_and_keys_are_numbered_as_in_the_whole_call(masked: bool) -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    bias = torch.randn(40, 40) if masked else None
    whole = attemper.attention(q, k, v, attn_mask=bias, is_causal=True, methods=[DropKey(0.3)], seed=9)
    for first in (3, 24):
        at, rows = Offsets(query=first), slice(first, first + 16)
        bias_of_rows = None if bias is None else bias[rows]
        part = attemper.attention(
            q[:, :, rows], k, v, attn_mask=bias_of_rows, is_causal=True, methods=[DropKey(0.3)], seed=9, at=at,
            impl="triton",
        )  # fmt: skip
        torch.testing.assert_close(part, whole[:, :, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("site", "call", "lane"), [("", 0, 0), ("blocks.0.attn", 1, 2), ("blocks.11.attn", 300, 255)])
@pytest.mark.parametrize("seed", [5, -1, 2**63 - 1, -(2**40) - 17])
def test_tables_have_the_words_of_the_stream(seed: int, site: str, call: int, lane: int) -> None:
    at, limit = Offsets(7, 5, 3, 11), threshold(0.3)
    stream = Stream(torch.tensor(seed), lane, site=site_word(site), call=call, at=at)
    rows, columns = stream_words(torch.tensor(seed), lane, site_word(site), call)
    table = drop_table(stream, limit, 150)
    assert table.shape == (150 + TAIL,)
    assert torch.equal(table[:150], column_words(columns, 150, 11, table.device))
    assert table[150:].tolist() == [rows.a, limit, 0, rows.b, 7, 5, 3]


def test_new_sites_calls_and_places_need_no_new_graph() -> None:
    q, k, v = (torch.randn(1, 2, 17, 16) for _ in range(3))
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(seed: Tensor, sample: int, head: int, query: int) -> Tensor:
        at = Offsets(sample, head, query)
        return attemper.attention(q, k, v, methods=[DropKey(0.5)], seed=seed, at=at, impl="triton")

    for i in range(5):
        seed, numbers = torch.tensor(i), (3 * i + 2, 5 * i + 2, 7 * i + 2)
        eager = attemper.attention(q, k, v, methods=[DropKey(0.5)], seed=seed, at=Offsets(*numbers), impl="triton")
        assert torch.equal(compiled(seed, *numbers), eager)
    assert graphs <= 2
