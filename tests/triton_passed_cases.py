"""A layer's output that passes through its penalty, in Triton's interpreter; run by `test_triton.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.errors import UnmetError
from attemper.kernels import penalties
from attemper.kernels.penalties.passing import PassedSquare, Untouched, bias_gradient, passed_square

Activation = Callable[[Tensor], Tensor]
SHAPES = [(2, 5, 7), (3, 70, 130), (1, 1, 1), (300, 24), (2, 3, 4, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_term_and_gradients_are_those_of_the_formula(
    shape: tuple[int, ...], known: bool, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    out = torch.randn(shape).to(dtype).requires_grad_()
    bias = torch.randn(shape[-1]).requires_grad_() if biased else None
    leaves = [out] if bias is None else [out, bias]
    untouched = Untouched()
    untouched.known = known
    dout = torch.randn(shape).to(dtype)
    passed, term = passed_square(out * 1, bias, 0.25, untouched)
    assert torch.equal(passed, out)
    assert term.dtype == torch.float32
    ours = torch.autograd.grad((passed.float() * dout.float()).sum() + 3 * term, leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    square = (wide[0] - wide[1] if biased else wide[0]).square().sum()
    torch.testing.assert_close(term.double(), 0.25 * square, rtol=1e-5, atol=1e-6)
    theirs = torch.autograd.grad((wide[0] * dout.double()).sum() + 0.75 * square, wide)
    for one, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert one.dtype == leaf.dtype
        bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[leaf.dtype]
        assert (one.double() - other).norm() <= bound * other.norm()
    assert untouched.known


def test_only_the_output_or_only_the_term_may_be_used() -> None:
    out = torch.randn(2, 5, 8, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    passed, term = passed_square(out * 1, bias, 0.5, Untouched())
    given, none = torch.autograd.grad(passed.sum(), (out, bias), allow_unused=True, retain_graph=True)
    assert torch.equal(given, torch.ones_like(out))
    assert none is None
    given, of_bias = torch.autograd.grad(term, (out, bias))
    torch.testing.assert_close(given, (out - bias).detach())
    torch.testing.assert_close(of_bias, -(out - bias).detach().sum((0, 1)))


@pytest.mark.parametrize("known", [True, False])
def test_second_gradients_are_those_of_the_formula(known: bool) -> None:
    untouched = Untouched()
    untouched.known = known
    given = [torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, requires_grad=True)]

    def through(out: Tensor, bias: Tensor) -> Tensor:
        passed, term = passed_square(out.sin(), bias, 0.5, untouched)
        return passed.cos().sum() + term.square()

    def formula(out: Tensor, bias: Tensor) -> Tensor:
        return out.sin().cos().sum() + (0.5 * (out.sin() - bias).square().sum()).square()

    seconds = []
    for each in (through, formula):
        first = torch.autograd.grad(each(*given), given, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.square().sum() for x in first), given))
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("values", "logits"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("third", [8, 200])
def test_what_a_bias_gets_is_what_its_layer_would_add(values: bool, logits: bool, third: int) -> None:
    factors, bias = torch.randn(values + logits), torch.zeros(3 * third, dtype=torch.float16)
    sums = torch.randn((values + 2 * logits) * third)
    of_values = -factors[0] * sums[:third] if values else torch.zeros(third)
    of_logits = -factors[-1] * sums[-2 * third :] if logits else torch.zeros(2 * third)
    expected = torch.cat((of_logits, of_values)).half()
    assert torch.equal(bias_gradient(factors, sums, values, logits, bias), expected)


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

    def apply(out: Tensor, bias: Tensor | None, factor: float, untouched: Untouched) -> tuple[Tensor, Tensor]:
        seen.append(untouched.known)
        return original(out, bias, factor, untouched)  # type: ignore[no-any-return]

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
            patch.setattr(penalties, "passes", lambda out: False)
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
