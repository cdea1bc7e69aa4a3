"""Softmax with its methods in one kernel, in Triton's interpreter. `test_triton.py` runs this file."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import attemper
from attemper.kernels import softmax as kernels
from attemper.kernels.softmax import operators
from attemper.methods import DropAttention, DropHead, DropKey, HardMask
from attemper.ops.perturbation import Perturbation, WeightDropout, draw
from attemper.ops.softmax import softmax_with
from attemper.ops.stream import Source

METHODS: dict[str, list[Perturbation]] = {
    "dropkey": [DropKey(0.3)],
    "own": [WeightDropout(0.3)],
    "inverted": [DropAttention(0.3)],
    "normalised": [DropAttention(0.3, rescale="normalize", unit="column")],
    "detached": [DropAttention(0.3, rescale="normalize", detach=True)],
    "columns": [DropAttention(0.3, unit="column")],
    "zero": [HardMask(0.5, k=5)],
    "neg_inf": [HardMask(0.5, k=3, fill="neg_inf", share="heads")],
    "first": [DropKey(0.3), HardMask(0.5, k=3)],
    "last": [HardMask(0.5, k=0.2, fill="neg_inf"), DropKey(0.3)],
    "all": [HardMask(0.5, k=3), DropAttention(0.3), DropHead(0.4)],
}
every = pytest.mark.parametrize("name", METHODS)


def source() -> Source:
    return Source(torch.tensor(11), site=7, call=2)


def both(logits: Tensor, methods: list[Perturbation], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Weights and the gradient of logits by the kernels and by the reference in float64."""
    torch.manual_seed(3)
    dout = torch.randn(logits.shape)
    results = []
    for given, plainly in ((logits, False), (logits.double(), True)):
        x = given.detach().requires_grad_()
        assert plainly or kernels.serves(x, methods)
        weights = softmax_with(x, methods, source(), torch.float64 if plainly else dtype, plainly)
        results.append((weights.detach(), *torch.autograd.grad(weights, x, dout.to(weights.dtype))))
    return results


def check(logits: Tensor, methods: list[Perturbation], tolerance: float = 1e-6) -> None:
    given, expected = both(logits, methods, logits.dtype)
    for name, a, b in zip(("weights", "gradient"), given, expected, strict=True):
        assert a.dtype == logits.dtype
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm() + 1e-9, name
    assert torch.equal(given[0] > 0, expected[0] > 0) or logits.dtype != torch.float32


@every
def test_weights_and_gradients_against_float64(name: str) -> None:
    check(torch.randn(2, 3, 17, 49), METHODS[name])


@every
def test_half_precision(name: str) -> None:
    check(torch.randn(1, 2, 9, 33).half(), METHODS[name], 1e-3)


@every
def test_masks_in_the_logits_and_rows_without_keys(name: str) -> None:
    logits = torch.randn(2, 2, 12, 20)
    hidden = torch.rand(2, 1, 12, 20) > 0.3
    hidden[1, :, 5] = True
    check(logits.masked_fill(hidden, -torch.inf), METHODS[name])
    check(logits.masked_fill(hidden, -100.0), METHODS[name], 1e-5)


@pytest.mark.parametrize("name", ["dropkey", "inverted", "detached", "zero"])
@pytest.mark.parametrize("keys", [1, 2, 3])
def test_rows_of_few_keys(name: str, keys: int) -> None:
    fewer = {"k": 1} if name == "zero" else {}
    methods = [dataclasses.replace(method, p=0.9, **fewer) for method in METHODS[name]]
    given, expected = both(torch.randn(4, 2, keys, keys), methods, torch.float32)
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_equal_logits_are_hit_together() -> None:
    logits = torch.randn(2, 2, 9, 24).round()
    check(logits, [HardMask(0.5, k=4)])
    check(torch.zeros(1, 1, 4, 10), [HardMask(0.5, k=4, fill="neg_inf")])


@pytest.mark.parametrize("name", ["dropkey", "inverted", "zero"])
def test_logits_that_lie_in_memory_in_another_way(name: str) -> None:
    logits = torch.randn(2, 17, 3, 20).transpose(1, 2)
    check(logits, METHODS[name])
    assert softmax_with(logits, METHODS[name], source(), torch.float32).stride() == logits.stride()
    check(torch.randn(2, 3, 20, 17).mT, METHODS[name])
    check(torch.randn(2, 1, 1, 20).expand(2, 3, 17, 20), METHODS[name])


def test_wide_rows() -> None:
    check(torch.randn(1, 1, 3, 1500), METHODS["inverted"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropkey", "detached", "first"])
def test_opcheck(name: str) -> None:
    seen: list[Any] = []

    class Listening(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.attemper.perturbed_softmax.default:
                seen.append(args)
            return function(*args, **(kwargs or {}))

    logits = torch.randn(1, 2, 5, 16, requires_grad=True)
    with Listening():
        softmax_with(logits, METHODS[name], source(), torch.float32)
    torch.library.opcheck(torch.ops.attemper.perturbed_softmax, (logits, *seen[0][1:]))


def test_compiles_in_one_graph_and_gives_the_same_bits() -> None:
    logits = torch.randn(1, 2, 9, 20, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return operators.perturbed_softmax(x, draw(METHODS["inverted"], source(), x), torch.float32)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(logits), compiled(logits))
    given, expected = (torch.autograd.grad(f(logits).square().sum(), logits)[0] for f in (compiled, call))
    assert torch.equal(given, expected)


def test_what_the_kernels_leave_to_the_reference() -> None:
    logits = torch.randn(1, 2, 9, 20)
    assert kernels.serves(logits, [DropKey(0.1)])
    assert not kernels.serves(logits.double(), [DropKey(0.1)])
    assert not kernels.serves(logits, [DropKey(0.1), DropAttention(0.1)])
    assert not kernels.serves(logits, [DropAttention(0.1, unit="column", w=3)])
    assert not kernels.serves(torch.randn(1, 1, 2, 100), [HardMask(0.1, k=50)])
    assert not kernels.serves(logits, [DropHead(0.1)])


@pytest.mark.parametrize("recipe", ["dropkey(0.3)", "dropattention(0.3)"])
def test_a_model_that_writes_attention_out_gives_what_the_reference_gives(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor] = []

    def counted(logits: Tensor, *others: Any) -> Tensor:
        calls.append(logits)
        return operators.perturbed_softmax(logits, *others)

    monkeypatch.setattr(kernels, "perturbed_softmax", counted)
    timm.layers.set_fused_attn(False)
    try:
        torch.manual_seed(0)
        model = timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(1, 1), embed_dim=16, num_heads=(1, 2)
        )
    finally:
        timm.layers.set_fused_attn(True)
    images = torch.randn(2, 3, 32, 32)
    results = []
    for impl in ("auto", "reference"):
        tempered = attemper.apply(model, recipe, impl=impl)
        torch.manual_seed(4)
        model.zero_grad()
        model(images).square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        tempered.remove()
        assert len(calls) == 2  # one in each block, and none by the reference
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
