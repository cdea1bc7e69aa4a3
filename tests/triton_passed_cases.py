"""A layer's output that passes through its penalty, in Triton's interpreter; run by `test_triton.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.errors import UnmetError
from attemper.kernels import penalties
from attemper.kernels.penalties.passing import PassedSquare, Untouched, bias_gradient, squared_linear

Activation = Callable[[Tensor], Tensor]
SHAPES = [(2, 5, 7), (3, 70, 130), (1, 1, 1), (300, 24), (2, 3, 4, 40)]
WIDTH = 3
"""Of the layers' inputs."""


def made_layer(columns: int, biased: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """An input, a weight and a bias of a layer, which is not cast to the dtype of the others."""
    x = torch.randn(*shape[:-1], WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(columns, WIDTH)).to(dtype).requires_grad_()
    return [x, weight, *([nn.Parameter(torch.randn(columns).to(dtype))] if biased else [])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_term_and_gradients_are_those_of_the_formula(
    shape: tuple[int, ...], known: bool, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    leaves = made_layer(shape[-1], biased, dtype, shape)
    untouched = Untouched()
    untouched.known = known
    dout = torch.randn(shape).to(dtype)
    found = squared_linear(leaves[0], leaves[1], leaves[2] if biased else None, 0.25, untouched)
    assert found is not None
    passed, terms = found
    assert torch.equal(passed, F.linear(*leaves))
    assert terms.dtype == torch.float32
    ours = torch.autograd.grad((passed.float() * dout.float()).sum() + 3 * terms.sum(), leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    square = F.linear(*wide[:2]).square().sum()
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(terms.sum().double(), 0.25 * square, rtol=bound, atol=1e-3)
    theirs = torch.autograd.grad((F.linear(*wide) * dout.double()).sum() + 0.75 * square, wide)
    for one, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert one.dtype == leaf.dtype
        assert (one.double() - other).norm() <= bound * other.norm()
    assert untouched.known


def test_a_bias_gets_the_sums_of_the_models_gradient_to_rounding_however_large_the_penalty_is() -> None:
    x, weight, bias = made_layer(40, True, torch.float32, (3, 200, 40))
    found = squared_linear(x, weight, bias, 1e6, Untouched())
    assert found is not None
    dout = torch.randn(3, 200, 40)
    (given,) = torch.autograd.grad((found[0] * dout).sum() + found[1].sum(), bias)
    torch.testing.assert_close(given, dout.sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["bias", "weight", "input"])
def test_what_is_frozen_gets_nothing_and_the_others_what_they_get(frozen: str) -> None:
    leaves = made_layer(8, True, torch.float32, (2, 5, 8))
    leaves[["input", "weight", "bias"].index(frozen)].requires_grad_(False)
    found = squared_linear(*leaves, 0.5, Untouched())
    assert found is not None
    learnt = [leaf for leaf in leaves if leaf.requires_grad]
    ours = torch.autograd.grad(found[0].cos().sum() + found[1].sum(), learnt)
    out = F.linear(*leaves)
    square = 0.5 * (out - leaves[2]).square().sum()
    for one, other in zip(ours, torch.autograd.grad(out.cos().sum() + square, learnt), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_only_the_output_or_only_the_term_may_be_used() -> None:
    x, weight, bias = made_layer(8, True, torch.float32, (2, 5, 8))
    found = squared_linear(x, weight, bias, 0.5, Untouched())
    assert found is not None
    passed, terms = found
    of_weight, of_bias = torch.autograd.grad(passed.sum(), (weight, bias), retain_graph=True)
    torch.testing.assert_close(of_weight, x.detach().sum((0, 1)).expand(8, WIDTH))
    assert torch.equal(of_bias, torch.full((8,), 10.0))
    of_weight, of_bias = torch.autograd.grad(terms.sum(), (weight, bias))
    torch.testing.assert_close(of_weight, (weight @ torch.einsum("bni,bnj->ij", x, x)).detach())
    assert torch.equal(of_bias, torch.zeros(8))


@pytest.mark.parametrize("known", [True, False])
def test_second_gradients_are_those_of_the_formula(known: bool) -> None:
    untouched = Untouched()
    untouched.known = known
    given = made_layer(4, True, torch.float32, (2, 3, 4))

    def through(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found = squared_linear(x.sin(), weight, bias, 0.5, untouched)
        assert found is not None
        return found[0].cos().sum() + found[1].sum().square()

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        square = 0.5 * F.linear(x.sin(), weight).square().sum()
        return F.linear(x.sin(), weight, bias).cos().sum() + square.square()

    seconds = []
    for each in (through, formula):
        first = torch.autograd.grad(each(*given), given, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.square().sum() for x in first), given))
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Doubles(TorchFunctionMode):
    """Makes something else of products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.linear else out


def test_a_mode_that_changes_products_changes_those_that_are_squared() -> None:
    leaves = made_layer(8, True, torch.float32, (2, 5, 8))
    x, weight, bias = leaves
    dout = torch.randn(2, 5, 8)
    results = []
    for known in (False, True):
        untouched = Untouched()
        untouched.known = known
        with Doubles():
            found = squared_linear(x, weight, bias, 0.5, untouched)
        assert found is not None
        results.append(torch.autograd.grad((found[0] * dout).sum() + found[1].sum(), leaves))
    out = 2 * F.linear(*leaves)
    loss = (out * dout).sum() + 0.5 * (out - bias).square().sum()
    for first, later, expected in zip(*results, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(first, later)
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("values", "logits"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("third", [8, 200])
@pytest.mark.parametrize("blocks", [1, 70])
def test_what_a_bias_gets_is_what_its_layer_would_add(values: bool, logits: bool, third: int, blocks: int) -> None:
    factors, bias = torch.randn(values + logits), torch.zeros(3 * third, dtype=torch.float16)
    of_values = torch.randn(blocks, third) if values else None
    of_logits = torch.randn(2 * third) if logits else None
    expected = torch.zeros(3 * third)
    if of_values is not None:
        expected[2 * third :] = -0.5 * factors[0] * of_values.sum(0)
    if of_logits is not None:
        expected[: 2 * third] = -2 * factors[-1] * of_logits
    given = bias_gradient(factors, (0.5, 2.0), of_values, of_logits, bias)
    torch.testing.assert_close(given, expected.half(), rtol=2e-3, atol=2e-3)


class Mlp(nn.Module):
    """An MLP as those of models are, with an activation of one's own."""

    def __init__(self, act: Activation) -> None:
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 24), act, nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(self.norm(x))))


class Net(nn.Module):
    def __init__(self, act: Activation, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp": Mlp(act)}) for _ in range(2)])
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block.mlp, x, use_reentrant=False) if self.recompute else block.mlp(x))
        return x


