"""impl="fa4" without its GPU: the words in Triton's interpreter, and plain torch in the place of the two kernels.

`test_fa4.py` runs this file with TRITON_INTERPRET=1. The kernels here read the buffer of words as the real ones do, so
what is tested is everything round them: words, lanes, methods outside of softmax, autograd, compilers.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attemper
from attemper.kernels.attention.prepare import drop_table, row_cuts
from attemper.kernels.fa4.mixed import restated
from attemper.kernels.fa4.tables import HEADER, call_words, layout_of
from attemper.kernels.implementations import fa4
from attemper.methods import Blur, DropHead, DropKey, HardMask
from attemper.ops.perturbation import Perturbation, rescue
from attemper.ops.stream import NOWHERE, Offsets, Stream, column_words, keep_mask, site_word, threshold


def logits_of(q: Tensor, k: Tensor) -> Tensor:
    return q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def hits(q: Tensor, k: Tensor, words: Tensor) -> Tensor:
    shape = (*q.shape[:3], k.shape[2])
    layout, count = layout_of(*shape, hard=True), math.prod(shape[:3])
    rows = words[layout.rows :][:count].view(*shape[:3], 1)
    lows = words[layout.lows :][:count].view(*shape[:3], 1).view(torch.float32)
    return (logits_of(q, k) > lows) & (rows * words[HEADER : HEADER + shape[3]] < words[0])


def weights(
    q: Tensor, k: Tensor, words: Tensor | None, scale: float, causal: bool, fill: str = "none"
) -> Tensor:  # fmt: skip
    shape = (*q.shape[:3], k.shape[2])
    logits = scale * logits_of(q, k)
    if fill != "none":
        logits = logits.masked_fill(hits(q, k, words), 0.0 if fill == "zero" else -torch.inf)
    elif words is not None:
        row_words = words[layout_of(*shape).rows :][: math.prod(shape[:3])].view(*shape[:3], 1)
        dropped = row_words * words[HEADER : HEADER + shape[3]] < words[0]
        logits = logits.masked_fill(dropped, -torch.inf)
    if causal:
        logits = logits.masked_fill(~torch.ones(shape[2:], dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1)


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    words, scale, causal = rest
    given = weights(q, k, words, scale, causal)
    out = given @ v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return token_major(out.to(q.dtype)), torch.zeros(q.shape[:3], dtype=torch.int32)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, *rest: object) -> list[Tensor]:
    words, scale, causal, _, fill = (*rest, "none")[:5]
    given, group = weights(q, k, words, scale, causal, fill), q.shape[1] // k.shape[1]
    dweights = dout.double() @ v.double().repeat_interleave(group, 1).mT
    dlogits = given * (dweights - (given * dweights).sum(-1, keepdim=True)) * scale
    if fill != "none":
        dlogits = dlogits.masked_fill(hits(q, k, words), 0.0)
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
@pytest.mark.parametrize(("seed", "at"), [(5, NOWHERE), (-123456789012345, Offsets(3, 2, 7, 7))])
def test_words_are_those_of_keep_mask_and_no_row_loses_all_of_its_keys(
    seed: int, at: Offsets, p: float, keys: int, causal: bool
) -> None:
    shape = (2, 3, keys if causal else 29, keys)
    stream = Stream(torch.tensor(seed), 1, site=site_word("blocks.3"), call=2, at=at)
    words, layout = call_words(stream, threshold(p), shape, causal), layout_of(*shape)
    columns = words[HEADER : HEADER + keys]
    rows = words[layout.rows :][: 6 * shape[2]].view(*shape[:3], 1)
    allowed = torch.ones(shape[2:], dtype=torch.bool).tril() if causal else torch.ones(shape[2:], dtype=torch.bool)
    assert words.numel() == layout.size
    assert torch.equal(columns, column_words(stream.columns, keys, at.key, columns.device))
    wanted = rescue(keep_mask(seed, shape, p, lane=1, site="blocks.3", call=2, at=at), allowed)
    assert torch.equal((rows * columns >= words[0]) & allowed, wanted & allowed)


def test_a_limit_on_the_device_gives_the_same_words() -> None:
    seed, shape = torch.tensor(8), (1, 2, 20, 30)
    limit = torch.tensor(threshold(0.3), dtype=torch.int32)
    stream = Stream(seed)
    assert torch.equal(call_words(stream, limit, shape, True), call_words(stream, threshold(0.3), shape, True))


@pytest.mark.parametrize(("p", "keys"), [(0.0, 9), (0.1, 41), (0.5, 3)])
def test_what_the_forward_kernel_of_ours_leaves_becomes_the_words_and_log_sum_exp_of_the_call(
    p: float, keys: int
) -> None:
    seed, shape = torch.tensor(-123456789012345), (2, 3, 29, keys)
    q, k = torch.randn(2, 3, 29, 16), torch.randn(2, 3, keys, 16)
    table = drop_table(Stream(seed, 1), threshold(p), keys)
    _, stats = torch.ops.attemper.mixed_attention(q, k, k, table, 0.25)
    words, lse = restated(stats, table, 29, keys)
    assert torch.equal(words, call_words(Stream(seed, 1), threshold(p), shape, False))
    kept = rescue(keep_mask(seed, shape, p, lane=1), None)
    wanted = (0.25 * q @ k.mT).masked_fill(~kept, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse.view(torch.float32), wanted, rtol=1e-5, atol=1e-5)


def test_the_log_sum_exp_of_hard_masking_is_that_of_the_masked_logits() -> None:
    seed, (q, k) = torch.tensor(5), torch.randn(2, 2, 3, 29, 16)
    hard = drop_table(Stream(seed), threshold(0.5), 29)
    cuts = row_cuts(q, k, None, None, None, hard, 0.25, False, 5, False)
    _, stats = torch.ops.attemper.mixed_attention(q, k, k, None, 0.25, cuts, hard, "zero")
    words, lse = restated(stats, hard, 29, 29, cuts, 0.25)
    wanted = (0.25 * logits_of(q, k)).masked_fill(hits(q, k, words), 0.0).logsumexp(-1)
    torch.testing.assert_close(lse.view(torch.float32).double(), wanted, rtol=1e-5, atol=1e-5)
    assert hits(q, k, words).sum() > 100


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "methods",
    [[DropKey(0.3)], [Blur(), DropKey(0.5)], [DropKey(0.1), DropHead(0.3)], [DropHead(0.3), DropKey(0.5)], []],
)
@pytest.mark.parametrize(("causal", "kv_heads", "tokens"), [(False, 2, 3), (False, 4, 130), (True, 4, 130)])
def test_the_same_as_the_reference(
    methods: list[Perturbation], causal: bool, kv_heads: int, tokens: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4, "_mixes", lambda call: mixed and not call.is_causal and len(call.methods) > 0)
    qkv = make(kv_heads=kv_heads, tokens=tokens, dtype=torch.float16 if mixed else torch.bfloat16)
    results = []
    for impl in ("fa4", "reference"):
        out = attemper.attention(*qkv, methods=methods, is_causal=causal, seed=3, impl=impl)
        results.append((out, *torch.autograd.grad(out, qkv, torch.ones_like(out))))
    for given, wanted in zip(*results, strict=True):
        assert (given - wanted).float().norm() <= 2e-2 * wanted.float().norm() + 1e-3


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
@pytest.mark.parametrize(("p", "k", "keys"), [(0.5, 5, 70), (0.9, 3, 3), (0.3, 1, 9)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_hard_masking_is_that_of_the_reference(
    fill: str, p: float, k: int, keys: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4, "is_hopper", lambda device: True)
    qkv = make(kv_heads=kv_heads, tokens=keys, dtype=torch.float16)
    results = []
    for impl in ("fa4", "reference"):
        out = attemper.attention(*qkv, methods=[HardMask(p, k=k, fill=fill)], seed=3, impl=impl)
        results.append((out, *torch.autograd.grad(out, qkv, torch.ones_like(out) + qkv[0].detach())))
    for given, wanted in zip(*results, strict=True):
        assert (given - wanted).float().norm() <= 1e-2 * wanted.float().norm() + 1e-3


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
    words = call_words(Stream(seed), 0, (2, 4, 33, 33), False)
    torch.library.opcheck(torch.ops.attemper.fa4_words, (seed, None, 0, 2, 4, 33, 33, True, 5, 1, 2, 3, 4, 6))
    torch.library.opcheck(torch.ops.attemper.fa4_attention, (q, k, v, words, 0.25, False))
    torch.library.opcheck(torch.ops.attemper.fa4_attention, (q, k, v, None, 0.25, True))
    table = drop_table(Stream(seed), threshold(0.3), 33)
    narrow = make(dtype=torch.float16)
    torch.library.opcheck(torch.ops.attemper.mixed_attention, (*narrow, table, 0.25))
    stats = torch.ops.attemper.mixed_attention(*narrow, table, 0.25)[1]
    torch.library.opcheck(torch.ops.attemper.fa4_restated, (stats, table, 33, 33))
    cuts = row_cuts(*(t.detach() for t in narrow[:2]), None, None, None, table, 0.25, False, 5, False)
    torch.library.opcheck(torch.ops.attemper.mixed_attention, (*narrow, None, 0.25, cuts, table, "zero"))
    stats = torch.ops.attemper.mixed_attention(*narrow, None, 0.25, cuts, table, "zero")[1]
    torch.library.opcheck(torch.ops.attemper.fa4_restated, (stats, table, 33, 33, cuts, 0.25))


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
        asked.append(arguments[9])
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
