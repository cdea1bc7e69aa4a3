"""Penalties in eager steps on a GPU: outputs that pass through them, calls that are known, memory."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.kernels import penalties
from attemper.kernels.penalties.passing import PassedSquare, Untouched, bias_gradient, squared_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
RECIPES = ("explicit(v=5e-2, ff=5e-2)", "dropkey(0.1) + cb + explicit(q=1e-2, v=5e-2, ff=5e-2)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 70, 130), (32, 197, 1536), (5, 24), (2, 7, 7, 96)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_outputs_terms_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], biased: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(*shape[:-1], 16, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], 16, device="cuda").to(dtype).requires_grad_()
    leaves = [x, weight, *([nn.Parameter(torch.randn(shape[-1], device="cuda").to(dtype))] if biased else [])]
    dout = torch.randn(shape, device="cuda").to(dtype)
    untouched = Untouched()
    bound = {torch.float32: 5e-3, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]  # float32: by TF32, maybe
    for _ in range(3):  # compiled, launched again, without a copy
        found = squared_linear(x, weight, leaves[2] if biased else None, 0.25, untouched)
        assert found is not None
        ours = torch.autograd.grad((found[0].float() * dout.float()).sum() + 3 * found[1].sum(), leaves)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        square = F.linear(*wide[:2]).square().sum()
        torch.testing.assert_close(found[1].sum().double(), 0.25 * square, rtol=bound, atol=1e-3)
        theirs = torch.autograd.grad((F.linear(*wide) * dout.double()).sum() + 0.75 * square, wide)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.double() - other).norm() <= bound * other.norm()


@pytest.mark.parametrize(("values", "logits"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("blocks", [1, 197])
def test_what_a_bias_gets(values: bool, logits: bool, blocks: int) -> None:
    factors, bias = torch.randn(values + logits, device="cuda"), torch.zeros(3 * 384, device="cuda")
    of_values = torch.randn(blocks, 384, device="cuda") if values else None
    of_logits = torch.randn(768, device="cuda") if logits else None
    expected = torch.zeros(3 * 384, device="cuda", dtype=torch.float64)
    if of_values is not None:
        expected[768:] = -0.5 * factors[0] * of_values.double().sum(0)
    if of_logits is not None:
        expected[:768] = -2 * factors[-1] * of_logits
    given = bias_gradient(factors, (0.5, 2.0), of_values, of_logits, bias)
    assert given.dtype == torch.float32
    assert (given - expected).norm() <= 1e-6 * expected.norm()


def make(recipe: str, **changes: Any) -> tuple[nn.Module, attemper.Tempered | None, Tensor]:
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=112, embed_dim=192, depth=3, num_heads=3, num_classes=10, **changes
    ).cuda()  # fmt: skip
    tempered = None if recipe == "none" else attemper.apply(model.train(), recipe)
    return model.train(), tempered, torch.randn(16, 3, 112, 112, device="cuda")


def step(model: nn.Module, tempered: attemper.Tempered | None, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    return gradients(model, tempered, x)


def gradients(model: nn.Module, tempered: attemper.Tempered | None, x: Tensor) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        if tempered is None:
            loss = model(x).float().square().mean()
        else:
            loss = tempered.loss(lambda: model(x), lambda out: out.float().square().mean())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("act", [nn.GELU, lambda: nn.ReLU(inplace=True)], ids=["gelu", "relu in place"])
def test_steps_are_those_without_the_passing_function_and_all_alike(
    recipe: str, act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step, which knows nothing yet, and later ones give the same bits: a resumed run begins with a first."""
    model, tempered, x = make(recipe, act_layer=act)
    passed: list[bool] = []
    apply = PassedSquare.apply
    monkeypatch.setattr(
        PassedSquare, "apply", lambda *given: (passed.append(given[-1].known), apply(*given))[1]
    )  # fmt: skip
    first, second, third = (step(model, tempered, x) for _ in range(3))
    overwrites = act is not nn.GELU
    assert passed == [False] * 6 + [not overwrites, True] * 6
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, third))
    monkeypatch.setattr(penalties, "passes", lambda x, weight, bias: False)
    for ours, theirs in zip(first, step(model, tempered, x), strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm() + 1e-6


def test_a_step_with_penalties_takes_little_more_memory() -> None:
    peaks = []
    for recipe in ("none", "explicit(v=5e-4, ff=5e-4)"):
        given = make(recipe)
        for _ in range(2):
            step(*given)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(*given)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.10 * peaks[0]


def test_a_step_with_penalties_is_captured_in_a_cuda_graph() -> None:
    model, tempered, x = make(RECIPES[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = gradients(model, tempered, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = gradients(model, tempered, x)
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(given, expected, strict=True):
        assert torch.equal(ours, theirs)
