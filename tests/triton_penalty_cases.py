"""Squares of logits and outputs in the interpreter. `test_triton.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import attemper
from attemper.kernels import penalties as triton_penalties
from attemper.methods import explicit
from attemper.methods.squares import linear_output_square

FLOAT32, HALF = 1e-4, 2e-2


def packed(
    batch: int, tokens: int, heads: int, width: int, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys as they lie in the output of one projection, and their biases in float32."""
    qkv = size * torch.randn(batch, tokens, 3 * heads * width)
    bias = torch.randn(2, heads * width)
    q, k, _ = qkv.to(dtype).chunk(3, -1)
    return q.detach().requires_grad_(), k.detach().requires_grad_(), *(b.requires_grad_() for b in bias.unbind())


def by_formula(q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None, heads: int) -> Tensor:
    """Every logit written out, in float64."""
    left, right = (
        (x.double() if b is None else x.double() - b).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, b in ((q, q_bias), (k, k_bias))
    )
    return (left @ right.mT).square().sum((2, 3))


def assert_close(given: Tensor, expected: Tensor, tolerance: float) -> None:
    assert given.shape == expected.shape
    assert (given.double() - expected.double()).norm() <= tolerance * expected.double().norm()


def compare(q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None, heads: int, tolerance: float) -> None:
    """Values and all gradients against the formula."""
    leaves = [x for x in (q, k, q_bias, k_bias) if x is not None]
    given, expected = (f(q, k, q_bias, k_bias, heads) for f in (triton_penalties.logit_squares, by_formula))
    assert given.dtype == torch.float32
    assert_close(given, expected, tolerance)
    weight = torch.rand(given.shape) + 0.5
    ours, theirs = (torch.autograd.grad((out * weight).sum(), leaves) for out in (given, expected))
    for leaf, one, other in zip(leaves, ours, theirs, strict=True):
        assert one.dtype == leaf.dtype
        assert_close(one, other, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter cannot multiply bfloat16
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (17, 32), (65, 40), (197, 64), (64, 8)], ids=lambda x: str(x))
def test_squares_and_gradients_are_those_of_the_formula(tokens: int, width: int, dtype: torch.dtype) -> None:
    q, k, q_bias, k_bias = packed(2, tokens, 2, width, dtype)
    assert triton_penalties.serves(q, k, 2)
    assert not q.is_contiguous()
    compare(q, k, q_bias, k_bias, 2, FLOAT32 if dtype == torch.float32 else HALF)


@pytest.mark.parametrize("biased", ["neither", "queries", "keys"])
def test_either_bias_may_be_absent(biased: str) -> None:
    q, k, q_bias, k_bias = packed(1, 20, 3, 16)
    compare(q, k, q_bias if biased == "queries" else None, k_bias if biased == "keys" else None, 3, FLOAT32)


def test_queries_and_keys_of_different_lengths() -> None:
    q, _, q_bias, _ = packed(2, 70, 2, 16)
    _, k, _, k_bias = packed(2, 9, 2, 16)
    compare(q, k, q_bias, k_bias, 2, FLOAT32)


def test_wide_heads_in_half_precision() -> None:
    q, k, q_bias, k_bias = packed(1, 40, 1, 128, torch.float16)
    assert triton_penalties.serves(q, k, 1)
    compare(q, k, q_bias, k_bias, 1, HALF)


def test_grams_beyond_the_range_of_float16() -> None:
    q, k, _, _ = packed(1, 197, 1, 16, torch.float16, size=40.0)
    assert (q.double().mT @ q.double()).max() > 65504 * 2
    given = triton_penalties.logit_squares(q, k, None, None, 1)
    grads = torch.autograd.grad(given.sum() * 1e-6, (q, k))
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    expected = torch.autograd.grad(by_formula(*exact, None, None, 1).sum() * 1e-6, exact)
    for one, other in zip(grads, expected, strict=True):
        assert one.isfinite().all()
        assert_close(one, other, HALF)


def test_second_gradients() -> None:
    q, k, q_bias, k_bias = packed(1, 6, 2, 16)
    leaves = (q, k, q_bias, k_bias)
    results = []
    for f in (triton_penalties.logit_squares, by_formula):
        first = torch.autograd.grad(f(*leaves, 2).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(x.double().square().sum() for x in first), leaves))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, 1e-3)


def test_what_the_kernels_do_not_serve() -> None:
    q, k, _, _ = packed(1, 4, 2, 16)
    assert not triton_penalties.serves(q.double(), k.double(), 2)
    assert not triton_penalties.serves(q, k[..., :16], 2), "keys that heads share"
    assert not triton_penalties.serves(*packed(1, 4, 1, 96)[:2], 1), "Gram matrices that fit on no chip"


@pytest.mark.parametrize("biased", [True, False])
def test_operators_keep_torchs_rules(biased: bool) -> None:
    q, k, q_bias, k_bias = packed(2, 9, 2, 16)
    biases = (q_bias, k_bias) if biased else (None, None)
    torch.library.opcheck(torch.ops.attemper.logit_squares, (q, k, *biases, 2))
    torch.library.opcheck(
        torch.ops.attemper.logit_squares_backward,
        (torch.rand(2, 2), *(None if x is None else x.detach() for x in (q, k, *biases))),
    )


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train()


