"""Structured DropKey in the Triton kernels, interpreted. `test_triton.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attemper
from attemper.kernels.attention import seeds
from attemper.kernels.attention.seed_tables import _seed_table_fake, seed_table
from attemper.kernels.common import plans as plan
from attemper.kernels.common.dropping import seed_code, seed_words
from attemper.methods import Blur, DropHead, DropKey, HardMask
from attemper.methods.structure import seed_rate
from attemper.ops.seeds import seed_tensor
from attemper.ops.stream import NOWHERE, Offsets, Source, Stream, threshold
from triton_cases import Tensors, make
from triton_hardmask_cases import check

FORMS = {
    "block": DropKey(0.3, structure="block", grid=(4, 5), prefix=1),
    "cross": DropKey(0.3, structure="cross", grid=(4, 5), prefix=1),
    "dense-block": DropKey(0.9, structure="block", grid=(3, 7)),
    "dense-cross": DropKey(0.9, structure="cross", grid=(3, 7)),
    "single-places": DropKey(0.9, structure="block", w=1, grid=(5, 4), prefix=2),
    "wide-block": DropKey(0.1, structure="block", w=7, grid=(8, 7), prefix=1),
    "wide-cross": DropKey(0.2, structure="cross", w=3, grid=(3, 34), prefix=1),
    "queries-block": DropKey(0.3, structure="block", share="queries", grid=(4, 5), prefix=1),
    "queries-cross": DropKey(0.3, structure="cross", share="queries", grid=(4, 5), prefix=1),
    "heads-block": DropKey(0.3, structure="block", share="heads", grid=(4, 5), prefix=1),
    "heads-cross": DropKey(0.3, structure="cross", share="heads", grid=(4, 5), prefix=1),
}
every_form = pytest.mark.parametrize("form", FORMS)
both = pytest.mark.parametrize("structure", ["block", "cross"])


def keys_of(method: DropKey) -> int:
    assert method.grid is not None
    return (method.prefix or 0) + method.grid[0] * method.grid[1]


def masked_keys(method: DropKey, shape: tuple[int, int, int, int], seed: int, at: Offsets = NOWHERE) -> Tensor:
    """Which keys an implementation keeps, read off weights of equal logits."""
    batch, heads, queries, keys = shape
    assert keys <= 128  # the widest heads that there are
    q, k = torch.zeros(batch, heads, queries, 16), torch.zeros(batch, heads, keys, 16)
    own = torch.nn.functional.pad(torch.eye(keys), (0, -keys % 8)).expand(batch, heads, -1, -1)
    weights = attemper.attention(q, k, own[..., :128], methods=[method], seed=seed, at=at, impl="triton")
    return weights[..., :keys] > 0


def expected_keys(method: DropKey, shape: tuple[int, int, int, int], seed: int, at: Offsets = NOWHERE) -> Tensor:
    """What the reference keeps, rows that would lose everything whole."""
    kept = method.drawn(shape, Source(seed_tensor(seed, None), at=at).stream(0)).expand(shape)
    return kept | ~kept.any(-1, keepdim=True)


@every_form
def test_masks_are_those_of_the_reference_bit_for_bit(form: str) -> None:
    shape = (2, 2, 19, keys_of(FORMS[form]))
    for seed in (3, -(2**63) + 5):
        assert torch.equal(masked_keys(FORMS[form], shape, seed), expected_keys(FORMS[form], shape, seed))


@pytest.mark.slow
def test_images_with_more_lines_or_columns_than_a_row_chooses_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "HELD", tl.constexpr(1))
    for grid in ((3, 34), (34, 3)):
        method = DropKey(0.2, structure="cross", grid=grid, prefix=1)
        assert torch.equal(masked_keys(method, (1, 1, 17, 103), 3), expected_keys(method, (1, 1, 17, 103), 3))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    structure=st.sampled_from(["block", "cross"]),
    w=st.sampled_from([1, 1, 3, 3, 5]),
    more=st.tuples(st.integers(0, 4), st.integers(0, 8)),
    prefix=st.integers(0, 3),
    p=st.floats(0.01, 0.9),
    share=st.sampled_from(["none", "none", "queries", "heads"]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_masks_of_every_grid_and_rate(
    structure: str, w: int, more: tuple[int, int], prefix: int, p: float, share: str, seed: int
) -> None:
    method = DropKey(p, structure=structure, share=share, w=w, grid=(w + more[0], w + more[1]), prefix=prefix)
    shape = (1, 2, 17, keys_of(method))
    assert torch.equal(masked_keys(method, shape, seed), expected_keys(method, shape, seed))


@pytest.mark.slow
@both
def test_a_part_of_the_samples_heads_and_queries_drops_what_the_whole_call_drops(structure: str) -> None:
    method, whole = FORMS[structure], (3, 4, 20, 21)
    expected = expected_keys(method, whole, 9)[1:, 2:, 5:12]
    at = Offsets(sample=1, head=2, query=5)
    assert torch.equal(masked_keys(method, (2, 2, 7, 21), 9, at), expected)


# ------------------------------------------------------------------------------------------ against a formula by hand
def kept_by_hand(method: DropKey, shape: tuple[int, int, int, int], seed: int) -> Tensor:
    """Windows and stripes round every seed, one after the other. shape: (B, H, Nq, Nk)."""
    assert method.grid is not None
    (rows, columns), w, prefix = method.grid, method.width, method.prefix or 0
    down, across = (rows - w + 1, columns - w + 1) if method.structure == "block" else (rows, columns)
    rate = seed_rate(method.structure, method.grid, w, method.p)
    drawn = ~attemper.keep_mask(seed, (*shape[:3], down * across), rate)
    kept = torch.ones(*shape[:3], rows, columns, dtype=torch.bool)
    for b, h, i, place in drawn.nonzero().tolist():
        r, c = place // across, place % across
        if method.structure == "block":
            kept[b, h, i, r : r + w, c : c + w] = False
        else:
            kept[b, h, i, max(0, r - w // 2) : r + w // 2 + 1] = False
            kept[b, h, i, :, max(0, c - w // 2) : c + w // 2 + 1] = False
    return torch.nn.functional.pad(kept.flatten(-2), (prefix, 0), value=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, allowed: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """softmax(QKᵀ/√e + bias) over kept and allowed keys; over all allowed ones where none of these is kept."""
    left = allowed & kept
    left = torch.where(left.any(-1, keepdim=True), left, allowed.expand_as(left))
    logits = (q @ k.mT / q.shape[-1] ** 0.5 + bias).masked_fill(~left, -torch.inf)
    there = left.any(-1, keepdim=True)
    return torch.where(there, logits.masked_fill(~there, 0.0).softmax(-1), 0.0) @ v


def masks_of(queries: int, keys: int) -> dict[str, dict[str, object]]:
    return {
        "none": {},
        "causal": {"is_causal": True},
        "padding": {"attn_mask": torch.arange(keys) < torch.tensor([keys, 3])[:, None, None, None]},
        "boolean": {"attn_mask": torch.rand(2, 1, queries, keys) > 0.8},
        "hidden": {"attn_mask": torch.randn(1, 2, queries, keys).masked_fill(torch.rand(queries, keys) > 0.2, -100.0)},
    }


def allowed_and_bias(options: dict[str, object], queries: int, keys: int) -> tuple[Tensor, Tensor | float]:
    mask = options.get("attn_mask")
    if isinstance(mask, Tensor):
        return (mask, 0.0) if mask.dtype == torch.bool else (mask > mask.amax(-1, keepdim=True) - 64, mask.double())
    ones = torch.ones(queries, keys, dtype=torch.bool)
    return (ones.tril() if options else ones), 0.0


@pytest.mark.parametrize("name", ["none", "causal", "padding", "boolean", "hidden"])
@both
def test_output_and_gradients_against_a_formula_in_float64(structure: str, name: str) -> None:
    method, queries, keys = DropKey(0.6, structure=structure, grid=(4, 5), prefix=1), 21, 21
    options = masks_of(queries, keys)[name]
    qkv = make(2, 2, queries, keys, 16)
    dout = torch.randn(2, 2, queries, 16)
    out = attemper.attention(*qkv, methods=[method], seed=5, impl="triton", **options)
    exact = tuple(t.detach().double().requires_grad_() for t in qkv)
    kept = kept_by_hand(method, (2, 2, queries, keys), 5)
    expected = by_hand(*exact, kept, *allowed_and_bias(options, queries, keys))
    grads = torch.autograd.grad(out, qkv, dout), torch.autograd.grad(expected, exact, dout.double())
    for a, b in ((out, expected), *zip(*grads, strict=True)):
        assert (a - b).norm() <= 3e-6 * b.norm()


# ------------------------------------------------------------------------------------------------- kinds of calls
@pytest.mark.slow
@every_form
def test_output_and_gradients_equal_the_reference(form: str) -> None:
    check(make(2, 2, 20, keys_of(FORMS[form]), 16), [FORMS[form]])


@pytest.mark.slow
@both
def test_one_program_with_a_whole_head(structure: str) -> None:
    method = DropKey(0.3, structure=structure, grid=(8, 8), prefix=1)
    check(make(1, 2, 65, 65, 16, dtype=torch.float16), [method], 1e-3)


@pytest.mark.slow
@both
@pytest.mark.parametrize("share", ["none", "queries", "heads"])
def test_longer_rows_and_grouped_heads(structure: str, share: str) -> None:
    method = DropKey(0.3, structure=structure, share=share, grid=(10, 13))
    check(make(1, 4, 40, 130, 24, kv_heads=2, width_v=16), [method])


@pytest.mark.slow
@both
def test_half_precision(structure: str) -> None:
    method = DropKey(0.3, structure=structure, grid=(10, 13))
    check(make(1, 2, 20, 130, 16, kv_heads=1, dtype=torch.float16), [method], 1e-3)


@pytest.mark.slow
@both
def test_lengths_beyond_the_compiled_ones(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "STATIC_TOKENS", 0)
    check(make(1, 2, 37, 70, 16), [DropKey(0.2, structure=structure, grid=(7, 10))])
    check(make(1, 1, 64, 64, 16), [DropKey(0.2, structure=structure, grid=(8, 8))], is_causal=True)


@both
def test_rows_that_would_lose_all_keys_are_left_undropped(structure: str) -> None:
    method = DropKey(0.9, structure=structure, w=3, grid=(3, 3))
    check(make(2, 2, 9, 9, 16), [method], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
@both
def test_beside_hard_masking_in_either_order(structure: str, fill: str) -> None:
    hard = HardMask(0.5, k=3, fill=fill)
    check(make(1, 2, 20, 21, 16), [FORMS[structure], hard])
    check(make(1, 2, 20, 21, 16), [hard, FORMS[f"heads-{structure}"]])


@pytest.mark.slow
@both
@pytest.mark.parametrize("share", ["queries", "heads"])
def test_keys_that_others_share_are_dropped_before_hard_masking(structure: str, share: str) -> None:
    check(make(2, 2, 20, 21, 16), [FORMS[f"{share}-{structure}"], HardMask(0.5, k=12)])


@pytest.mark.slow
@both
def test_beside_methods_outside_of_softmax(structure: str) -> None:
    check(make(2, 4, 20, 21, 16, kv_heads=2), [FORMS[structure], Blur(1.0), DropHead(0.4)])


@pytest.mark.slow
@both
def test_logits_far_apart_need_the_running_maximum(structure: str) -> None:
    q, k, v = make(1, 2, 50, 21, 16)
    far = q.detach().clone()
    far[:, :, 20:] *= 300
    check((far.requires_grad_(), k, v), [FORMS[structure]], 1e-4)


def gradients(qkv: Tensors, impl: str, mask: Tensor, method: DropKey) -> Tensors:
    mask = mask.detach().requires_grad_()
    out = attemper.attention(*qkv, attn_mask=mask, methods=[method], seed=2, impl=impl)
    return torch.autograd.grad(out.square().sum(), (*qkv, mask))


@pytest.mark.slow
@both
def test_the_gradient_of_a_bias(structure: str) -> None:
    qkv, bias = make(2, 2, 20, 21, 16), torch.randn(1, 2, 20, 21)
    method = DropKey(0.8, structure=structure, grid=(4, 5), prefix=1)
    for a, b in zip(*(gradients(qkv, impl, bias, method) for impl in ("triton", "reference")), strict=True):
        assert (a - b).norm() <= 3e-6 * b.norm()


@pytest.mark.slow
@both
def test_log_sum_exps(structure: str) -> None:
    q, k, v = make(2, 2, 20, 21, 16)
    results = [
        attemper.attention(q, k, v, methods=[FORMS[structure]], seed=3, return_lse=True, impl=impl)
        for impl in ("triton", "reference")
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------- operators and compilers
@pytest.mark.slow
@both
def test_compiles_in_one_graph_and_gives_the_same_bits(structure: str) -> None:
    qkv = make(1, 2, 17, 21, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[FORMS[structure]], seed=7, impl="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(*qkv).square().sum(), qkv)
    given = torch.autograd.grad(compiled(*qkv).square().sum(), qkv)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


@pytest.mark.slow
@both
def test_torch_func_gives_the_same_gradient(structure: str) -> None:
    qkv = make(2, 2, 17, 21, 16)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[FORMS[structure]], seed=7, impl="triton").square().sum()

    expected = torch.autograd.grad(loss(*qkv), qkv)
    given = torch.func.grad(loss, (0, 1, 2))(*(t.detach() for t in qkv))
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    mapped = torch.func.vmap(lambda q, k, v: loss(q[None], k[None], v[None]))(*(t.detach() for t in qkv))
    each = torch.stack([loss(*(t.detach()[i : i + 1] for t in qkv)) for i in range(2)])
    torch.testing.assert_close(mapped, each)


@pytest.mark.slow
@both
def test_opcheck(structure: str) -> None:
    drop = FORMS[structure].seed_drop(21)
    assert drop is not None
    words, code = (1 if structure == "cross" else 0), seed_code(drop)
    arguments = (torch.tensor(5), None, 0, [1, 2, 17, 21], [1, 4, 5], drop.w, words, -7, 1, 2, 3, 4)
    torch.library.opcheck(torch.ops.attemper.seed_table, arguments)
    q, k, v = make(1, 2, 17, 21, 16)
    table = seed_table(Stream(torch.tensor(5)), threshold(drop.rate), (1, 2, 17, 21), drop)
    others = (None, table, 0.25, False, None, None, None, "none", code)
    torch.library.opcheck(torch.ops.attemper.fused_attention, (q, k, v, *others))


def test_tables_are_far_smaller_than_masks() -> None:
    for structure, side in itertools.product(("block", "cross"), (14, 32, 64)):
        keys = side * side
        drop = DropKey(0.1, structure=structure, grid=(side, side)).seed_drop(keys)
        assert drop is not None
        seed, shape, image = torch.empty((), device="meta"), [2, 3, keys, keys], [0, *drop.grid]
        table = _seed_table_fake(seed, None, 0, shape, image, drop.w, seed_words(drop))
        assert table.numel() <= 2 * keys + (2 * 3 * keys * 4 if structure == "cross" else 0)
