"""graying(svd, exact=true): κ becomes κ^ε, and the gradient is right where singular values repeat or are zero."""

from __future__ import annotations

import copy

import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attemper
from attemper.errors import ParameterError
from attemper.methods import TokenGraying
from attemper.methods.exact_power import power_exactly
from families import FAMILIES, build
from grays import by_svd, distance, map_image, photographs, randn

SHAPES = [(7, 4), (4, 7), (5, 5)]
BOTH = pytest.mark.parametrize("rescale", [True, False])


def orthonormal(n, r, seed):
    return torch.linalg.qr(randn(n, r, seed=seed))[0]


def with_values(values, shape):
    """A matrix of this shape with these singular values, and zeros where there are fewer."""
    s = torch.tensor(values, dtype=torch.float64)
    return (orthonormal(shape[0], len(s), 1) * s) @ orthonormal(shape[1], len(s), 2).T


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(2, 12), columns=st.integers(2, 12), digits=st.floats(0, 8), eps=st.floats(0.1, 1),
    rescale=st.booleans(), size=st.sampled_from([1e-12, 1.0, 1e12]),
)  # fmt: skip
def test_the_condition_number_becomes_its_power_to_a_millionth(rows, columns, digits, eps, rescale, size):
    # Singular values are met to about n units in the last place of the largest: at κ = 1e8 to 12 · 2e-16 · 1e8 of the
    # smallest, 3e-7, and those of X̃ to less.
    count = min(rows, columns)
    values = size * torch.logspace(0, -digits, count, dtype=torch.float64)
    x = with_values(values.tolist(), (rows, columns))
    s = torch.linalg.svdvals(power_exactly(x, eps, rescale))
    assert (s[0] / s[-1]).item() == pytest.approx(10 ** (digits * eps), rel=1e-6)
    assert s[0].item() == pytest.approx(size if rescale else 1.0, rel=1e-9)


def test_it_is_far_closer_than_the_fast_route_on_photographs():
    x = photographs()[::13].double()
    s = torch.linalg.svdvals(x)
    some = s[:, -1] > 1e-8 * s[:, 0]
    assert some.sum() > 10
    wanted = (s[some, 0] / s[some, -1]) ** 0.7
    errors = []
    for exact in (True, False):
        after = torch.linalg.svdvals(TokenGraying("svd", exact=exact).gray(x[some]))
        errors.append(((after[:, 0] / after[:, -1]) / wanted - 1).abs().max().item())
    assert errors[0] < 1e-6
    assert errors[1] > 1e-2


@BOTH
@pytest.mark.parametrize("shape", [(8, 6), (6, 8)])
def test_zero_singular_values_stay_zero(shape, rescale):
    x = with_values([3.0, 1.0, 0.2], shape)
    out = power_exactly(x, 0.5, rescale)
    s = torch.linalg.svdvals(out)
    expected = torch.tensor([3.0, 3**0.5, 0.6**0.5], dtype=torch.float64) / (1 if rescale else 3)
    torch.testing.assert_close(s[:3], expected, atol=1e-12, rtol=0)
    assert s[3:].max() < 1e-14
    even = torch.full((2, 8, 6), 0.3, dtype=torch.float64)
    if rescale:
        torch.testing.assert_close(power_exactly(even, 0.5), even, atol=1e-14, rtol=0)


@BOTH
def test_an_image_of_zeros_is_unchanged_beside_others(rescale):
    x = randn(3, 8, 6)
    x[1] = 0
    x.requires_grad_()
    out = power_exactly(x, 0.7, rescale)
    out.square().sum().backward()
    assert torch.equal(out[1], torch.zeros(8, 6, dtype=x.dtype))
    assert x.grad.isfinite().all()
    torch.testing.assert_close(out[0], power_exactly(x[:1], 0.7, rescale)[0])


