"""Explicit dropout on convolutions, against patches that are cut out one by one and against real dropout."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attemper.methods import ExplicitDropout, Place
from attemper.methods.explicit import convolution_square
from attemper.methods.kinds import ConvolutionRecord
from attemper.tempering.convolutions import ConvolutionWatch
from convolved import EXPECTATIONS, FACTORS, P, by_matrix


def seen(layer: nn.Module, x: torch.Tensor) -> ConvolutionRecord:
    """What a convolution is known by when it runs."""
    with ConvolutionWatch() as watch:
        layer(x)
    [record] = watch.records
    return record


def detached(record: ConvolutionRecord) -> ConvolutionRecord:
    tensors = {name: getattr(record, name).detach() for name in ("x", "weight", "output", "bias")}
    return dataclasses.replace(record, **tensors)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def layer_of(kind: str, **options) -> nn.Module:
    """A convolution of 4 to 6 channels in float64, with a bias that is not small."""
    torch.manual_seed(0)
    layer = getattr(nn, kind)(4, 6, **options).double()
    with torch.no_grad():
        layer.bias += 1.0
    return layer


LAYERS = {
    "1d": ("Conv1d", {"kernel_size": 3, "padding": 2, "dilation": 2}, (5,)),
    "2d strided": ("Conv2d", {"kernel_size": 3, "stride": 2, "padding": 1}, (5, 4)),
    "2d same": ("Conv2d", {"kernel_size": (2, 3), "padding": "same"}, (4, 3)),
    "2d grouped": ("Conv2d", {"kernel_size": (1, 2), "groups": 2}, (3, 4)),
    "3d": ("Conv3d", {"kernel_size": 2}, (2, 3, 2)),
    "transposed 1d": ("ConvTranspose1d", {"kernel_size": 3, "stride": 2, "output_padding": 1}, (4,)),
    "transposed 2d": ("ConvTranspose2d", {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2}, (3, 2)),
    "transposed 3d": ("ConvTranspose3d", {"kernel_size": 2, "dilation": 2}, (2, 1, 2)),
}


@pytest.mark.parametrize("expectation", EXPECTATIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_squares_and_their_gradients_are_those_of_the_matrix_that_the_layer_is(kind, expectation):
    name, options, size = LAYERS[kind]
    layer = layer_of(name, **options)
    x = drawn(3, 4, *size).requires_grad_()
    leaves = [x, layer.weight, layer.bias]
    ours = convolution_square(seen(layer, x), P, expectation)
    wanted = by_matrix(layer, x, expectation)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=0.0)
    # The bias stands in the output that was seen, so its gradient is what is left of large numbers.
    both = (torch.autograd.grad(s, leaves, allow_unused=True, materialize_grads=True) for s in (ours, wanted))
    for one, other in zip(*both, strict=True):
        assert (one - other).abs().max() <= 1e-10 * wanted.detach()


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 2, 4]))
    return {
        "kernel_size": (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        "stride": draw(st.integers(1, 3)),
        "padding": (draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        "dilation": draw(st.integers(1, 2)),
        "groups": groups,
        "out": groups * draw(st.integers(1, 2)),
    }


@settings(max_examples=20, deadline=None)
@given(convolutions(), st.sampled_from(EXPECTATIONS))
def test_any_convolution_is_its_patches_times_its_kernels(options, expectation):
    groups, out = options["groups"], options.pop("out")
    x, weight = drawn(2, 4, 6, 5), drawn(out, 4 // groups, *options["kernel_size"])
    places = {name: options[name] for name in ("stride", "padding", "dilation")}
    patches = F.unfold(x, options["kernel_size"], **places)  # (B, C · kernel, positions)
    together = own = 0.0
    for part, kernels in zip(patches.chunk(groups, 1), weight.flatten(1).chunk(groups), strict=True):
        together += float((kernels @ part).square().sum())
        own += float((kernels.square() @ part.square()).sum())
    joint, alone = FACTORS[expectation]
    record = ConvolutionRecord(x, weight, patches.shape[-1], **places, groups=groups)
    assert convolution_square(record, P, expectation) == pytest.approx(joint * together + alone * own, rel=1e-10)


@st.composite
def layers(draw):
    """A convolution of any kind, and the size of an input that it takes."""
    axes, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    stride, dilation, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4]))
    options = {"kernel_size": draw(st.integers(1, 3)), "stride": stride, "dilation": dilation, "groups": groups}
    options |= {"padding": draw(st.integers(0, 1)), "bias": draw(st.booleans())}
    if transposed:
        options["output_padding"] = draw(st.integers(0, max(stride, dilation) - 1))
    torch.manual_seed(0)
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{axes}d")
    return kind(4, groups * draw(st.integers(1, 2)), **options).double(), (5, 3 if transposed else 5, 5)[:axes]


@settings(max_examples=15, deadline=None)
@given(layers(), st.sampled_from(EXPECTATIONS))
def test_of_any_kind_it_is_the_square_of_a_matrix_and_so_is_its_gradient(drawn_layer, expectation):
    layer, size = drawn_layer
    x = drawn(2, 4, *size)
    squares = convolution_square(seen(layer, x), P, expectation), by_matrix(layer, x, expectation)
    torch.testing.assert_close(*squares, rtol=1e-10, atol=1e-20)
    ours, wanted = (torch.autograd.grad(square, layer.weight)[0] for square in squares)
    assert (ours - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def samples_of(layer: nn.Module, x: torch.Tensor, noise) -> torch.Tensor:
    """½‖w ∗ noise‖² of one sample under 20,000 masks."""
    drops = torch.rand(20_000, *x.shape[1:], generator=torch.Generator().manual_seed(7), dtype=torch.float64) < P
    return (layer(noise(x, drops)) - layer(torch.zeros_like(x))).square().flatten(1).sum(1) / 2


@pytest.mark.parametrize(
    ("expectation", "noise"),
    [("exact", lambda x, drops: x * drops), ("inverted", lambda x, drops: x * ~drops / (1 - P) - x)],
)
@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
def test_expectations_are_those_of_real_dropout_on_the_input(kind, expectation, noise):
    layer, x = layer_of(kind, kernel_size=3, stride=2, padding=1, groups=2), drawn(1, 4, 4, 3)
    with torch.no_grad():
        halves = samples_of(layer, x, noise)
        terms = ExplicitDropout(conv=1, p=P, expectation=expectation, reduction="sum")
        ours = terms.convolution_terms(seen(layer, x), Place(0, 1))["conv"]
    error = halves.std() / math.sqrt(len(halves))
    assert abs(ours - halves.mean()) < 4 * error
    paper = ExplicitDropout(conv=1, p=P, reduction="sum").convolution_terms(seen(layer, x), Place(0, 1))["conv"]
    assert abs(paper - halves.mean()) > 10 * error, "the masks tell the paper's reading from the others"


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_dropout_acts_on_the_padded_input(axes, mode):
    """An entry that padding copies counts as several: as many as the patches that the paper cuts out have of it."""
    kind = f"Conv{axes}d"
    layer = layer_of(kind, kernel_size=3, padding=1, padding_mode=mode, groups=2)
    x = drawn(2, 4, *(4, 3, 3)[:axes])
    padded = F.pad(x, (1, 1) * axes, mode=mode)
    plain = getattr(nn, kind)(4, 6, 3, groups=2).double()
    plain.load_state_dict(layer.state_dict())
    for expectation in EXPECTATIONS:
        ours = convolution_square(seen(layer, x), P, expectation)
        torch.testing.assert_close(ours, by_matrix(plain, padded, expectation), rtol=1e-10, atol=0.0)


@pytest.mark.parametrize(("reduction", "times"), [("mean", 1), ("sum", 3 * 6), ("literal", 6), ("authors", 2 * 3)])
@pytest.mark.parametrize("expectation", EXPECTATIONS)
def test_output_positions_take_the_place_of_tokens(reduction, times, expectation):
    record = detached(seen(layer_of("Conv2d", kernel_size=2, stride=2), drawn(3, 4, 4, 6)))  # 2 × 3 positions
    ours, mean = (
        ExplicitDropout(conv=0.5, p=P, expectation=expectation, reduction=which).convolution_terms(record, Place(0, 1))
        for which in (reduction, "mean")
    )
    assert ours["conv"] == pytest.approx(times * float(mean["conv"]), rel=1e-12)
    assert mean["conv"] == pytest.approx(0.5 * float(convolution_square(record, P, expectation)) / (2 * 18), rel=1e-12)


def test_an_input_without_a_batch_is_one_sample():
    layer, x = layer_of("Conv2d", kernel_size=2), drawn(1, 4, 3, 3)
    alone, batch = (convolution_square(seen(layer, each), P, "exact") for each in (x[0], x))
    torch.testing.assert_close(alone, batch, rtol=1e-12, atol=0.0)
