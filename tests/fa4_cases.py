"""impl="fa4" without its GPU: the words in Triton's interpreter, and plain torch in the place of the two kernels.

`test_fa4.py` runs this file with TRITON_INTERPRET=1. The kernels here read the buffer of words as `mods.py` does, so
what is tested is everything round them: words, lanes, methods outside of softmax, autograd, compilers.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attemper
from attemper.methods import Blur, DropHead, DropKey
from attemper.ops import fa4
from attemper.ops.fa4.library import Source, backward_source, forward_source
from attemper.ops.fa4.tables import HEADER, call_words, layout_of
from attemper.ops.perturbation import Perturbation, rescue
from attemper.ops.stream import MASK, QUERY_STEP, column_words, keep_mask, mix, stream_words, threshold


def weights(q: Tensor, k: Tensor, words: Tensor | None, scale: float, causal: bool, source: Source) -> Tensor:
    shape = (*q.shape[:3], k.shape[2])
    logits = (q.double() * scale) @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if words is not None:
        dropped = rows(words, shape, source) * columns(words, shape[3], source) < words[0]
        logits = logits.masked_fill(dropped, -torch.inf)
    if causal:
        logits = logits.masked_fill(~torch.ones(shape[2:], dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1)


def rows(words: Tensor, shape: tuple[int, int, int, int], source: Source) -> Tensor:
    layout = layout_of(*shape)
    if source.rows == "table":
        return words[layout.rows :][: math.prod(shape[:3])].view(*shape[:3], 1)
    heads = words[layout.heads : layout.rows].long().view(*shape[:2], 1, 1)
    steps = torch.arange(shape[2]).view(-1, 1) * QUERY_STEP
    return (mix((heads + steps) & MASK) | 1).to(torch.int32)


def columns(words: Tensor, keys: int, source: Source) -> Tensor:
    if source.columns == "table":
        return words[HEADER : HEADER + keys]
    return column_words(words[1].long() & MASK, keys).to(torch.int32)


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    words, scale, causal = rest
    given = weights(q, k, words, scale, causal, forward_source(causal))
    out = given @ v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return token_major(out.to(q.dtype)), torch.zeros(q.shape[:3], dtype=torch.int32)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, *rest: object) -> list[Tensor]:
    words, scale, causal, _ = rest
    source, group = backward_source(q.shape[1], k.shape[1], k.shape[2], causal), q.shape[1] // k.shape[1]
    given = weights(q, k, words, scale, causal, source)
    dweights = dout.double() @ v.double().repeat_interleave(group, 1).mT
    dlogits = given * (dweights - (given * dweights).sum(-1, keepdim=True)) * scale
    dq = dlogits @ k.double().repeat_interleave(group, 1)
    dk, dv = dlogits.mT @ q.double(), given.mT @ dout.double()
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
    return [token_major(t.to(q.dtype)) for t in (dq, dk, dv)]


def token_major(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


torch.library.impl("attemper::fa4_attention", "CPU", forward)
torch.library.impl("attemper::fa4_attention_backward", "CPU", backward)


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "_refuse_device", lambda call: None)


def make(heads: int = 4, kv_heads: int = 4, tokens: int = 33, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(2, h, tokens, 32, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("p", "keys"), [(0.0, 9), (0.1, 41), (0.5, 3)])
@pytest.mark.parametrize("seed", [5, -123456789012345])
def test_words_are_those_of_keep_mask_and_no_row_loses_all_of_its_keys(
    seed: int, p: float, keys: int, causal: bool
) -> None:
    shape = (2, 3, keys if causal else 29, keys)
    words, layout = call_words(torch.tensor(seed), threshold(p), 1, shape, causal), layout_of(*shape)
    columns = words[HEADER : HEADER + keys]
    rows = words[layout.rows :][: 6 * shape[2]].view(*shape[:3], 1)
    allowed = torch.ones(shape[2:], dtype=torch.bool).tril() if causal else torch.ones(shape[2:], dtype=torch.bool)
    assert words.numel() == layout.size
    assert torch.equal(columns, column_words(stream_words(torch.tensor(seed), 1)[1], keys).to(torch.int32))
    wanted = rescue(keep_mask(seed, shape, p, lane=1), allowed)
    assert torch.equal((rows * columns >= words[0]) & allowed, wanted & allowed)


def test_a_limit_on_the_device_gives_the_same_words() -> None:
    seed, shape = torch.tensor(8), (1, 2, 20, 30)
    limit = torch.tensor(threshold(0.3), dtype=torch.int32)
    assert torch.equal(call_words(seed, limit, 0, shape, True), call_words(seed, threshold(0.3), 0, shape, True))


@pytest.mark.parametrize(
    "methods",
    [[DropKey(0.3)], [Blur(), DropKey(0.5)], [DropKey(0.1), DropHead(0.3)], [DropHead(0.3), DropKey(0.5)], []],
)
@pytest.mark.parametrize(("causal", "kv_heads", "tokens"), [(False, 2, 3), (False, 4, 130), (True, 4, 130)])
def test_the_same_as_the_reference(methods: list[Perturbation], causal: bool, kv_heads: int, tokens: int) -> None:
    qkv = make(kv_heads=kv_heads, tokens=tokens)
    results = []
    for impl in ("fa4", "reference"):
        out = attemper.attention(*qkv, methods=methods, is_causal=causal, seed=3, impl=impl)
        results.append((out, *torch.autograd.grad(out, qkv, torch.ones_like(out))))
    for given, wanted in zip(*results, strict=True):
        assert (given - wanted).float().norm() <= 2e-2 * wanted.float().norm() + 1e-3


def test_unseeded_calls_draw_anew() -> None:
    qkv = make()
    out = [attemper.attention(*qkv, methods=[DropKey(0.3)], impl="fa4") for _ in range(2)]
    assert not torch.equal(*out)


def test_compiles_in_one_graph_with_the_same_masks() -> None:
    qkv = make()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.3)], impl="fa4")

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(4)
        out = function(*qkv)
        results.append((out, *torch.autograd.grad(out, qkv, torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_opcheck() -> None:
    seed, (q, k, v) = torch.tensor(5), make()
    words = call_words(seed, 0, 0, (2, 4, 33, 33), False)
    torch.library.opcheck(torch.ops.attemper.fa4_words, (seed, None, 0, 0, 2, 4, 33, 33, True))
    torch.library.opcheck(torch.ops.attemper.fa4_attention, (q, k, v, words, 0.25, False))
    torch.library.opcheck(torch.ops.attemper.fa4_attention, (q, k, v, None, 0.25, True))


def test_autocast_computes_in_its_dtype() -> None:
    qkv = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attemper.attention(*qkv, methods=[DropKey(0.3)], impl="fa4")
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), qkv[0])[0].dtype == torch.float32


def test_deterministic_gradients_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward = torch.ops.attemper.fa4_attention_backward

    def listen(*arguments: object) -> object:
        asked.append(arguments[-1])
        return backward(*arguments)

    monkeypatch.setattr(torch.ops.attemper, "fa4_attention_backward", listen)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            qkv = make()
            out = attemper.attention(*qkv, methods=[DropKey(0.3)], impl="fa4")
            torch.autograd.grad(out, qkv, torch.ones_like(out))
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


def test_second_derivatives_are_refused() -> None:
    qkv = make()
    out = attemper.attention(*qkv, methods=[DropKey(0.3)], impl="fa4")
    (dq,) = torch.autograd.grad(out.sum(), qkv[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="reference"):
        dq.sum().backward()