@settings(max_examples=20, deadline=None)
@given(
    rank=st.integers(1, 4), rows=st.integers(5, 40), columns=st.integers(5, 40), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_what_rounding_to_a_type_makes_of_zeros_stays_as_small(rank, rows, columns, seed, dtype):
    x = (randn(rows, rank, seed=seed) @ randn(rank, columns, seed=seed + 1)).to(dtype)
    rounded = torch.linalg.svdvals(x.double())[rank:]
    after = torch.linalg.svdvals(power_exactly(x, 0.5).double())
    # What is left is the rounding of the result, whose entries together are at most √rank as long as σ_max.
    assert (after[rank:] <= torch.finfo(dtype).eps * after.norm()).all()
    assert (rounded <= torch.finfo(dtype).eps * torch.linalg.matrix_norm(x.double())).all()


def test_a_matrix_that_is_not_finite_gives_nan_and_leaves_the_others_alone():
    x = randn(4, 5, 3)
    x[1, 0, 0], x[2, 4, 2] = torch.nan, -torch.inf
    x.requires_grad_()
    out = power_exactly(x, 0.7)
    assert out[1:3].isnan().all()
    torch.testing.assert_close(out[[0, 3]], power_exactly(x[[0, 3]], 0.7), rtol=0, atol=0)
    out[[0, 3]].square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("method", [TokenGraying("svd", exact=True), TokenGraying("svd"), TokenGraying("dct")], ids=str)
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_to_gray_is_given_back(method, shape):
    x = torch.zeros(shape, requires_grad=True)
    out = method.gray(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


# -------------------------------------------------------------------------------------------------------- the gradient
VALUES = {
    "distinct": [2.0, 1.1, 0.7, 0.5, 0.3],
    "repeated": [2.0, 0.7, 0.7, 0.7, 0.3],
    "nearly repeated": [2.0, 0.7, 0.7 * (1 + 1e-13), 0.7 * (1 - 1e-9), 0.3],
}


def by_blocks(x, direction, eps, rescale):
    """The derivative of X̃ = σ_max^(1−ε) X (XᵀX)^((ε−1)/2) along a direction, without any decomposition's derivative.

    f([[A, E], [0, A]]) has f's derivative at A along E in its corner, whatever repeats among A's eigenvalues.
    """
    if x.shape[0] < x.shape[1]:
        return by_blocks(x.T, direction.T, eps, rescale).T
    n = x.shape[1]
    gram, change = x.T @ x, x.T @ direction + direction.T @ x
    block = torch.cat([torch.cat([gram, change], 1), torch.cat([torch.zeros_like(gram), gram], 1)])
    power = torch.from_numpy(scipy.linalg.fractional_matrix_power(block.numpy(), (eps - 1) / 2)).real
    u, s, v = torch.linalg.svd(x)
    top, of_top = s[0], u[:, 0] @ direction @ v[0]
    exponent = 1 - eps if rescale else -eps
    moved = direction @ power[:n, :n] + x @ power[:n, n:]
    return top**exponent * moved + exponent * top ** (exponent - 1) * of_top * (x @ power[:n, :n])


def along(x, weight, direction, eps, rescale):
    """⟨weight, dX̃(direction)⟩ by our backward pass."""
    x = x.clone().requires_grad_()
    (power_exactly(x, eps, rescale) * weight).sum().backward()
    return (x.grad * direction).sum().item()


@BOTH
@pytest.mark.parametrize("values", list(VALUES))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_that_of_the_matrix_function(shape, values, rescale):
    x = with_values(VALUES[values][: min(shape)], shape)
    weight = randn(*shape, seed=3)
    for seed in range(3):
        direction = randn(*shape, seed=10 + seed)
        expected = (weight * by_blocks(x, direction, 0.7, rescale)).sum().item()
        # The block holds XᵀX and its power XᵀX's derivative: κ(X)⁴ = 2e3 units in the last place are lost, 5e-13.
        assert along(x, weight, direction, 0.7, rescale) == pytest.approx(expected, rel=1e-10, abs=1e-10)


def turned(x, seed):
    """A direction KX + XL with antisymmetric K and L, and by which X̃ moves along it: KX̃ + X̃L. No value changes."""
    left, right = (randn(side, side, seed=seed + side) for side in x.shape)
    left, right = left - left.T, right - right.T
    return lambda y: left @ y + y @ right


@BOTH
@pytest.mark.parametrize("values", [[2.0, 0.5], [2.0, 0.5, 0.5], [2.0], [1.0, 1.0, 0.3], [1.0, 1.0, 1.0, 1.0]])
@pytest.mark.parametrize("shape", SHAPES)
def test_turning_a_matrix_turns_what_becomes_of_it_at_any_rank(shape, values, rescale):
    x, weight = with_values(values, shape), randn(*shape, seed=3)
    move = turned(x, 20)
    expected = (weight * move(by_svd(x, 0.6, rescale))).sum().item()
    assert along(x, weight, move(x), 0.6, rescale) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_inside_of_its_spaces_a_matrix_of_low_rank_has_the_gradient_of_a_small_one(shape, rescale):
    values = [2.0, 0.5, 0.5]
    u, v = orthonormal(shape[0], 3, 4), orthonormal(shape[1], 3, 5)
    small = with_values(values, (3, 3))
    direction, weight = randn(3, 3, seed=6), randn(*shape, seed=7)
    expected = (u.T @ weight @ v * by_blocks(small, direction, 0.7, rescale)).sum().item()
    given = along(u @ small @ v.T, weight, u @ direction @ v.T, 0.7, rescale)
    assert given == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 0.3]])
