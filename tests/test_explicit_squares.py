"""Sums of squares of a layer's output: those of the plain formula, gradients and second gradients included."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import attemper
from attemper.methods.squares import biased_square, linear_output_square

SHAPES = [(3, 7), (7, 3), (4, 4)]


def layer(inputs: int, outputs: int, with_bias: bool) -> list[Tensor]:
    shapes = [(2, 5, inputs), (outputs, inputs), *([(outputs,)] if with_bias else [])]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_output_square(F.linear(x, weight, bias), bias, x, weight)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_layers_square_and_its_gradients_are_those_of_the_plain_formula(inputs, outputs, with_bias):
    leaves = layer(inputs, outputs, with_bias)
    expected = (leaves[0] @ leaves[1].T).square().sum()
    torch.testing.assert_close(ours(*leaves), expected)
    theirs = torch.autograd.grad(expected, leaves[:2])
    given = torch.autograd.grad(ours(*leaves), leaves)
    torch.testing.assert_close(given[:2], theirs)
    if with_bias:
        torch.testing.assert_close(given[2], torch.zeros_like(given[2]), atol=1e-10, rtol=0)
    assert torch.autograd.gradcheck(ours, leaves)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_gradients_of_output_and_bias_are_those_of_autograd(inputs, outputs):
    x, weight, bias = layer(inputs, outputs, True)
    out = F.linear(x, weight, bias).detach().requires_grad_()
    expected = torch.autograd.grad((out - bias).square().sum(), (out, bias))
    given = torch.autograd.grad(linear_output_square(out, bias, x, weight), (out, bias))
    torch.testing.assert_close(given, expected)
    square = linear_output_square(out, bias, x, weight)
    assert torch.autograd.grad(square, (x, weight), allow_unused=True) == (None, None)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_second_gradients_are_right(inputs, outputs):
    assert torch.autograd.gradgradcheck(ours, layer(inputs, outputs, True))


def test_a_bias_of_several_axes():
    out, bias = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((2, 5, 3, 4), (3, 4)))
    expected = (out - bias).square().sum()
    torch.testing.assert_close(biased_square(out, bias), expected)
    given = torch.autograd.grad(biased_square(out, bias), (out, bias))
    torch.testing.assert_close(given, torch.autograd.grad(expected, (out, bias)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (40, 24)])
def test_in_half_precision_sums_are_wide_and_gradients_have_the_dtype_of_their_tensors(inputs, outputs, dtype):
    x, weight, bias = (t.detach().to(dtype).double() for t in layer(inputs, outputs, True))
    out = F.linear(x, weight, bias).to(dtype).requires_grad_()
    half = bias.to(dtype).requires_grad_()
    square = linear_output_square(out, half, x.to(dtype), weight.to(dtype))
    assert square.dtype == torch.float32
    difference = out.detach().double() - bias
    assert square.item() == pytest.approx(difference.square().sum().item(), rel=1e-5)
    d_out, d_bias = torch.autograd.grad(square, (out, half))
    assert d_out.dtype == d_bias.dtype == dtype
    torch.testing.assert_close(d_out.double(), 2 * difference, rtol=1e-2, atol=1e-6)
    expected = -2 * difference.sum((0, 1))
    assert (d_bias - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_mapped_over_layers(inputs, outputs):
    leaves = [torch.stack([t, 2 * t]).detach() for t in layer(inputs, outputs, True)]
    mapped = torch.func.vmap(torch.func.grad(ours, argnums=(0, 1, 2)))(*leaves)
    for i in range(2):
        one = [t[i].requires_grad_() for t in leaves]
        for given, expected in zip(mapped, torch.autograd.grad(ours(*one), one), strict=True):
            torch.testing.assert_close(given[i], expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_activation_may_overwrite_the_output(compiled):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation=nn.ReLU(inplace=True))
    model, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train(), torch.randn(2, 5, 16)
    tempered = attemper.apply(model, "explicit(v=0.1, av=0.1, ff=0.1)")
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    (run(x).square().mean() + tempered.penalty()).backward()
    mlp = model.layers[0]
    with torch.no_grad():
        attended = mlp.norm1(x + mlp.self_attn(x, x, x)[0])
    expected = 0.1 * 0.2**2 / 2 / 10 * (attended @ mlp.linear1.weight.T).square().sum()
    given = next(row.value for row in tempered.penalties() if row.component == "ff1")
    assert given == pytest.approx(expected.item(), rel=1e-5)


def sums_of_backward(recipe: str | None) -> int:
    """How many tensors of all tokens the compiled backward pass of an encoder sums up."""
    torch.compiler.reset()  # so that no shape counts as dynamic
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train(), torch.randn(2, 50, 16)
    tempered = None if recipe is None else attemper.apply(model, recipe)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=nop,
        bw_compiler=keep,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    loss = torch.compile(model, backend=backend, fullgraph=True)(x).square().mean()
    (loss if tempered is None else loss + tempered.penalty()).backward()
    assert len(graphs) == 1
    sums = (node.args[0] for node in graphs[0].graph.nodes if node.target is torch.ops.aten.sum.dim_IntList)
    return sum(summed.meta["val"].numel() >= x.numel() for summed in sums)


def test_a_compiled_backward_pass_sums_no_large_tensor_for_a_bias():
    # The columns of out − b are summed in forward, where a compiler reads out for the squares anyway.
    assert sums_of_backward("explicit(v=0.1, av=0.1, ff=0.1)") == sums_of_backward(None)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_compiled_squares_have_the_same_gradients(inputs, outputs):
    leaves = layer(inputs, outputs, True)
    run = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(*leaves), ours(*leaves))
    out, bias = F.linear(*leaves).detach().requires_grad_(), leaves[2]

    def square(out: Tensor, bias: Tensor) -> Tensor:
        return linear_output_square(out, bias, leaves[0].detach(), leaves[1].detach())

    given = torch.autograd.grad(torch.compile(square, backend="aot_eager", fullgraph=True)(out, bias), (out, bias))
    torch.testing.assert_close(given, torch.autograd.grad((out - bias).square().sum(), (out, bias)))
