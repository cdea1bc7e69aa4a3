"""What streams drop of tokens and branches, and the mixed mean of tokens, by one kernel, interpreted on a CPU.

`test_quick_masks.py` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import timm
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.kernels import masks, tokens
from attemper.methods import ContextBroadcast, DropPath, FeedForwardDropout
from attemper.methods.broadcast import context_broadcast
from attemper.methods.kinds import Tokens, elementwise_keep, inverted
from attemper.ops.stream import Offsets, Stream

STREAM = Stream(torch.tensor(-(2**62) + 5), site=-77, call=5)
AT = Stream(STREAM.seed, site=-77, call=2**24 - 3, at=Offsets(3, 2, 1, 7))
TOKENS = [(2, 5, 9), (3, 2, 3, 40), (1, 1, 1), (2, 17, 130), (4, 16, 16)]


def gradients(function: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """What a function gives, and its gradients by what it is given."""
    given = tuple(x.detach().requires_grad_() for x in given)
    out = function(*given)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), given)]


def assert_close(ours: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a == 0, b == 0)
        torch.testing.assert_close(a, b)


def rows(x: Tensor) -> Tensor:
    return x.flatten(1, -2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drawn", [STREAM, AT])
@pytest.mark.parametrize("shape", TOKENS)
def test_tokens_are_dropped_by_the_streams_mask(shape: tuple[int, ...], drawn: Stream, dtype: torch.dtype) -> None:
    def by_torch(x: Tensor) -> Tensor:
        return inverted(rows(x), elementwise_keep(rows(x).shape, 0.4, drawn), 0.4).view(x.shape)

    x = torch.randn(shape, device=drawn.seed.device).to(dtype) + 3
    assert masks.drops(x)
    assert_close(gradients(lambda x: masks.dropped_tokens(x, drawn, 0.4), x), gradients(by_torch, x))


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
@pytest.mark.parametrize("drawn", [STREAM, AT])
@pytest.mark.parametrize("shape", [(7, 5, 3), (5, 2, 3, 4), (9, 300, 7), (6, 1), (1, 2, 2)])
def test_branches_are_dropped_by_the_streams_mask(
    shape: tuple[int, ...], drawn: Stream, dtypes: tuple[torch.dtype, ...]
) -> None:
    x, branch = (torch.randn(shape, device=drawn.seed.device).to(dtype) for dtype in dtypes)
    branch += 3
    kept = DropPath(0.5).drawn(shape, drawn)
    wanted = gradients(lambda x, branch: x + inverted(branch, kept, 0.5), x, branch)
    assert masks.adds(x, branch)
    for a, b in zip(gradients(lambda x, b: masks.dropped_sum(x, b, drawn, 0.5), x, branch), wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    alone = gradients(lambda branch: masks.dropped_branch(branch, drawn, 0.5), branch)
    assert_close(alone, gradients(lambda branch: inverted(branch, kept, 0.5), branch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [*TOKENS, (2, 33, 5), (2, 64, 65)])
def test_the_mean_is_mixed_in(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, dtype=dtype, device=device)
    assert tokens.mixes(x)
    wanted = gradients(lambda x: context_broadcast(rows(x.float())).view(shape).to(dtype), x)
    for a, b in zip(gradients(tokens.mixed, x), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: masks.dropped_tokens(x, STREAM, 0.3),
        lambda x: masks.dropped_branch(x, STREAM, 0.3),
        lambda x: masks.dropped_sum(x, x * x, STREAM, 0.3),
        tokens.mixed,
    ],
)
def test_second_gradients_and_those_of_many_directions(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    scaled = 1e-2 * torch.randn(3, 4, 5)
    (shifted,) = torch.autograd.grad(function(x + scaled).square().sum(), x)
    (whole,) = torch.autograd.grad(function(x - scaled).square().sum(), x)
    (along,) = torch.autograd.grad((first * scaled).sum(), x)
    torch.testing.assert_close(along, (shifted - whole) / 2, atol=1e-3, rtol=1e-3)
    out = function(x)
    directions = torch.randn(6, *out.shape)
    (many,) = torch.autograd.grad(out, x, directions, is_grads_batched=True, retain_graph=True)
    for direction, grad in zip(directions, many, strict=True):
        torch.testing.assert_close(grad, torch.autograd.grad(out, x, direction, retain_graph=True)[0])


@pytest.fixture
def device() -> str:
    """Where these cases run; `test_gpu_drops.py` has another."""
    return "cpu"


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inside it, torch's operators do it all."""
    with contextlib.ExitStack() as stack:
        for each in ("masks.dropped", "tokens.mixing"):
            stack.enter_context(mock.patch(f"attemper.kernels.{each}.refuse_device", return_value="no"))
        yield


def model(recipe: str, kind: str = "vit", device: str = "cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "swin":
        sizes = {"img_size": 16, "patch_size": 4, "window_size": 2, "depths": (1, 2), "embed_dim": 8}
        made = timm.models.swin_transformer.SwinTransformer(
            num_heads=(2, 2), num_classes=3, drop_path_rate=0.0, **sizes
        )
    else:
        given = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
        made = timm.create_model("vit_tiny_patch16_224", **given)
    attemper.apply(made.to(device).train(), recipe)
    return made


def steps(made: torch.nn.Module, size: int, device: str = "cpu", **options: bool) -> list[Tensor]:
    """Outputs and gradients of a few passes; options: of the checkpoint that they run in."""
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(3 + seed // 3, 3, size, size, device=device)
        out = checkpoint(made, x, **options) if options else made(x)
        found += [out.detach(), *torch.autograd.grad(out.square().sum(), tuple(made.parameters()))]
    return found


@pytest.mark.parametrize("recipe", ["droppath(0.5)", "ffdropout(0.4)", "cb", "droppath(0.4) + ffdropout(0.2) + cb"])
@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_models_train_as_without_the_kernels(recipe: str, kind: str, device: str) -> None:
    size = 16 if kind == "swin" else 32
    with without_kernels():
        wanted = steps(model(recipe, kind, device), size, device)
    plain = steps(model(recipe, kind, device), size, device)
    again = steps(model(recipe, kind, device), size, device, use_reentrant=False)
    for ours in (plain, again):
        for a, b in zip(ours, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_masks_that_are_told_are_those_that_acted() -> None:
    made = model("droppath(0.5) + ffdropout(0.4)")
    tempered = attemper.Tempered.of(made)
    for _ in range(3):
        made(torch.randn(5, 3, 32, 32))
    first = {key: mask.clone() for key, mask in tempered.masks(tempered.pass_seed).items()}
    with without_kernels():
        other = model("droppath(0.5) + ffdropout(0.4)")
        for _ in range(3):
            other(torch.randn(5, 3, 32, 32))
        again = attemper.Tempered.of(other).masks(tempered.pass_seed)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_what_others_look_at_is_left_to_torch() -> None:
    x = torch.randn(2, 3, 4)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not masks.drops(x)
        assert not tokens.mixes(x)
    assert not masks.drops(x.mT)
    assert not masks.drops(x.double())
    assert not tokens.mixes(torch.zeros(1, 4096, 1))
    traced = torch.jit.trace(lambda x: ContextBroadcast().map_tokens(x, Tokens(None), None), x, check_trace=False)
    y = torch.randn(2, 3, 4)
    torch.testing.assert_close(traced(y), context_broadcast(y))
    kept = FeedForwardDropout(0.25).map_tokens(torch.ones(4, 50, 50), Tokens(None), STREAM)
    assert math.isclose(kept.mean(), 1, abs_tol=0.05)
