"""HardMask in the Triton kernels, in Triton's interpreter. `test_triton.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper.kernels.attention.prepare import drop_table
from attemper.kernels.common import plans as plan
from attemper.methods import Blur, DropHead, DropKey, HardMask
from attemper.methods.hardmask import largest
from attemper.ops.perturbation import Perturbation
from attemper.ops.stream import Stream
from triton_cases import Tensors, assert_close, make

FILLS = ["zero", "neg_inf"]


def check(qkv: Tensors, methods: list[Perturbation], tolerance: float = 2e-6, **options: object) -> None:
    dout = torch.randn(*qkv[0].shape[:3], qkv[2].shape[-1]).to(qkv[0].dtype)
    results = []
    for impl in ("triton", "reference"):
        out = attemper.attention(*qkv, methods=methods, seed=11, impl=impl, **options)
        results.append((out.detach(), *torch.autograd.grad(out, qkv, dout)))
    assert_close(*results, dout, qkv[2], tolerance)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (17, 5), (65, 0.25)])
def test_output_and_gradients_equal_the_reference(tokens: int, k: float, fill: str) -> None:
    tolerance = 1e-5 if tokens == 1 else 2e-6
    check(make(1, 1, tokens, tokens, 16), [HardMask(0.5, k=k, fill=fill)], tolerance)


@pytest.mark.parametrize("k", [5, 40])
def test_long_rows(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WHOLE_KEYS", 32)
    check(make(1, 1, 20, 150, 16), [HardMask(0.5, k=k)])
    check(make(1, 1, 40, 70, 16), [HardMask(0.9, k=k, fill="neg_inf")], is_causal=True)


def dropped(q: Tensor, k: Tensor, method: HardMask) -> Tensor:
    """Which keys the kernels drop, read off the weights: neg_inf gives them none."""
    keys = k.shape[2]
    eye = torch.eye(keys).expand(*k.shape[:2], keys, keys)
    return attemper.attention(q, k, eye, methods=[method], seed=3, impl="triton") == 0


@pytest.mark.parametrize("whole", [256, 16])
@pytest.mark.parametrize("count", [1, 5, 33])
def test_the_dropped_keys_are_the_references_bit_for_bit(
    count: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "WHOLE_KEYS", whole)
    q, k, _ = (t.detach() for t in make(1, 1, 20, 64, 16))
    method = HardMask(0.5, k=count, fill="neg_inf")
    logits = q @ k.mT / 4
    hit = largest(logits, count) & ~attemper.keep_mask(3, logits.shape, 0.5)
    assert torch.equal(dropped(q, k, method), hit)


@pytest.mark.parametrize("whole", [256, 16])
@pytest.mark.parametrize("count", [1, 5, 33])
def test_of_equal_logits_the_earlier_keys_come_first(count: int, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WHOLE_KEYS", whole)
    q, k, _ = (t.detach().round() for t in make(1, 2, 20, 48, 16))
    q[0, 0] = 0.0  # a head in which all logits are equal
    k[:, :, 7:30] = k[:, :, 7:8]
    method = HardMask(0.5, k=count, fill="neg_inf")
    logits = q @ k.mT / 4
    hit = largest(logits, count) & ~attemper.keep_mask(3, logits.shape, 0.5)
    assert torch.equal(dropped(q, k, method), hit)
    qkv = tuple(t.requires_grad_() for t in (q, k, torch.randn_like(k)))
    check(qkv, [HardMask(0.5, k=count)])


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("whole", [256, 16])
def test_masks(fill: str, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WHOLE_KEYS", whole)
    method = [HardMask(0.6, k=6, fill=fill)]
    lengths = torch.tensor([40, 3, 0])[:, None, None, None]
    check(make(3, 1, 10, 40, 16), method, attn_mask=torch.arange(40) < lengths)
    check(make(1, 2, 20, 33, 16), method, attn_mask=torch.rand(1, 1, 20, 33) > 0.8)
    check(make(1, 1, 20, 20, 16), method, is_causal=True)


@pytest.mark.parametrize("fill", FILLS)
def test_an_additive_mask_counts_among_the_logits(fill: str) -> None:
    bias = 3 * torch.randn(1, 2, 20, 40)
    check(make(1, 2, 20, 40, 16), [HardMask(0.6, k=6, fill=fill)], 1e-5, attn_mask=bias)
    bias[..., 3:] = -100.0
    check(make(1, 2, 20, 40, 16), [HardMask(0.6, k=6, fill=fill)], 1e-5, attn_mask=bias)
    bias[..., 2:] = -torch.inf
    check(make(1, 2, 20, 40, 16), [HardMask(0.9, k=6, fill=fill)], 1e-5, attn_mask=bias, is_causal=True)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("first", ["dropkey", "hardmask"])
def test_together_with_dropkey_in_either_order(first: str, fill: str) -> None:
    methods = [DropKey(0.4), HardMask(0.6, k=6, fill=fill)]
    if first == "hardmask":
        methods.reverse()
    check(make(1, 1, 35, 35, 16), methods, is_causal=True)
    check(make(3, 1, 17, 20, 16), methods, attn_mask=torch.arange(20) < torch.tensor([20, 2, 0])[:, None, None, None])


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_that_would_lose_all_keys_are_left_undropped(tokens: int, fill: str) -> None:
    hard, drop = HardMask(0.95, k=tokens, fill=fill), DropKey(0.9)
    for methods in ([hard], [hard, drop], [drop, hard]):
        check(make(2, 2, 8 if tokens > 1 else 1, tokens, 16), methods, 1e-5)


def test_rescue_under_an_additive_mask() -> None:
    bias = torch.zeros(1, 1, 1, 20).masked_fill(torch.arange(20) > 1, -1e4)
    for methods in ([DropKey(0.8), HardMask(0.9, k=4, fill="neg_inf")], [HardMask(0.9, k=4), DropKey(0.8)]):
        check(make(1, 2, 17, 20, 16), methods, 1e-5, attn_mask=bias)


def test_grouped_heads_half_precision_and_what_stays_outside() -> None:
    check(make(1, 4, 20, 37, 16, kv_heads=2), [HardMask(0.5), DropKey(0.2)])
    check(make(1, 2, 20, 37, 16), [Blur(1.0), HardMask(0.5), DropHead(0.3)], 1e-5)
    q, k, v = (t.detach().half().requires_grad_() for t in make(1, 2, 20, 37, 16))
    check((q, k, v), [HardMask(0.5, k=3)], 2e-3)


def test_repeats_bit_for_bit() -> None:
    qkv = make(1, 2, 35, 35, 16)
    results = []
    for _ in range(2):
        out = attemper.attention(*qkv, methods=[HardMask(0.3)], seed=1, impl="triton")
        results.append((out, *torch.autograd.grad(out.sum(), qkv)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_opcheck_of_the_operators() -> None:
    q, k, v = make(1, 2, 17, 20, 16)
    hard = drop_table(Stream(torch.tensor(5), 1), 0, 20)
    arguments = (q.detach(), k.detach(), None, None, None, hard, 0.25, False, 4, True)
    cuts = torch.ops.attemper.row_cuts(*arguments)
    torch.library.opcheck(torch.ops.attemper.row_cuts, arguments)
    arguments = (q, k, v, None, None, 0.25, False, None, cuts, hard, "zero")
    torch.library.opcheck(torch.ops.attemper.fused_attention, arguments)


def test_compiles_in_one_graph_with_the_same_masks() -> None:
    q, k, v = make(1, 2, 17, 17, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        methods = [HardMask(0.5, k=3), DropKey(0.2), Blur(1.0)]
        return attemper.attention(q, k, v, methods=methods, seed=7, impl="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    given = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("whole", [256, 16])
def test_heads_that_share_a_draw(whole: int, fill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WHOLE_KEYS", whole)
    method = HardMask(0.5, k=5, fill=fill, share="heads")
    check(make(2, 2, 20, 33, 16), [method], 1e-5)
    check(make(2, 2, 9, 9, 16), [DropKey(0.4), method], 1e-5, is_causal=True)


def test_the_draw_that_heads_share_is_the_references_bit_for_bit() -> None:
    q, k, _ = (t.detach() for t in make(2, 3, 20, 64, 16))
    for count in (5, 40):
        logits = q @ k.mT / 4
        hit = largest(logits, count) & ~attemper.keep_mask(3, (2, 1, 20, 64), 0.5)
        assert torch.equal(dropped(q, k, HardMask(0.5, k=count, fill="neg_inf", share="heads")), hit)
