"""Weights that are dropped behind softmax, and keys that all queries drop, in the Triton kernels, interpreted on a CPU.

`test_triton.py` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import attemper
from attemper.errors import UnsupportedError
from attemper.kernels.attention.prepare import drop_table
from attemper.kernels.common import plans as plan
from attemper.kernels.common.dropping import BY_KEY, DETACHED, WEIGHTS
from attemper.methods import Blur, DropAttention, DropHead, DropKey, HardMask
from attemper.ops.perturbation import Perturbation, WeightDropout
from attemper.ops.seeds import seed_tensor
from attemper.ops.stream import Source, Stream
from triton_cases import make
from triton_hardmask_cases import check

FORMS = {
    "inverted": DropAttention(0.3),
    "own": WeightDropout(0.3),
    "detached": DropAttention(0.3, rescale="normalize", detach=True),
    "inverted-columns": DropAttention(0.3, unit="column"),
    "normalised-columns": DropAttention(0.3, unit="column", rescale="normalize"),
    "detached-columns": DropAttention(0.3, unit="column", rescale="normalize", detach=True),
}
every_form = pytest.mark.parametrize("form", FORMS)
some_forms = pytest.mark.parametrize("form", ["inverted", "detached", "detached-columns"])


def at_rate(form: str, p: float) -> Perturbation:
    return dataclasses.replace(FORMS[form], p=p)


@every_form
def test_output_and_gradients_equal_the_reference(form: str) -> None:
    check(make(2, 2, 20, 37, 16), [FORMS[form]])


@every_form
def test_one_program_with_a_whole_head(form: str) -> None:
    check(make(1, 2, 65, 65, 16, dtype=torch.float16), [FORMS[form]], 1e-3)


@pytest.mark.slow
@some_forms
def test_longer_rows_and_grouped_heads(form: str) -> None:
    check(make(1, 2, 70, 130, 24, kv_heads=1, width_v=16), [FORMS[form]])
    check(make(1, 2, 40, 90, 16, kv_heads=1, dtype=torch.float16), [FORMS[form]], 1e-3)


@some_forms
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_rows_that_would_lose_all_keys_stay_as_they_are(form: str, tokens: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        check(make(3, 2, tokens, tokens, 16, dtype=dtype), [at_rate(form, 0.95)], tolerance)


@pytest.mark.slow
@some_forms
def test_masks(form: str) -> None:
    padding = torch.arange(40) < torch.tensor([40, 3, 0])[:, None, None, None]
    check(make(3, 2, 17, 40, 16), [at_rate(form, 0.6)], attn_mask=padding)
    check(make(2, 2, 20, 33, 16), [at_rate(form, 0.6)], attn_mask=torch.rand(2, 1, 20, 33) > 0.8)
    check(make(1, 2, 40, 40, 16), [at_rate(form, 0.6)], is_causal=True)
    hidden = torch.randn(1, 1, 17, 20).masked_fill(torch.rand(1, 1, 17, 20) > 0.15, -100.0)
    check(make(1, 2, 17, 20, 16), [at_rate(form, 0.7)], 1e-5, attn_mask=hidden)


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
@some_forms
def test_behind_hard_masking(form: str, fill: str) -> None:
    check(make(1, 2, 20, 37, 16), [HardMask(0.5, k=3, fill=fill), FORMS[form]])


def test_beside_methods_outside_of_softmax() -> None:
    check(make(2, 4, 20, 20, 16, kv_heads=2), [DropAttention(0.3), Blur(1.0), DropHead(0.4)])


@some_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_far_apart(form: str, dtype: torch.dtype) -> None:
    q, k, v = make(1, 2, 50, 140, 16, dtype=dtype)
    far = q.detach().clone()
    far[:, :, 20:] *= 30  # a dropped key may have nearly all of the weight of its row
    check((far.requires_grad_(), k, v), [FORMS[form]], 1e-4 if dtype == torch.float32 else 4e-3)


def test_values_that_are_zero_are_no_lost_row() -> None:
    q, k, v = make(1, 1, 20, 20, 16)
    zero = v.detach().clone()
    zero[:, :, 1:] = 0  # a row that loses key 0 adds nothing up
    check((q, k, zero.requires_grad_()), [DropAttention(0.3)])


@every_form
def test_masks_are_those_of_the_reference_bit_for_bit(form: str) -> None:
    batch, heads, nq, nk = 2, 2, 35, 48
    eye = torch.eye(nk)[None, None].expand(batch, heads, nk, nk)
    q, k = torch.zeros(batch, heads, nq, 16), torch.zeros(batch, heads, nk, 16)
    for seed, p in ((3, 0.1), (-(2**63) + 5, 0.5), (2**40 + 1, 0.9)):
        method = at_rate(form, p)
        weights = attemper.attention(q, k, eye, methods=[method], seed=seed, impl="triton")
        kept = method.drawn((batch, heads, nq, nk), Source(seed_tensor(seed, q.device)).stream(0))
        kept = kept.expand(batch, heads, nq, nk)
        assert torch.equal(weights > 0, kept | ~kept.any(-1, keepdim=True))


@some_forms
def test_gradients_against_float64(form: str) -> None:
    qkv = make(1, 2, 33, 40, 16)
    dout = torch.randn(1, 2, 33, 16)
    out = attemper.attention(*qkv, methods=[FORMS[form]], seed=5, impl="triton")
    exact = tuple(t.detach().double().requires_grad_() for t in qkv)
    expected = attemper.attention(*exact, methods=[FORMS[form]], seed=5, impl="reference")
    pairs = zip(torch.autograd.grad(out, qkv, dout), torch.autograd.grad(expected, exact, dout.double()), strict=True)
    for given, wanted in pairs:
        assert (given - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.slow
def test_lengths_beyond_the_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "STATIC_TOKENS", 0)
    check(make(1, 2, 37, 70, 16), [DropAttention(0.2)])
    check(make(1, 1, 64, 64, 16), [DropAttention(0.2, rescale="normalize", detach=True)], is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("drop", [WEIGHTS, DETACHED + BY_KEY])
def test_opcheck(drop: int) -> None:
    q, k, v = make(1, 2, 17, 20, 16)
    table = drop_table(Stream(torch.tensor(5)), 0, 20)
    torch.library.opcheck(
        torch.ops.attemper.fused_attention, (q, k, v, None, table, 0.25, False, None, None, None, "none", drop)
    )


def test_compiles_in_one_graph_and_gives_the_same_bits() -> None:
    qkv = make(1, 2, 17, 17, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropAttention(0.2)], seed=7, impl="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(*qkv).square().sum(), qkv)
    given = torch.autograd.grad(compiled(*qkv).square().sum(), qkv)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


@pytest.mark.slow
def test_torch_func_gives_the_same_gradient() -> None:
    qkv = make(2, 2, 17, 17, 16)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropAttention(0.2)], seed=7, impl="triton").square().sum()

    expected = torch.autograd.grad(loss(*qkv), qkv)
    given = torch.func.grad(loss, (0, 1, 2))(*(t.detach() for t in qkv))
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    mapped = torch.func.vmap(lambda q, k, v: loss(q[None], k[None], v[None]))(*(t.detach() for t in qkv))
    each = torch.stack([loss(*(t.detach()[i : i + 1] for t in qkv)) for i in range(2)])
    torch.testing.assert_close(mapped, each)


def test_what_is_refused_says_why() -> None:
    q = torch.randn(1, 2, 8, 16)
    for methods, reason in (
        ([DropAttention(0.1, unit="column", w=3)], "by words of the stream"),
        ([DropKey(0.1), DropAttention(0.1)], "takes one method of a kind"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            attemper.attention(q, q, q, methods=methods, impl="triton")
    with pytest.raises(UnsupportedError, match="not weights behind it"):
        attemper.attention(q, q, q, methods=[DropAttention(0.1)], return_lse=True, impl="triton")


def test_a_method_that_drops_by_key_first_leaves_the_largest_logits_to_others() -> None:
    class Early(DropAttention):
        order = 0

    q = torch.randn(1, 2, 8, 16)
    early = Early(0.1, unit="column", rescale="normalize")
    with pytest.raises(UnsupportedError, match="looks for the largest logits before"):
        attemper.attention(q, q, q, methods=[early, HardMask(0.1, k=2)], impl="triton")