def test_where_several_values_are_the_largest_scaling_still_scales(values):
    x, weight = with_values(values, (6, 4)), randn(6, 4, seed=3)
    expected = (weight * by_svd(x, 0.7)).sum().item()
    assert along(x, weight, x, 0.7, True) == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert along(x, weight, x, 0.7, False) == pytest.approx(0.0, abs=1e-10)


def test_a_second_derivative_is_refused_instead_of_wrong():
    x = randn(4, 3).requires_grad_()
    (grad,) = torch.autograd.grad(power_exactly(x, 0.7).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_mapped_call_is_the_same():
    x = randn(3, 2, 5, 4)
    torch.testing.assert_close(torch.func.vmap(lambda y: power_exactly(y, 0.7))(x), power_exactly(x, 0.7))


# --------------------------------------------------------------------------------------------------- as a method
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_neither_counts_nor_changes(side):
    method = TokenGraying("svd", where="tokens", exact=True)
    x, lengths = randn(4, 9, 6), (9, 5, 1, 0)
    real = torch.stack([torch.arange(9) < length for length in lengths])
    real = real.flip(1) if side == "left" else real
    out = method.gray(x.requires_grad_(), real)
    for sample in range(3):
        alone = by_svd(x[sample, real[sample]], 0.7)
        torch.testing.assert_close(out[sample, real[sample]], alone, atol=1e-12, rtol=0)
    assert torch.equal(out[~real], x[~real])
    (out * real[..., None]).square().sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad[~real] == 0).all()


@pytest.mark.parametrize("where", ["patches", "tokens"])
def test_it_acts_in_a_model_as_a_decomposition_says(where):
    family = next(family for family in FAMILIES if family.name == "timm-vit")
    model = build(family).double().eval()
    plain, images = copy.deepcopy(model), randn(2, 3, 32, 32)
    recipe = f"graying(svd, where={where}, rescale=false, exact=true)"
    if where == "patches":
        recipe = recipe.replace("where=patches, ", "")
    tempered = attemper.apply(model, recipe)
    assert attemper.render(tempered.methods) == recipe
    assert attemper.parse(recipe) == list(tempered.methods)
    if where == "patches":
        patch = plain.patch_embed.patch_size
        expected = plain(map_image(TokenGraying("svd", rescale=False, exact=True), images, patch))
    else:
        plain.blocks[0].register_forward_pre_hook(lambda _, args: (by_svd(args[0], 0.7, False), *args[1:]))
        expected = plain(images)
    torch.testing.assert_close(model(images), expected, atol=1e-9, rtol=0)
    model.train()(images.requires_grad_()).sum().backward()
    assert images.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_come_back_and_it_computes_in_float64(dtype):
    x = randn(2, 8, 6).to(dtype)
    out = TokenGraying("svd", exact=True).gray(x)
    assert out.dtype == dtype
    assert distance(out.double(), by_svd(x, 0.7)) < 2 * torch.finfo(dtype).eps


def test_only_singular_values_can_be_exact():
    with pytest.raises(ParameterError, match="exact belongs to kind=svd, and kind is dct"):
        TokenGraying("dct", exact=True)
    with pytest.raises(ParameterError, match="exact must be true or false, got 1"):
        TokenGraying("svd", exact=1)


@pytest.mark.slow
def test_compiled_it_is_the_same():
    x = randn(2, 6, 5).requires_grad_()
    compiled = torch.compile(lambda y: power_exactly(y, 0.7), backend="aot_eager", fullgraph=True)
    out, expected = compiled(x), power_exactly(x, 0.7)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)))