RECIPE = "explicit(ff1=0.3, ff2=0.7, p=0.5)"


def step(model: nn.Module, tempered: attemper.Tempered, x: Tensor) -> list[Tensor]:
    loss = tempered.loss(lambda: model(x), lambda out: out.square().mean())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def made(act: Activation, recompute: bool = False) -> tuple[Net, attemper.Tempered]:
    torch.manual_seed(0)
    model = Net(act, recompute).train()
    return model, attemper.apply(model, RECIPE, targets=["blocks.*"])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every output that went through its penalty, whether it was known that the model leaves it as it is."""
    seen: list[bool] = []
    original = PassedSquare.apply

    def apply(*given: Any) -> Any:
        seen.append(given[-1].known)
        return original(*given)

    monkeypatch.setattr(PassedSquare, "apply", apply)
    return seen


@pytest.mark.parametrize("act", [F.gelu, F.relu, torch.relu_, nn.ReLU(inplace=True)], ids=str)
def test_loss_and_gradients_of_a_model_are_those_without_kernels_in_every_step(
    act: Activation, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, ours), (other, theirs) = made(act), made(act)
    monkeypatch.setattr(penalties, "passes", penalties.passes)
    x = torch.randn(3, 5, 8)
    for _ in range(3):
        given = step(one, ours, x)
        with monkeypatch.context() as patch:
            patch.setattr(penalties, "passes", lambda x, weight, bias: False)
            patch.setattr(penalties, "reads", lambda out: False)
            expected = step(other, theirs, x)
        for a, b in zip(given, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    overwrites = act not in (F.gelu, F.relu)
    assert taken == [False] * 4 + [not overwrites, True] * 4


def test_a_first_step_and_a_later_one_give_the_same_bits() -> None:
    """A resumed run begins with a first step where the uninterrupted one had a later one."""
    model, tempered = made(F.gelu)
    first, later = (step(model, tempered, torch.ones(2, 5, 8)) for _ in range(2))
    assert all(map(torch.equal, first, later))


def test_a_model_that_begins_to_overwrite_is_told_so(taken: list[bool]) -> None:
    model, tempered = made(F.relu)
    step(model, tempered, torch.randn(2, 5, 8))
    for block in model.blocks:
        block.mlp.act = torch.relu_
    with pytest.raises(UnmetError, match="overwrote the output of a layer"):
        step(model, tempered, torch.randn(2, 5, 8))


def test_checkpointed_layers_keep_what_they_kept(taken: list[bool]) -> None:
    (plain, ours), (again, theirs) = made(F.gelu), made(F.gelu, recompute=True)
    x = torch.randn(2, 5, 8)
    for _ in range(2):
        for a, b in zip(step(plain, ours, x), step(again, theirs, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(taken) == 8, "those of the model without checkpoints alone"


def test_a_step_keeps_no_copy_of_outputs_once_the_model_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tempered = made(F.gelu)
    copies: list[int] = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda self, **given: copies.append(self.numel()) or clone(self, **given))
    step(model, tempered, torch.randn(2, 5, 8))
    assert len(copies) >= 4
    copies.clear()
    step(model, tempered, torch.randn(2, 5, 8))
    assert copies == []
