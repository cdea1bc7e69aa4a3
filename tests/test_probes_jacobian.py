"""The whole Jacobian of a branch: its singular values, what a norm loses, and σ_max where the whole is too large."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attemper.errors import ParameterError
from attemper.probes import branch_jacobian, null_directions


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def orthogonal(n):
    return torch.linalg.qr(double(n, n)).Q


def singular_values_by_autograd(function, x):
    """Largest first, of the Jacobian that torch computes row by row."""
    whole = torch.autograd.functional.jacobian(function, x)
    return torch.linalg.svdvals(whole.reshape(-1, x.numel()))


# ------------------------------------------------------------------------------------------------------- any function
@pytest.mark.parametrize("smallest", [0.5, 1e-6, 1e-11])
def test_a_linear_map_has_the_singular_values_that_it_was_made_from(smallest):
    sigma = torch.logspace(1, math.log10(smallest), 24, dtype=torch.float64)
    weight = orthogonal(24) @ torch.diag(sigma) @ orthogonal(24)
    found = branch_jacobian(lambda x: (x.flatten() @ weight).view(x.shape), double(1, 4, 6))
    # Products and the decomposition round to some 1e-15 of the largest value, whatever the smallest one is.
    assert found.largest == pytest.approx(10, rel=1e-12)
    assert found.smallest == pytest.approx(smallest, abs=1e-13)
    assert found.condition == pytest.approx(10 / smallest, rel=1e-13 / smallest)
    assert (found.left_out, found.coordinates, found.whole, found.reason) == (0, 24, True, "")
    with_skip = branch_jacobian(lambda x: (x.flatten() @ weight).view(x.shape), double(1, 4, 6), skip=True)
    assert with_skip.condition == pytest.approx(torch.linalg.cond(weight + torch.eye(24)).item(), rel=1e-9)


def test_maps_between_spaces_of_other_sizes_have_as_many_values_as_the_smaller_one():
    for into in (3, 9):
        weight = double(into, 6)
        found = branch_jacobian(lambda x, weight=weight: F.linear(x, weight), double(1, 6))
        assert found.condition == pytest.approx(torch.linalg.cond(weight).item(), rel=1e-10)
    with pytest.raises(ParameterError, match=r"skip needs an output like the input \(1, 6\); got \(1, 9\)"):
        branch_jacobian(lambda x: F.linear(x, weight), double(1, 6), skip=True)


def test_a_function_that_loses_a_direction_has_no_finite_condition_and_says_so():
    found = branch_jacobian(lambda x: x * torch.tensor([1.0, 2.0, 0.0]), torch.ones(3))
    assert math.isinf(found.condition)
    assert found.reason == "1 of 3 singular values that count are 0 up to rounding"
    assert branch_jacobian(lambda x: torch.ones(3, requires_grad=True) * 2.0, torch.ones(3)).largest == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_computed_in_float64_whatever_the_weights_are(dtype):
    linear, x = nn.Linear(5, 5).to(dtype), double(2, 5)

    def casting(x):
        return linear(x.to(torch.float32)).float().softmax(-1, dtype=torch.float32).to(dtype)

    def plain(x):
        return F.linear(x, linear.weight.double(), linear.bias.double()).softmax(-1)

    expected = singular_values_by_autograd(plain, x)
    found = branch_jacobian(casting, x)
    assert found.largest == pytest.approx(expected[0].item(), rel=1e-12)
    # Every softmax loses the sum of its logits. In lower precision the loss would be one of 1e-8 or more.
    assert found.smallest < 1e-15
    assert linear.weight.dtype == dtype
    assert linear.weight.grad is None


def test_bad_input_is_named():
    with pytest.raises(ParameterError, match=r"needs a tensor of floating-point numbers .*; got torch.int64 \(3,\)"):
        branch_jacobian(lambda x: x, torch.arange(3))
    with pytest.raises(ParameterError, match="returns a tensor; this one returns str"):
        branch_jacobian(lambda x: "nothing", torch.ones(3))
    with pytest.raises(ParameterError, match="limit is 0; it must be a number of coordinates, at least 1"):
        branch_jacobian(lambda x: x, torch.ones(3), limit=0)


# --------------------------------------------------------------------------------------------------------------- norms
@pytest.mark.parametrize("per_token", [2, 1])
def test_what_a_norm_loses_is_left_out_and_counted(per_token):
    norm = nn.LayerNorm(8) if per_token == 2 else nn.RMSNorm(8, eps=1e-5)
    linear, x = nn.Linear(8, 8), double(1, 5, 8)
    found = branch_jacobian(lambda x: linear(norm(x)), x, norm=norm)

    def by_hand(x):
        centred = x - x.mean(-1, keepdim=True) if per_token == 2 else x
        normed = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return normed @ linear.weight.double().T + linear.bias.double()

    sigma = singular_values_by_autograd(by_hand, x)
    kept = 40 - 5 * per_token
    assert found.left_out == 5 * per_token
    assert sigma[kept] < 1e-3 * sigma[kept - 1], "the others are those of the norm"
    # The lost directions and the others meet in the decomposition by what ε leaves of them: its square, some 1e-9.
    assert found.condition == pytest.approx((sigma[0] / sigma[kept - 1]).item(), rel=1e-6)
    assert f"{5 * per_token} directions that the norm loses" in found.reason


def test_without_epsilon_the_others_are_those_of_the_decomposition_to_all_digits():
    norm, linear, x = nn.LayerNorm(6, eps=1e-300), nn.Linear(6, 6), double(1, 4, 6)
    found = branch_jacobian(lambda x: linear(norm(x)), x, norm=norm)
    sigma = singular_values_by_autograd(lambda x: linear.double()(norm.double()(x)), x)
    assert found.left_out == 8
    assert found.smallest == pytest.approx(sigma[15].item(), rel=1e-10)
    assert found.largest == pytest.approx(sigma[0].item(), rel=1e-10)
    assert sigma[16] < 1e-12


def test_a_token_of_equal_channels_has_one_lost_direction_and_its_others_count():
    x = 100 * double(1, 3, 4)
    x[0, 1] = 0.7
    norm = nn.LayerNorm(4, eps=1.0)
    found = branch_jacobian(norm, x, norm=norm)
    assert found.left_out == 5, "two of two tokens, one of the third"
    # There, (x − μ)/√ε is linear in x with every gain 1; elsewhere gains are 1/√(variance + 1).
    gains = 1 / (x.var(-1, correction=0) + 1).sqrt()
    assert found.largest == pytest.approx(1, rel=1e-12)
    assert found.condition == pytest.approx(1 / gains.min().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("norm", "shape", "count"),
    [
        (nn.GroupNorm(2, 6), (1, 6, 3, 4), 4),
        (nn.GroupNorm(1, 6), (1, 6, 3, 4), 2),
        (nn.LayerNorm((3, 4)), (1, 3, 4), None),
        (nn.BatchNorm2d(6).eval(), (1, 6, 3, 4), None),
        (nn.Identity(), (1, 5, 6), None),
        (nn.Tanh(), (1, 5, 6), None),
    ],
)
def test_norms_are_known_by_what_they_compute(norm, shape, count):
    found = null_directions(norm.double(), double(*shape))
    assert (found and found.count) == count


def test_channels_of_maps_are_normalised_place_by_place():
    def channels(x):
        return F.layer_norm(x.movedim(1, -1), (6,)).movedim(-1, 1)

    found = null_directions(channels, double(1, 6, 3, 4))
    assert found.count == 24
    assert branch_jacobian(channels, double(1, 6, 3, 4), norm=channels).condition < 100


def test_a_norm_that_the_function_sees_past_is_refused():
    norm = nn.LayerNorm(4)
    with pytest.raises(ParameterError, match="keeps what the norm loses"):
        branch_jacobian(lambda x: x + norm(x), double(1, 3, 4), norm=norm)


# ----------------------------------------------------------------------------------------------------- above the limit
@pytest.mark.parametrize("skip", [False, True])
def test_above_the_limit_the_largest_value_is_that_of_the_decomposition(skip):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = double(1, 5, 8)

    def attention(x):
        return layer.self_attn(x, x, x, need_weights=False)[0]

    whole = branch_jacobian(attention, x, skip=skip, limit=40)
    found = branch_jacobian(attention, x, skip=skip, limit=39)
    assert whole.whole
    assert not found.whole
    assert found.largest == pytest.approx(whole.largest, rel=1e-9)
    assert found.condition is None
    assert found.smallest is None
    assert found.reason == "κ is not known: 40 coordinates, and the limit is 39"


def test_blocks_of_the_jacobian_are_decomposed_alone_and_give_the_same():
    mlp = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)).double()
    x = double(1, 7, 6)
    sigma = singular_values_by_autograd(mlp, x)
    found = branch_jacobian(mlp, x, norm=mlp[0])
    assert found.condition == pytest.approx((sigma[0] / sigma[27]).item(), rel=1e-6)
    depthwise = nn.Conv2d(5, 5, 3, padding=1, groups=5).double()
    maps = double(1, 5, 4, 3)
    sigma = singular_values_by_autograd(depthwise, maps)
    assert branch_jacobian(depthwise, maps).condition == pytest.approx((sigma[0] / sigma[-1]).item(), rel=1e-9)
