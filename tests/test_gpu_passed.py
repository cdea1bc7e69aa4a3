"""Penalties in eager steps on a GPU: outputs that pass through them, calls that are known, memory."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import attemper
from attemper.kernels import penalties
from attemper.kernels.penalties.passing import PassedSquare, Untouched, bias_gradient, passed_square

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
RECIPES = ("explicit(v=5e-2, ff=5e-2)", "dropkey(0.1) + cb + explicit(q=1e-2, v=5e-2, ff=5e-2)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 70, 130), (32, 197, 1536), (5, 24), (2, 7, 7, 96)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_outputs_terms_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], biased: bool, dtype: torch.dtype
) -> None:
    out = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    bias = torch.randn(shape[-1], device="cuda").requires_grad_() if biased else None
    leaves = [out] if bias is None else [out, bias]
    dout = torch.randn(shape, device="cuda").to(dtype)
    untouched = Untouched()
    for _ in range(3):  # compiled, launched again, without a copy
        passed, term = passed_square(out * 1, bias, 0.25, untouched)
        ours = torch.autograd.grad((passed.float() * dout.float()).sum() + 3 * term, leaves)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        square = (wide[0] - wide[1] if biased else wide[0]).square().sum()
        torch.testing.assert_close(term.double(), 0.25 * square, rtol=1e-4, atol=1e-5)
        theirs = torch.autograd.grad((wide[0] * dout.double()).sum() + 0.75 * square, wide)
        for one, other, leaf in zip(ours, theirs, leaves, strict=True):
            bound = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}[leaf.dtype]
            assert (one.double() - other).norm() <= bound * other.norm()


@pytest.mark.parametrize(("values", "logits"), [(True, False), (False, True), (True, True)])
def test_what_a_bias_gets(values: bool, logits: bool) -> None:
    factors, bias = torch.randn(values + logits, device="cuda"), torch.zeros(3 * 384, device="cuda")
    sums = torch.randn((values + 2 * logits) * 384, device="cuda")
    of_values = -factors[0] * sums[:384] if values else torch.zeros(384, device="cuda")
    of_logits = -factors[-1] * sums[-768:] if logits else torch.zeros(768, device="cuda")
    assert torch.equal(bias_gradient(factors, sums, values, logits, bias), torch.cat((of_logits, of_values)))


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
        PassedSquare, "apply", lambda *given: (passed.append(given[3].known), apply(*given))[1]
    )  # fmt: skip
    first, second, third = (step(model, tempered, x) for _ in range(3))
    overwrites = act is not nn.GELU
    assert passed == [False] * 6 + [not overwrites, True] * 6
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, third))
    monkeypatch.setattr(penalties, "passes", lambda out: False)
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
