"""Masks of the stream on a GPU: one launch each, the same bits as on a CPU, new ones in every replay of a graph."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from attemper.kernels import masks
from attemper.methods import FeedForwardDropout
from attemper.ops.stream import Offsets, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def pair(at: Offsets = Offsets()) -> tuple[Stream, Stream]:  # noqa: B008, a named tuple
    """One stream on the GPU and on the CPU."""
    seed = torch.tensor(-(2**62) + 5)
    return tuple(Stream(each, 3, site=-77, call=5, at=at) for each in (seed.cuda(), seed))  # type: ignore[return-value]


@pytest.mark.parametrize("at", [Offsets(), Offsets(3, 2, 1, 7), Offsets(2**31 - 9, 9, 2**31 - 300, 2**31 - 300)])
@pytest.mark.parametrize("shape", [(5, 1, 1, 1), (2, 3, 17, 197), (3, 1, 1, 6), (2049, 1, 1, 1), (4, 1, 197, 1536)])
def test_masks_and_numbers_are_those_of_a_cpu(shape: tuple[int, int, int, int], at: Offsets) -> None:
    ours, theirs = pair(at)
    assert masks.serves(ours.seed)
    for p in (0.0, 0.1, 0.5, 0.999):
        assert torch.equal(ours.keep(shape, p).cpu(), theirs.keep(shape, p))
    assert torch.equal(ours.uniform().cpu(), theirs.uniform())


def test_a_mask_is_one_launch() -> None:
    stream, _ = pair()
    for _ in range(2):
        stream.keep((4, 1, 197, 1536), 0.1)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        stream.keep((4, 1, 197, 1536), 0.1)
        torch.cuda.synchronize()
    launched = [event.key for event in found.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert launched == ["keep_kernel"]


def test_compiled_code_draws_the_same() -> None:
    x = torch.randn(4, 50, 96, device="cuda")

    def drop(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return FeedForwardDropout(0.4).map_tokens(x, None, Stream(seed, site=9))  # type: ignore[arg-type]

    seed = torch.tensor(11, device="cuda")
    torch.testing.assert_close(torch.compile(drop, fullgraph=True)(x, seed), drop(x, seed))


def test_a_replayed_graph_draws_anew_for_a_new_seed() -> None:
    seed = torch.tensor(1, device="cuda")
    stream = Stream(seed)
    stream.keep((4, 2, 30, 30), 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = Stream(seed).keep((4, 2, 30, 30), 0.5)
    for number in (1, 2, 3):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(mask.cpu(), Stream(torch.tensor(number)).keep((4, 2, 30, 30), 0.5))
