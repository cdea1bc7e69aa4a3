"""impl="tiled": attention tile by tile on a CPU, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attemper
from attemper import Offsets, attention, implementations, keep_mask
from attemper.errors import UnsupportedError
from attemper.methods import Blur, DropAttention, DropHead, DropKey, HardMask
from attemper.ops import tiles
from attemper.ops.perturbation import WeightDropout
from attemper.ops.tile_work import Work

GRID = {"grid": (3, 4), "prefix": 1}
RECIPES = {
    "dropkey": [DropKey(0.3)],
    "most keys": [DropKey(0.97)],
    "dropkey twice": [DropKey(0.5), DropKey(0.5)],
    "hardmask": [HardMask(0.4, k=3)],
    "hardmask −inf": [HardMask(0.99, k=0.9, fill="neg_inf")],
    "hardmask by heads": [HardMask(0.5, share="heads")],
    "dropkey, hardmask": [DropKey(0.5), HardMask(0.4, k=4)],
    "block": [DropKey(0.3, structure="block", **GRID)],
    "cross": [DropKey(0.3, structure="cross", **GRID)],
    "cross by heads": [DropKey(0.3, structure="cross", share="heads", **GRID)],
    "block by queries": [DropKey(0.3, structure="block", share="queries", **GRID)],
    "dropattention": [DropAttention(0.3, rescale="normalize")],
    "columns": [DropAttention(0.3, unit="column", w=2, rescale="normalize")],
    "inverted": [DropAttention(0.9, rescale="inverted")],
    "own dropout": [DropKey(0.3), WeightDropout(0.5)],
    "outside": [DropHead(0.3), DropKey(0.3)],
    "blur": [Blur(1.0), DropKey(0.3)],
}


@pytest.fixture(params=[(10**6, True), (500, True), (500, False), (60, False)], ids=["one", "some", "again", "rows"])
def budget(request, monkeypatch):
    """How large tiles are, and whether weights may be kept for backward."""
    size, keep = request.param
    monkeypatch.setattr(tiles, "BUDGET", size)
    if not keep:
        monkeypatch.setattr(Work, "keeps_weights", lambda self, q, v: False)


def tensors(queries=13, keys=13, batch=2, heads=3, kv_heads=None, width=8, dtype=torch.float32):
    kv_heads = kv_heads or heads
    sizes = (batch, heads, queries, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, 6)
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


def results(impl, inputs, **options):
    mask = options.get("attn_mask")
    leaves = [*inputs, mask] if mask is not None and mask.requires_grad else inputs
    out = attention(*inputs, impl=impl, seed=7, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad(out, leaves, weight)


def doubled(x):
    return x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x


def assert_close_to_float64(inputs, atol=2e-5, **options):
    exact = {name: doubled(value) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    wanted = results("reference", [doubled(x) for x in inputs], **exact)
    for a, b in zip(results("tiled", inputs, **options), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=atol, rtol=0)


# ----------------------------------------------------------------------------------------------------- the same numbers
@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_are_the_references(recipe, budget):
    assert_close_to_float64(tensors(), methods=RECIPES[recipe])
    assert_close_to_float64(tensors(queries=5), methods=RECIPES[recipe])
    assert_close_to_float64(tensors(), methods=RECIPES[recipe], is_causal=True)
    assert_close_to_float64(tensors(), methods=RECIPES[recipe], attn_mask=torch.rand(2, 1, 1, 13) < 0.5)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "blur"])
def test_masks_that_differ_between_queries(recipe, budget):
    """Of all kinds: rows with few keys or none, a bias with a gradient, and "masked out" as a large finite number."""
    methods = RECIPES[recipe]
    few, own = torch.rand(2, 3, 13, 13) < 0.2, torch.eye(13, dtype=torch.bool)
    assert_close_to_float64(tensors(), methods=methods, attn_mask=few)
    assert_close_to_float64(tensors(), methods=methods, attn_mask=few[:, :1], is_causal=True)
    assert_close_to_float64(tensors(), methods=methods, attn_mask=torch.randn(3, 13, 13, requires_grad=True))
    assert_close_to_float64(
        tensors(), methods=methods, attn_mask=torch.where(few | own, 0.0, -1e4) + torch.randn(3, 1, 13)
    )


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(1, 20),
    keys=st.integers(1, 20),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (2, 2)]),
    limit=st.sampled_from([1, 50, 400, 10**6]),
    causal=st.booleans(),
    p=st.floats(0.01, 0.99),
)
def test_shapes(queries, keys, batch, heads, limit, causal, p):
    inputs = tensors(queries, keys, batch, *heads, width=5)
    old, tiles.BUDGET = tiles.BUDGET, limit
    try:
        assert_close_to_float64(inputs, methods=[DropKey(p)], is_causal=causal)
        assert_close_to_float64(inputs, methods=[HardMask(p, k=0.3)], is_causal=causal)
    finally:
        tiles.BUDGET = old


def test_equal_logits_are_all_among_the_largest():
    inputs = tensors()
    for method in (HardMask(0.5, k=2), HardMask(0.5, k=2, fill="neg_inf")):
        assert_close_to_float64([torch.zeros_like(inputs[0]).requires_grad_(), *inputs[1:]], methods=[method])
    q, k, v = tensors(width=4)  # a scale of 1/2 rounds nothing
    few = torch.randint(0, 3, k.shape).float().requires_grad_()
    assert_close_to_float64([torch.ones_like(q).requires_grad_(), few, v], methods=[HardMask(0.5, k=3)])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.05), (torch.float16, 5e-3)])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype, atol):
    inputs = tensors(dtype=dtype)
    assert_close_to_float64(inputs, atol, methods=[DropKey(0.3)])
    wanted = attention(*(x.float() for x in inputs), methods=[DropKey(0.3)], seed=3, impl="tiled").to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(*inputs, methods=[DropKey(0.3)], seed=3, impl="tiled"), wanted)


def test_inputs_may_lie_in_memory_in_any_way(budget):
    packed = torch.randn(2, 13, 3, 3, 6, requires_grad=True)
    inputs = packed.permute(2, 0, 3, 1, 4).unbind(0)
    out = attention(*inputs, methods=[DropKey(0.3)], seed=3, impl="tiled")
    wanted = attention(*(x.contiguous() for x in inputs), methods=[DropKey(0.3)], seed=3, impl="reference")
    torch.testing.assert_close(out, wanted)
    grads = (torch.autograd.grad(x.square().sum(), packed)[0] for x in (out, wanted))
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- the same bits
@pytest.mark.parametrize("at", [Offsets(), Offsets(sample=5, head=2, query=9)])
def test_masks_are_bit_for_bit_those_of_the_stream(budget, at):
    q, k, _ = tensors()
    shown = torch.eye(13).expand(2, 3, 13, 13)
    weights = attention(q, k, shown, methods=[DropKey(0.4)], seed=21, at=at, impl="tiled")
    assert torch.equal(weights > 0, keep_mask(21, (2, 3, 13, 13), 0.4, at=at))


def test_no_row_loses_all_of_its_keys(budget):
    q, k, _ = tensors(queries=40, keys=3)
    weights = attention(q, k, torch.eye(3).expand(2, 3, 3, 3), methods=[DropKey(0.95)], seed=1, impl="tiled")
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 40))


# -------------------------------------------------------------------------------------------------------- where it runs
@pytest.mark.parametrize("recipe", RECIPES)
def test_auto_takes_it_on_a_cpu(recipe):
    chosen = {each.name for each in implementations(*tensors(), methods=RECIPES[recipe]) if each.chosen}
    assert chosen == {"tiled"}


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ([HardMask(0.1), DropKey(0.1)], "drops keys first"),
        ([DropAttention(0.1, rescale="inverted"), WeightDropout(0.1)], "one that drops weights"),
        ([DropAttention(0.1, rescale="normalize", detach=True)], "knows only methods that"),
    ],
)
def test_what_it_cannot_do_it_refuses_with_a_reason(methods, reason):
    with pytest.raises(UnsupportedError, match=reason):
        attention(*tensors(), methods=methods, impl="tiled")
    torch.testing.assert_close(
        attention(*tensors(batch=1), methods=methods, seed=1).shape, torch.Size([1, 3, 13, 6])
    )  # and "auto" finds another


def test_second_derivatives_are_the_references():
    inputs = tensors(queries=4, keys=5, batch=1, heads=2, width=3)
    found = []
    for impl in ("tiled", "reference"):
        out = attention(*inputs, methods=[DropKey(0.3), DropHead(0.2)], seed=5, impl=impl)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_gradients_may_be_mapped():
    inputs = tensors(queries=4, keys=5, batch=1, heads=2, width=3)
    rows = []
    for impl in ("tiled", "reference"):
        out = attention(*inputs, methods=[DropKey(0.3)], seed=5, impl=impl)
        basis = torch.eye(out.numel()).view(out.numel(), *out.shape)
        rows.append(torch.autograd.grad(out, inputs, basis, is_grads_batched=True))
    for a, b in zip(*rows, strict=True):
        torch.testing.assert_close(a, b)


def test_torch_func_and_forward_derivatives_take_the_reference():
    inputs = [x.detach() for x in tensors(queries=4, keys=5, batch=1, heads=2, width=3)]

    def loss(q):
        return attention(q, *inputs[1:], methods=[DropKey(0.3)], seed=5).square().sum()

    q = inputs[0].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(q), torch.autograd.grad(loss(q), q)[0])
    tangent = torch.randn_like(q)
    change = torch.func.jvp(loss, (inputs[0],), (tangent,))[1]
    torch.testing.assert_close(change, (torch.autograd.grad(loss(q), q)[0] * tangent).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], tangent)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent, change)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_the_same_again(reentrant):
    inputs = tensors()

    def attend(*inputs):
        return attention(*inputs, methods=[DropKey(0.3), HardMask(0.4)])

    torch.manual_seed(3)
    plain = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    torch.manual_seed(3)
    checkpoint(attend, *inputs, use_reentrant=reentrant).square().sum().backward()
    for x, wanted in zip(inputs, plain, strict=True):
        assert torch.equal(x.grad, wanted)


def test_compiled_code_draws_the_same_masks():
    q, k, _ = tensors()
    shown = torch.eye(13).expand(2, 3, 13, 13)

    def attend(q, k):
        return attention(q, k, shown, methods=[DropKey(0.4)], seed=21)

    torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(q, k), attend(q, k))


def test_gradients_that_nobody_wants_are_not_made():
    q, k, v = (x.detach() for x in tensors())
    wanted = attention(q, k, v.requires_grad_(), methods=[DropKey(0.3)], seed=2, impl="tiled")
    (dv,) = torch.autograd.grad(wanted.sum(), v)
    assert dv.shape == v.shape
    with torch.no_grad():
        assert torch.equal(attention(q, k, v, methods=[DropKey(0.3)], seed=2, impl="tiled"), wanted)


# ---------------------------------------------------------------------------------------------------------- its memory
def test_it_keeps_no_logits():
    """What autograd keeps grows with the tokens, not with their square; nor does a call need more at any time than
    torch's own kernel with a mask."""
    from attemper.lab.bench.timing import peak_bytes_on_cpu

    inputs = tensors(1024, 1024, 1, 1, width=16)
    saved = []

    def pack(x):
        saved.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(*inputs, methods=[DropKey(0.3), HardMask(0.1)], seed=1, impl="tiled")
    assert sum(saved) < 4 * 4 * 1024 * (16 + 16 + 6)
    mask = torch.rand(1, 1, 1024, 1024) > 0.3

    def masked():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs[:2], inputs[1], mask)
        torch.autograd.grad(out.sum(), inputs[:2])

    def tiled():
        out = attention(*inputs[:2], inputs[1], methods=[DropKey(0.3)], seed=1, impl="tiled")
        torch.autograd.grad(out.sum(), inputs[:2])

    tiles.WORKSPACE._memory.clear()
    assert peak_bytes_on_cpu(tiled) <= peak_bytes_on_cpu(masked)


def test_calls_of_all_sizes_share_their_memory():
    for queries, recipe in ((40, "dropkey"), (3, "hardmask"), (30, "hardmask"), (50, "own dropout"), (7, "dropkey")):
        assert_close_to_float64(tensors(queries=queries), methods=RECIPES[recipe])


def test_eval_mode_is_the_models_own():
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 7, 16)
    plain = model.eval()(x)
    attemper.apply(model.train(), "dropkey(0.3)")
    model(x).sum().backward()
    assert torch.equal(model.eval()(x), plain)
