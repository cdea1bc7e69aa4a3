"""The gradient of an additive mask by the Triton kernels, in Triton's interpreter. `test_triton.py` runs this file."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import attemper
from attemper.errors import UnsupportedError
from attemper.kernels.attention import mask_gradients
from attemper.kernels.attention.prepare import drop_table, row_tops
from attemper.methods import DropAttention, DropHead, DropKey, HardMask
from attemper.ops.perturbation import Perturbation
from attemper.ops.stream import Stream
from triton_cases import assert_close, make

METHODS: dict[str, list[Perturbation]] = {
    "none": [],
    "dropkey": [DropKey(0.3)],
    "zero": [HardMask(0.5, k=3)],
    "both": [HardMask(0.5, k=3, fill="neg_inf"), DropKey(0.3)],
    "weights": [DropAttention(0.3)],
    "detached": [DropAttention(0.3, rescale="normalize", detach=True), DropHead(0.4)],
}


def check(qkv: tuple[Tensor, ...], mask: Tensor, methods: list[Perturbation], tolerance: float = 2e-6, **more) -> None:
    dout = torch.randn(*qkv[0].shape[:3], qkv[2].shape[-1]).to(qkv[0].dtype)
    mask = mask.to(qkv[0].dtype).requires_grad_()
    results, ours = [], []
    for impl in ("triton", "reference"):
        out = attemper.attention(*qkv, attn_mask=mask, methods=methods, seed=11, impl=impl, **more)
        *grads, dmask = torch.autograd.grad(out, (*qkv, mask), dout)
        results.append((out.detach(), *grads))
        ours.append(dmask)
    assert_close(*results, dout, qkv[2], tolerance)
    assert ours[0].dtype == mask.dtype
    assert ours[0].shape == mask.shape
    assert (ours[0] - ours[1]).norm() <= tolerance * ours[1].norm() + 1e-9


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(1, 2, 20, 37), (3, 1, 20, 37), (3, 2, 20, 37), (20, 37)], ids=str)
def test_it_equals_the_references(shape: tuple[int, ...], name: str) -> None:
    check(make(3, 2, 20, 37, 16), torch.randn(shape), METHODS[name])


@pytest.mark.parametrize("name", ["none", "dropkey", "weights"])
def test_windows_in_half_precision(name: str) -> None:
    check(make(5, 2, 49, 49, 16, dtype=torch.float16), torch.randn(1, 2, 49, 49), METHODS[name], 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 7, 1024])
def test_however_many_parts_there_are(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_gradients, "PROGRAMS", programs)
    check(make(5, 4, 20, 40, 16, kv_heads=2), torch.randn(1, 1, 20, 40), [DropKey(0.3)])


def test_causal() -> None:
    check(make(2, 1, 40, 40, 16), torch.randn(1, 1, 40, 40), [DropKey(0.5)], is_causal=True)


@pytest.mark.slow
def test_causal_tiles_that_nobody_sees() -> None:
    check(make(2, 1, 70, 70, 16), torch.randn(1, 1, 70, 70), [DropKey(0.5)], is_causal=True)


@pytest.mark.parametrize("name", ["dropkey", "weights", "detached"])
def test_rows_that_lose_all_keys_and_rows_without_any(name: str) -> None:
    mask = torch.randn(2, 1, 17, 9).masked_fill(torch.rand(2, 1, 17, 9) > 0.2, -torch.inf)
    mask[1, :, 5] = -torch.inf
    check(make(2, 2, 17, 9, 16), mask, [type(m)(**{**vars(m), "p": 0.8}) for m in METHODS[name]], 1e-5)


@pytest.mark.slow
def test_against_float64() -> None:
    qkv, mask = make(2, 2, 33, 40, 16), torch.randn(1, 2, 33, 40, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (*qkv, mask)]
    out = attemper.attention(*qkv, attn_mask=mask, methods=[DropKey(0.2)], seed=1, impl="triton")
    expected = attemper.attention(*exact[:3], attn_mask=exact[3], methods=[DropKey(0.2)], seed=1, impl="reference")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    given, wanted = (torch.autograd.grad(x.square().sum(), m)[0] for x, m in ((out, mask), (expected, exact[3])))
    assert (given - wanted).norm() <= 1e-6 * wanted.norm()


def test_of_a_mask_that_all_queries_share_the_kernels_give_none() -> None:
    qkv = make(1, 2, 17, 20, 16)
    mask = torch.zeros(1, 1, 1, 20, requires_grad=True)
    with pytest.raises(UnsupportedError, match="that all queries or all keys share"):
        attemper.attention(*qkv, attn_mask=mask, methods=[DropKey(0.1)], impl="triton")
    with torch.no_grad():
        attemper.attention(*qkv, attn_mask=mask, methods=[DropKey(0.1)], impl="triton")


@pytest.mark.slow
def test_it_repeats_bit_for_bit_and_compiles() -> None:
    qkv, mask = make(3, 2, 20, 37, 16), torch.randn(1, 2, 20, 37, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attemper.attention(q, k, v, attn_mask=mask, methods=[DropKey(0.2)], seed=7, impl="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    first, second, third = (torch.autograd.grad(f(*qkv, mask).square().sum(), mask)[0] for f in (call, call, compiled))
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.slow
def test_opcheck() -> None:
    q, k, v = make(2, 2, 17, 20, 16)
    mask = torch.randn(1, 2, 17, 20, requires_grad=True)
    tops, table = row_tops(mask.detach(), 17, False), drop_table(Stream(torch.tensor(5)), 0, 20)
    torch.library.opcheck(torch.ops.attemper.fused_attention, (q, k, v, mask, table, 0.25, False, tops))


def test_it_is_counted() -> None:
    qkv, mask = make(1, 2, 17, 17, 16), torch.randn(1, 2, 17, 17, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        attemper.attention(*qkv, attn_mask=mask, methods=[DropKey(0.2)], impl="triton").sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 17 * 17 * 16 * (2 + 5 + 2)


def test_a_model_with_learnt_positions() -> None:
    torch.manual_seed(0)
    model = timm.create_model("beit_base_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=2, num_classes=3)
    images = torch.randn(2, 3, 32, 32)
    results = []
    for impl in ("triton", "reference"):
        tempered = attemper.apply(model, "dropkey(0.3)", impl=impl)
        torch.manual_seed(4)
        model.zero_grad()
        model(images).square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        tempered.remove()
    assert any("relative_position_bias_table" in name for name, _ in model.named_parameters())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
