"""Token graying: conditioning, the distance to a true SVD, the DCT against SciPy's, and where it acts in a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.fft
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import NoSiteError, ParameterError
from attemper.methods import TokenGraying
from attemper.methods.graying import dct_matrix, gray_dct, gray_svd
from attemper.methods.spectral import fit_power
from families import FAMILIES, build, call
from grays import by_svd, condition, distance, photographs, randn

FAMILY = {family.name: family for family in FAMILIES}
EPS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@pytest.fixture
def patches():
    return photographs()


# ------------------------------------------------------------------------------------------------------------- the SVD
@pytest.mark.parametrize("eps", EPS)
def test_the_error_against_a_true_svd_is_below_a_thousandth_on_photographs(patches, eps):
    assert patches.dtype == torch.float32
    assert distance(gray_svd(patches, eps), by_svd(patches, eps)) < 1e-3


def test_normalised_photographs_are_no_worse(patches):
    normalised = (patches - 0.45) / 0.22
    assert distance(gray_svd(normalised, 0.7), by_svd(normalised, 0.7)) < 1e-3


@pytest.mark.parametrize("eps", [0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (16, 16)])
def test_every_singular_value_is_within_the_bound_that_the_fit_states(eps, shape):
    n = min(shape)
    u, v = torch.linalg.qr(randn(shape[0], n))[0], torch.linalg.qr(randn(shape[1], n, seed=1))[0]
    s = 3.0 * torch.logspace(0, -6.5, n, dtype=torch.float64)
    out = gray_svd(u * s @ v.T, eps)
    given = u.T @ out @ v
    expected = 3.0 * (s / 3.0) ** eps
    # X̃ = X f(XᵀX) with f(t) = t^((ε−1)/2). The Gram matrix is off by δ = n · 2⁻⁵³ of its largest, which the smallest
    # singular value feels most: s f'(s²) δ = (1 − ε)/2 · κ^(2−ε) · δ. The weights multiply what the steps round off.
    fit, delta = fit_power(eps), max(shape) * 2.0**-53
    rounding = (1 - eps) / 2 * (s[0] / s[-1]) ** (2 - eps) * delta + sum(map(abs, fit.weights)) * delta
    assert (given.diag() - expected).abs().max() < 3.0 * (fit.error + rounding)
    assert (given - given.diag().diag()).abs().max() < 3.0 * rounding
    assert out.shape == shape


@pytest.mark.parametrize("eps", [0.5, 0.7, 0.95])
def test_the_condition_number_becomes_its_power(eps):
    x = randn(4, 12, 6) * torch.logspace(0, -2, 6, dtype=torch.float64)
    for before, after in zip(condition(x), condition(gray_svd(x, eps)), strict=True):
        expected = before**eps
        assert expected < before
        # κ̃ = 1 / (s^ε ± error) for the smallest s; the largest is met within the same error.
        assert after == pytest.approx(expected, rel=1.5 * fit_power(eps).error * (expected + 1))


def test_rank_deficient_patches_keep_their_zeros():
    x = randn(3, 16, 4) @ randn(3, 4, 12, seed=1)
    out = gray_svd(x, 0.7)
    s = torch.linalg.svdvals(out)
    assert (s[:, 4:] < 1e-6 * s[:, :1]).all()
    assert distance(out, by_svd(x, 0.7)) < 1e-3
    flat = torch.full((1, 8, 6), 0.3)
    assert distance(gray_svd(flat, 0.7), flat.double()) < 1e-3, "one singular value stays as it is"


@pytest.mark.parametrize("rank", [1, 7, 30])
def test_rounding_of_a_zero_is_not_blown_up_by_many_steps(rank):
    x = (randn(20, 64, rank) @ randn(20, rank, 48, seed=1)).float()
    out = gray_svd(x, 0.3)
    # What float32 made of the zeros is about 5e-8 σ_max, whose exact power would be 0.6 % of it.
    assert (torch.linalg.svdvals(out)[:, rank:] < 1e-2 * torch.linalg.svdvals(out)[:, :1]).all()


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("gray", [gray_svd, gray_dct])
def test_zeros_come_back_as_zeros_beside_other_images(gray, rescale):
    x = randn(3, 8, 6)
    x[1] = 0
    x.requires_grad_()
    out = gray(x, 0.7, rescale)
    out.square().sum().backward()
    assert torch.equal(out[1], torch.zeros(8, 6, dtype=x.dtype))
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    torch.testing.assert_close(out[0], gray(x[:1], 0.7, rescale)[0])


def test_without_rescaling_the_largest_singular_value_is_one(patches):
    some = patches[:20]
    assert distance(gray_svd(some, 0.7, rescale=False), by_svd(some, 0.7, rescale=False)) < 1e-3
    largest = torch.linalg.svdvals(gray_svd(some, 0.7, rescale=False))[:, 0]
    torch.testing.assert_close(largest, torch.ones(20), atol=1e-3, rtol=0)


def test_an_exponent_of_one_changes_nothing(patches):
    some = patches[:20].double()
    torch.testing.assert_close(gray_svd(some, 1.0), some, atol=1e-10, rtol=0)
    torch.testing.assert_close(gray_dct(some, 1.0), some, atol=1e-12, rtol=0)


def test_no_decomposition_is_called(patches, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a decomposition in the training path")

    for name in ("svd", "svdvals", "eigh", "eigvalsh", "eig", "qr", "matrix_norm"):
        monkeypatch.setattr(torch.linalg, name, refuse)
    monkeypatch.setattr(torch, "svd", refuse)
    x = patches[:4].clone().requires_grad_()
    TokenGraying("svd").gray(x).sum().backward()
    assert x.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------------------- the DCT
@pytest.mark.parametrize("eps", [0.5, 0.95])
@pytest.mark.parametrize("rescale", [True, False])
def test_the_dct_form_is_scipys_transform_powered(patches, eps, rescale):
    some = patches[:5].double()
    out = gray_dct(some, eps, rescale)
    for given, image in zip(out, some.numpy(), strict=True):
        c = scipy.fft.dctn(image, norm="ortho")
        top = np.abs(c).max()
        powered = np.sign(c) * (np.abs(c) / top) ** eps * (top if rescale else 1.0)
        expected = scipy.fft.idctn(powered, norm="ortho")
        torch.testing.assert_close(given, torch.from_numpy(expected), atol=1e-10, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 7, 48, 196, 768])
def test_the_dct_matrix_is_orthonormal_and_scipys_whichever_way_it_is_made(n, monkeypatch):
    eager = dct_matrix(n)
    assert (eager @ eager.T - torch.eye(n, dtype=torch.float64)).abs().max() < 1e-12
    torch.testing.assert_close(
        eager, torch.from_numpy(scipy.fft.dct(np.eye(n), axis=0, norm="ortho")), atol=1e-13, rtol=0
    )
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(dct_matrix(n), eager, atol=1e-14, rtol=0)
    narrow = dct_matrix(n, torch.float32)
    assert narrow.dtype == torch.float32
    assert (narrow - eager).abs().max() < 2e-7 * math.sqrt(2 / n)


def test_a_matrix_that_a_caller_changes_is_not_the_next_callers():
    dct_matrix(5).zero_()
    assert dct_matrix(5).abs().sum() > 0


# ----------------------------------------------------------------------------------------------- gradients and dtypes
@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("gray", [gray_svd, gray_dct])
def test_gradients_are_right(gray, rescale, shape):
    x = randn(2, *shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gray(x, 0.7, rescale), (x,), atol=1e-4)


def test_the_gradient_is_that_of_a_true_svd():
    x = randn(2, 8, 5)
    weight = randn(2, 8, 5, seed=1)
    grads = []
    for gray in (gray_svd, by_svd):
        leaf = x.clone().requires_grad_()
        (gray(leaf, 0.7) * weight).sum().backward()
        grads.append(leaf.grad)
    assert distance(*grads) < 0.02


@pytest.mark.parametrize("kind", ["svd", "dct"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_wider_and_rounded_once(kind, dtype):
    x = randn(2, 8, 6, dtype=dtype)
    out = TokenGraying(kind).gray(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, TokenGraying(kind).gray(x.float()).to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = TokenGraying(kind).gray(x.float())
    assert torch.equal(given, TokenGraying(kind).gray(x.float()))


# -------------------------------------------------------------------------------------------------------- whole models
def gray_patches(image, patch, method):
    tokens = F.unfold(image, patch, stride=patch).mT
    return F.fold(method.gray(tokens).mT, image.shape[-2:], patch, stride=patch)


@pytest.mark.parametrize("kind", ["dct", "svd"])
@pytest.mark.parametrize("name", ["timm-vit", "hf-vit", "torchvision-vit", "timm-swin"])
def test_patches_are_grayed_before_they_are_embedded_in_both_modes(name, kind):
    family = FAMILY[name]
    model, plain = build(family), build(family)
    attemper.apply(model, f"graying({kind})")
    inputs = family.inputs()
    patch = (2, 2) if name == "timm-swin" else (8, 8)
    (key,) = inputs
    image = inputs[key][0] if key == "args" else inputs[key]
    gray = gray_patches(image, patch, TokenGraying(kind))
    changed = {key: (gray,) if key == "args" else gray}
    for mode in (True, False):
        given, expected = call(model.train(mode), inputs), call(plain.train(mode), changed)
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(given, call(plain, inputs), atol=1e-5)


@pytest.mark.parametrize("kind", ["dct", "svd"])
def test_patches_and_images_need_not_be_square(kind):
    import timm

    torch.manual_seed(0)
    options = {"img_size": (24, 40), "patch_size": (8, 4), "embed_dim": 48, "depth": 1, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options).eval()
    x = randn(2, 3, 24, 40, dtype=torch.float32)
    expected = model(gray_patches(x, (8, 4), TokenGraying(kind)))
    attemper.apply(model, f"graying({kind})")
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("patch", [(4, 4), (4, 6)])
@pytest.mark.parametrize("plain", [True, False])
def test_pixels_that_no_patch_holds_are_left_out(patch, plain):
    class Own(nn.Conv2d):
        """Not the layer that everybody knows: it is given the image back and computes whatever it computes."""

    image, method = randn(2, 3, 13, 20), TokenGraying()
    layer = (nn.Conv2d if plain else Own)(3, 5, patch, patch).double()
    rows, columns = 13 // patch[0] * patch[0], 20 // patch[1] * patch[1]
    expected = layer(gray_patches(image[..., :rows, :columns].contiguous(), patch, method))
    model = nn.Sequential(layer)
    attemper.apply(model, "graying")
    torch.testing.assert_close(model(image), expected, atol=1e-12, rtol=1e-10)


def test_tokens_are_grayed_before_the_first_block():
    family = FAMILY["timm-vit"]
    model, plain = build(family).eval(), build(family).eval()
    attemper.apply(model, "graying(svd, where=tokens)")
    plain.blocks[0].register_forward_pre_hook(lambda _, args: (gray_svd(args[0], 0.7), *args[1:]))
    torch.testing.assert_close(call(model, family.inputs()), call(plain, family.inputs()), atol=1e-5, rtol=1e-4)
    before = build(family).eval()
    tokens = {}
    for name, m in (("plain", before), ("gray", model)):
        m.blocks[0].norm1.register_forward_pre_hook(lambda _, args, n=name: tokens.update({n: args[0]}))
        call(m, family.inputs())
    for gray, raw in zip(condition(tokens["gray"]), condition(tokens["plain"]), strict=True):
        assert gray == pytest.approx(raw**0.7, rel=0.1)


def test_gradients_reach_an_image_that_wants_them():
    model = build(FAMILY["timm-vit"]).train()
    attemper.apply(model, "graying")
    x = randn(1, 3, 32, 32, dtype=torch.float32).requires_grad_()
    model(x).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


# ----------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("name", ["hf-bert", "nn-encoder", "hf-detr", "hf-whisper"])
def test_a_model_without_patches_of_its_own_is_refused_and_left_alone(name):
    model = build(FAMILY[name])
    with pytest.raises(
        NoSiteError, match=r"'graying.*' acts on a patch embedding, a layer that makes tokens of the pixels"
    ):
        attemper.apply(model, "graying")
    assert not any("_attemper" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("eps", [0, -0.5, 1.01, math.nan, True, "half"])
def test_an_exponent_outside_its_range_is_named(eps):
    with pytest.raises(ParameterError, match=rf"eps must be a number in \(0, 1\], got {eps!r}"):
        TokenGraying(eps=eps)


def test_other_bad_parameters_are_named():
    for options, message in (
        ({"kind": "fft"}, "kind must be one of dct, svd; got 'fft'"),
        ({"where": "pixels"}, "where must be one of patches, tokens; got 'pixels'"),
        ({"rescale": 1}, "rescale must be true or false, got 1"),
    ):
        with pytest.raises(ParameterError, match=message):
            TokenGraying(**options)
    assert TokenGraying().exponent == 0.95
    assert TokenGraying("svd").exponent == 0.7