def step(recipe: str, compiled: bool = False) -> tuple[float, dict[str, Tensor]]:
    model, x = encoder(), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_bias.normal_()
    tempered = attemper.apply(model, recipe)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    loss = run(x).square().mean()
    penalty = tempered.penalty()
    (loss + penalty).backward()
    return penalty.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["explicit(q=0.3)", "explicit(k=0.3)", "explicit(q=0.1, k=0.2, v=0.1, ff=0.1)"])
def test_a_model_takes_the_same_step_by_kernel_and_by_torch(recipe: str, compiled: bool, monkeypatch) -> None:
    calls = []
    original = triton_penalties.logit_squares
    if not compiled:
        monkeypatch.setattr(triton_penalties, "logit_squares", lambda *a: calls.append(a) or original(*a))
    penalty, grads = step(recipe, compiled)
    assert compiled or calls
    with monkeypatch.context() as patch:
        patch.setattr(triton_penalties, "serves", lambda *_: False)
        expected, theirs = step(recipe)
    assert penalty == pytest.approx(expected, rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6)


def test_an_exact_expectation_leaves_it_to_torch(monkeypatch) -> None:
    monkeypatch.setattr(triton_penalties, "logit_squares", None)
    step("explicit(q=0.3, expectation=exact)")
    step("explicit(q=0.3, heads=joint)")
    assert explicit.coefficients(0.2, "exact")[1] > 0


def test_mapped_calls_are_left_to_torch() -> None:
    q, k = torch.randn(3, 2, 9, 32), torch.randn(3, 2, 9, 32)
    assert triton_penalties.serves(q[0], k[0], 2)
    served = []
    torch.func.vmap(lambda q, k: served.append(triton_penalties.serves(q, k, 2)) or q)(q, k)
    assert served == [False]


def test_a_compiled_backward_pass_calls_the_kernel() -> None:
    targets: list[object] = []

    def note(graph: torch.fx.GraphModule, inputs: object) -> object:
        targets.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    q, k, q_bias, k_bias = packed(1, 9, 2, 16)
    run = torch.compile(triton_penalties.logit_squares, backend=aot_autograd(fw_compiler=nop, bw_compiler=note))
    run(q, k, q_bias, k_bias, 2).sum().backward()
    assert targets.count(torch.ops.attemper.logit_squares_backward.default) == 1


# --------------------------------------------------------------------------------------------------- layers' outputs
def check_output_square(out: Tensor, bias: Tensor, tolerance: float) -> None:
    """Value and gradients against the formula in float64."""
    leaves = [out.detach().requires_grad_(), bias.detach().requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    given, expected = triton_penalties.output_square(*leaves), (exact[0] - exact[1]).square().sum()
    assert given.dtype == torch.float32
    assert_close(given, expected, tolerance)
    ours, theirs = (torch.autograd.grad(0.3 * value, some) for value, some in ((given, leaves), (expected, exact)))
    for leaf, one, other in zip(leaves, ours, theirs, strict=True):
        assert one.dtype == leaf.dtype
        assert_close(one, other, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "tokens", "columns"), [(1, 1, 8), (3, 197, 40), (2, 65, 300), (9, 64, 128)])
def test_the_square_of_an_output(batch: int, tokens: int, columns: int, dtype: torch.dtype) -> None:
    out = torch.randn(batch, tokens, columns).to(dtype)
    check_output_square(out, torch.randn(columns), 1e-5 if dtype == torch.float32 else 1e-2)


def test_the_square_of_a_part_of_an_output_and_of_heads() -> None:
    packed = torch.randn(2, 70, 3 * 32)
    check_output_square(packed[..., 64:], torch.randn(32), 1e-5)
    heads = torch.randn(2, 3, 70, 16).transpose(1, 2)  # (B, N, H, e), the elements of a token far apart
    check_output_square(heads, torch.randn(3, 16), 1e-5)


def test_second_gradients_of_the_square_of_an_output() -> None:
    out, bias = torch.randn(2, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    results = []
    for square in (triton_penalties.output_square, lambda out, bias: (out - bias).square().sum()):
        first = torch.autograd.grad(square(out, bias), (out, bias), create_graph=True)
        results.append(torch.autograd.grad(first[0].pow(3).sum() + first[1].pow(2).sum(), (out, bias)))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, 1e-5)


def test_opcheck_of_the_square_of_an_output() -> None:
    out, bias = torch.randn(2, 20, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    torch.library.opcheck(torch.ops.attemper.output_square, (out, bias))
    torch.library.opcheck(torch.ops.attemper.scaled_difference, (out.detach(), bias.detach(), torch.tensor(0.5)))


def test_penalties_of_a_layer_are_taken_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = torch.randn(2, 30, 16), nn.Linear(16, 48)
    results = []
    for reads in (triton_penalties.reads, lambda out: False):
        monkeypatch.setattr(triton_penalties, "reads", reads)
        assert triton_penalties.reads(x) == (len(results) == 0)
        square = linear_output_square(layer(x), layer.bias, x, layer.weight)
        results.append((square, *torch.autograd.grad(square, tuple(layer.parameters()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
