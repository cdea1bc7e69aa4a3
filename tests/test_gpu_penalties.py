"""Penalties on a GPU: close to what float64 gives on the same numbers, compiled or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.kernels import penalties as triton_penalties
from attemper.kernels.attention.packed import parts
from attemper.kernels.implementations import triton as triton_attention
from attemper.methods.squares import linear_output_square, product_square
from attemper.ops.call import make_call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_close(given: Tensor, expected: Tensor, tolerance: float) -> None:
    assert given.shape == expected.shape
    assert (given.double() - expected.double()).norm() <= tolerance * expected.double().norm()


@pytest.mark.parametrize("width", [64, 384])
def test_squares_of_logits_from_products_of_bfloat16(width: int) -> None:
    sides = [torch.randn(4, 2, 197, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        left, right = (side.to(dtype).requires_grad_() for side in sides)
        total = product_square(left, right)
        results.append((total, *torch.autograd.grad(total, (left, right))))
    for given, expected in zip(*results, strict=True):
        assert_close(given, expected, 5e-3)


def by_formula(q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None, heads: int) -> Tensor:
    """Every logit written out."""
    left, right = (
        (x if bias is None else x - bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, bias in ((q, q_bias), (k, k_bias))
    )
    return (left @ right.mT).square().sum((2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width"),
    [(3, 1, 2, 16), (2, 17, 3, 32), (4, 65, 3, 40), (16, 197, 6, 64), (2, 1030, 2, 64), (3, 100, 2, 128)],
)
def test_squares_of_logits_by_kernel(
    batch: int, tokens: int, heads: int, width: int, biased: bool, dtype: torch.dtype
) -> None:
    q, k, _ = torch.randn(batch, tokens, 3 * heads * width, device="cuda").to(dtype).chunk(3, -1)
    if not triton_penalties.serves(q, k, heads):
        assert (dtype, width) == (torch.float32, 128)
        pytest.skip("Gram matrices of 128 × 128 in float32")
    biases = torch.randn(2, heads * width, device="cuda").unbind() if biased else ()
    given = [x.detach().requires_grad_() for x in (q, k, *biases)]
    exact = [x.detach().double().requires_grad_() for x in given]
    weight = torch.rand(batch, heads, device="cuda") / tokens  # so that float16 can hold the gradients
    absent = () if biased else (None, None)
    results = []
    for f, leaves in ((triton_penalties.logit_squares, given), (by_formula, exact)):
        out = f(*leaves, *absent, heads)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("wanted", [("v",), ("qk",), ("v", "qk")], ids=" ".join)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width"),
    [(3, 1, 2, 16), (4, 65, 3, 32), (4, 65, 2, 40), (16, 197, 6, 64), (2, 577, 2, 64)],
)
def test_gradients_that_attention_adds_for_penalties(
    batch: int, tokens: int, heads: int, width: int, wanted: tuple[str, ...], biased: bool, dtype: torch.dtype
) -> None:
    qkv = torch.randn(batch, tokens, 3 * heads * width, device="cuda").to(dtype).requires_grad_()
    bias = torch.randn(3 * heads * width, device="cuda").requires_grad_() if biased else None
    given = [qkv] if bias is None else [qkv, bias]
    exact = [x.detach().double().requires_grad_() for x in given]
    dout = torch.randn(batch, heads, tokens, width, device="cuda")
    weights = {"v": 0.5, "qk": 0.05 / tokens}
    results = []
    for leaves in (given, exact):
        q, k, v = parts(leaves[0], heads)
        if leaves is given:
            call = make_call(q, k, v, None, False, None, (), None, leaves[0])
            out, parts_of = triton_attention.attention_and_squares(call, bias, dict.fromkeys(wanted, 1.0))
            squares = {name: square.sum() for name, square in parts_of.items()}
        else:
            out = (q @ k.mT / width**0.5).softmax(-1) @ v
            q, k, v = parts(leaves[0] if bias is None else leaves[0] - leaves[1], heads)
            squares = {"v": v.square().sum(), "qk": (q @ k.mT).square().sum()}
        total = (out * dout).sum() + sum(weights[name] * squares[name] for name in wanted)
        results.append((out, *(squares[name] for name in wanted), *torch.autograd.grad(total, leaves)))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 256), (256, 64)])
def test_squares_of_a_layers_output_in_bfloat16(inputs: int, outputs: int) -> None:
    x = torch.randn(8, 197, inputs, device="cuda")
    layer = nn.Linear(inputs, outputs, device="cuda")

    def square(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return linear_output_square(layer(x), layer.bias, x, layer.weight)

    expected = torch.autograd.grad((x @ layer.weight.T).square().sum(), layer.weight)[0]
    for run in (square, torch.compile(square, fullgraph=True)):
        given = torch.autograd.grad(run(x), (layer.weight, layer.bias))
        assert_close(given[0], expected, 1e-2)
        # What the layer adds for its bias is taken away again, up to what bfloat16 rounds in sums over all tokens.
        assert given[1].norm() <= 2e-2 * 2 * (x @ layer.weight.T).abs().sum((0, 1)).norm()


def step(recipe: str, compiled: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 2, 256, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda().train()
    x = torch.randn(8, 65, 128, device="cuda")
    for block in model.layers:
        nn.init.normal_(block.self_attn.in_proj_bias)
    tempered = attemper.apply(model, recipe)
    run = torch.compile(model, fullgraph=True) if compiled else model
    with torch.autocast("cuda", torch.bfloat16):
        loss = run(x).square().mean()
    (loss + tempered.penalty()).backward()
    return [row.value for row in tempered.penalties()], {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "recipe", ["explicit(q=0.1, ff=0.1)", "explicit(q=0.1, k=0.1, v=0.1, ff=0.1)", "explicit(av=0.1, ff=0.1)"]
)
def test_a_compiled_step_takes_the_same_penalties(recipe: str) -> None:
    (values, grads), (expected, theirs) = step(recipe, True), step(recipe, False)
    assert values == pytest.approx(expected, rel=1e-2)
    for name, grad in grads.items():
        # What a penalty gives to a bias cancels, but for what was rounded in sums as large as those of the weight.
        scale = max(theirs[name].norm(), theirs[name.replace("bias", "weight")].norm())
        assert (grad - theirs[name]).norm() <= 5e-2 * scale, name
