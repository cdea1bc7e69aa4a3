"""Token graying in half precision: how close it comes, when it is used, what it multiplies, and what is compiled."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attemper.methods import TokenGraying
from attemper.methods.graying import gray_dct, gray_dct_in_half, gray_svd
from attemper.methods.spectral import COARSE, WIDE_STEPS, fit_power, power_singular_values_in_half
from grays import by_svd, distance, map_image, photographs, randn


@pytest.fixture
def patches():
    return photographs()


def svd_in_half(x, eps=0.7, rescale=True):
    return power_singular_values_in_half(x, fit_power(eps, COARSE), rescale)


def dct_in_half(x, eps=0.95, rescale=True):
    return gray_dct_in_half(x, eps, rescale)


HALF = {
    "svd": (svd_in_half, lambda x, **options: by_svd(x, 0.7, **options)),
    "dct": (dct_in_half, lambda x, **options: gray_dct(x.double(), 0.95, **options)),
}


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("shape", [(3, 20, 31), (3, 31, 20), (2, 2, 9, 40), (16, 16)])
@pytest.mark.parametrize("kind", ["svd", "dct"])
def test_in_half_precision_the_error_is_a_thousandth_at_any_scale(kind, shape, scale):
    half, exact = HALF[kind]
    x = (scale * randn(*shape)).float()
    for rescale in (True, False):
        out = half(x, rescale=rescale)
        assert out.dtype == torch.float32
        assert out.shape == shape
        assert distance(out, exact(x, rescale=rescale)) < 1e-3


@pytest.mark.parametrize("kind", ["svd", "dct"])
def test_in_half_precision_photographs_come_out_about_as_bfloat16_would_round_them(patches, kind):
    half, exact = HALF[kind]
    expected = exact(patches)
    error = (half(patches) - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    rounding = distance(expected.bfloat16(), expected)
    assert error.median() < 1.5 * rounding
    assert error.max() < 4 * rounding


@pytest.mark.parametrize("kind", ["svd", "dct"])
def test_in_half_precision_zeros_stay_zeros_beside_other_images(kind):
    half, _ = HALF[kind]
    x = randn(3, 12, 10, dtype=torch.float32)
    x[1] = 0
    x.requires_grad_()
    out = half(x)
    assert torch.equal(out[1], torch.zeros(12, 10))
    torch.testing.assert_close(out[0], half(x[:1])[0])
    out.square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("eps", [0.6, 0.7, 0.95])
def test_in_half_precision_rounding_of_a_zero_is_not_blown_up(eps):
    # X and the result round to 11 bits, and so does every late step; where all entries round alike, as here, an
    # identity and a constant matrix add up to three times that.
    fit = fit_power(eps, COARSE)
    late = sum(abs(weight) for weight in fit.weights[1 + WIDE_STEPS :])
    bound = fit.error + 2.0**-11 * (2 + 3 * late)
    assert bound < 0.025
    for level in (0.25, 0.3, 0.33, 0.41, 0.499):
        flat = torch.full((1, 64, 48), level)
        assert distance(svd_in_half(flat, eps), flat.double()) < bound
    for rank in (1, 7, 30):
        x = (randn(4, 64, rank) @ randn(4, rank, 48, seed=1)).float()
        s = torch.linalg.svdvals(svd_in_half(x, eps))
        # float32 keeps singular values from 5e-4 of the largest up; smaller ones are raised as that one is, at most.
        assert (s[:, rank:] < 2 * 5e-4**eps * s[:, :1]).all()


@pytest.mark.parametrize("kind", ["svd", "dct"])
def test_in_half_precision_the_gradient_is_right_too(kind):
    half, exact = HALF[kind]
    x, weight = randn(2, 12, 8, dtype=torch.float32), randn(2, 12, 8, seed=1)
    grads = []
    for gray in (half, exact):
        leaf = x.clone().requires_grad_()
        (gray(leaf) * weight).sum().backward()
        grads.append(leaf.grad)
    assert distance(*grads) < 0.02


def test_small_exponents_are_never_computed_in_half_precision(monkeypatch):
    x = randn(2, 12, 8, dtype=torch.float32)
    expected = {eps: TokenGraying("svd", eps=eps).gray(x) for eps in (0.5, 0.7)}
    monkeypatch.setattr("attemper.methods.graying._wants_half", lambda x: True)
    assert torch.equal(TokenGraying("svd", eps=0.5).gray(x), expected[0.5])
    assert not torch.equal(TokenGraying("svd", eps=0.7).gray(x), expected[0.7])


@pytest.mark.parametrize("kind", ["svd", "dct"])
def test_tokens_are_never_computed_in_half_precision(kind, monkeypatch):
    x = randn(2, 12, 8, dtype=torch.float32)
    expected = TokenGraying(kind).gray(x)
    monkeypatch.setattr("attemper.methods.graying._wants_half", lambda x: True)
    assert torch.equal(TokenGraying(kind, where="tokens").gray(x), expected)
    assert not torch.equal(TokenGraying(kind).gray(x), expected)


@pytest.mark.parametrize(("precision", "wide"), [("highest", torch.float32), ("high", torch.float64)])
def test_where_float32_products_may_round_to_tf32_they_are_made_in_float64(precision, wide):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with Products() as products:
            svd_in_half(randn(2, 40, 32, dtype=torch.float32))
    finally:
        torch.set_float32_matmul_precision(before)
    assert products.dtypes[0] == wide, "the Gram matrix"
    assert products.dtypes.count(wide) >= 10


# ------------------------------------------------------------------------------------------------------------ the cost
class Products(TorchDispatchMode):
    """The products of matrices, not those with a vector, as they are called."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "bmm", "baddbmm", "addmm") and all(min(a.shape[-2:]) > 1 for a in args[-2:]):
            self.dtypes.append(args[-1].dtype)
        return function(*args, **(kwargs or {}))


