"""Token graying on a GPU, under autocast: close to what float64 gives on a CPU, compiled and captured in a graph."""

from __future__ import annotations

import pytest
import torch

from attemper.methods import TokenGraying
from attemper.tempering.embedding import to_patches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def images(count: int = 8, size: int = 224) -> torch.Tensor:
    """Noise with more power at low frequencies, as pixels have it."""
    spectrum = torch.fft.rfft2(torch.randn(count, 3, size, size))
    height, width = torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)
    return torch.fft.irfft2(spectrum / (height.square() + width.square()).sqrt().clamp(min=1 / size)) / 10


def map_patches(method: TokenGraying, image: torch.Tensor) -> torch.Tensor:
    """The grayed patches of an image."""
    return method.map_patches(to_patches(image, (image.shape[-2] // 16, image.shape[-1] // 16), (16, 16)))


def distance(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of an image."""
    given = given.double().cpu()
    return ((given - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max().item()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kind", "bound"), [("dct", 2e-3), ("svd", 3e-3)])
def test_under_autocast_patches_are_those_of_float64_nearly(kind: str, bound: float, compiled: bool) -> None:
    method, image = TokenGraying(kind), images()
    expected = map_patches(method, image.double())
    gray = torch.compile(map_patches, fullgraph=True) if compiled else map_patches
    for scale in (1e-4, 1.0, 1e4):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = gray(method, scale * image.cuda())
        assert out.dtype == torch.float32
        assert distance(out / scale, expected) < bound


@pytest.mark.parametrize("kind", ["dct", "svd"])
def test_without_autocast_float32_is_as_accurate_as_on_a_cpu(kind: str) -> None:
    method, image = TokenGraying(kind), images(2)
    expected = map_patches(method, image.double())
    assert distance(map_patches(method, image.cuda()), expected) < 1e-4


@pytest.mark.parametrize("where", ["tokens", "patches"])
@pytest.mark.parametrize("kind", ["dct", "svd"])
def test_small_gradients_survive_autocast(kind: str, where: str) -> None:
    method, x, weight = TokenGraying(kind, where=where), torch.randn(4, 197, 384), 1e-9 * torch.randn(4, 197, 384)
    leaf = x.double().requires_grad_()
    (method.gray(leaf) * weight).sum().backward()
    device = x.cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = torch.compile(method.gray, fullgraph=True)(device)
    (out * weight.cuda()).sum().backward()
    # A compiler traces backward under the autocast that it found, so the products of the DCT's are in bfloat16 there.
    assert distance(device.grad, leaf.grad) < 1e-2


@pytest.mark.parametrize("kind", ["dct", "svd"])
def test_it_can_be_captured_in_a_cuda_graph(kind: str) -> None:
    method, image = TokenGraying(kind), images(4, 64).cuda()

    def gray() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return map_patches(method, image)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = gray()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gray()
    graph.replay()
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=0)