def test_the_number_of_products_is_what_the_card_says(patches):
    counts = {}
    for name, gray in (("svd", gray_svd), ("half", svd_in_half)):
        with Products() as products:
            gray(patches[:2], 0.7)
        counts[name] = [products.dtypes.count(dtype) for dtype in (torch.float64, torch.float32, torch.float16)]
    # Gram matrix, 9 squarings, 26 steps, X; Gram matrix, 6 squarings, 9 steps and, in float16, 7 steps, X twice.
    assert counts == {"svd": [37, 0, 0], "half": [0, 16, 9]}
    for gray in (gray_dct, gray_dct_in_half):
        with Products() as products:
            gray(patches[:2], 0.95)
        assert len(products.dtypes) == 4


@pytest.mark.parametrize("half", [True, False])
def test_a_compiled_dct_holds_no_table_and_nothing_wider_than_float32(half, monkeypatch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("attemper.methods.graying._wants_half", lambda x: half)
    method, image = TokenGraying(), randn(2, 3, 32, 24, dtype=torch.float32)
    expected = map_image(method, image, (8, 8))
    torch._dynamo.reset()
    out = torch.compile(lambda x: map_image(method, x, (8, 8)), backend=backend, fullgraph=True)(image)
    torch.testing.assert_close(out, expected, atol=2e-3 if half else 1e-5, rtol=0)
    (graph,) = graphs
    assert not any(node.op == "get_attr" for node in graph.graph.nodes), "a constant goes with the graph"
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    assert torch.float32 in dtypes
    assert torch.float64 not in dtypes


@pytest.mark.parametrize("half", [True, False])
def test_one_graph_of_the_dct_serves_images_of_several_sizes(half, monkeypatch):
    monkeypatch.setattr("attemper.methods.graying._wants_half", lambda x: half)
    method = TokenGraying()
    torch._dynamo.reset()
    gray = torch.compile(lambda x: map_image(method, x, (4, 4)), backend="eager", fullgraph=True, dynamic=True)
    for size in (16, 24):
        image = randn(2, 3, size, size, dtype=torch.float32)
        torch.testing.assert_close(gray(image), map_image(method, image, (4, 4)), atol=5e-3 if half else 1e-5, rtol=0)
