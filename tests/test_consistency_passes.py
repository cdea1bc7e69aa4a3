"""consistency(passes=m): every pass against the mean prediction, for m > 2, and that all of them count as one."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import ParameterError
from attemper.methods import Consistency, Method
from attemper.methods.base import Paper
from attemper.methods.kinds import LossTerm
from attemper.ops.stream import Stream
from families import FAMILIES, build, call
from test_consistency import STOCHASTIC, Normed, Watched, mean_square, randn

FAMILY = {family.name: family for family in FAMILIES}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    return build(FAMILY["timm-vit"]).train(), FAMILY["timm-vit"].inputs()


def by_hand(logits: Sequence[Tensor], symmetric: bool = False) -> Tensor:
    """The mean divergence from the mean prediction, in probabilities and one sample at a time."""
    p = [one.double().flatten(0, -2).exp() for one in logits]
    p = [one / one.sum(-1, keepdim=True) for one in p]
    mean, total = sum(p) / len(p), 0.0
    for one in p:
        for row, middle in zip(one, mean, strict=True):
            forward, backward = row @ (row / middle).log(), middle @ (middle / row).log()
            total = total + ((forward + backward) / 2 if symmetric else forward)
    return total / (len(p) * len(mean))


def gradients(value: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(value, tensors)


@pytest.mark.parametrize("direction", ["forward", "symmetric"])
@pytest.mark.parametrize("passes", [3, 5])
@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 5)])
def test_it_is_the_mean_divergence_from_the_mean_prediction(shape, passes, direction):
    logits = [randn(*shape, seed=i).double().requires_grad_() for i in range(passes)]
    given = Consistency(passes=passes, direction=direction).compare_all(logits)
    expected = by_hand(logits, direction == "symmetric")
    torch.testing.assert_close(given, expected, atol=1e-12, rtol=0)
    for one, other in zip(gradients(given, logits), gradients(expected, logits), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_two_passes_stay_the_divergence_between_the_two():
    first, second = randn(3, 5), randn(3, 5, seed=1)
    for direction in ("forward", "symmetric"):
        method = Consistency(direction=direction)
        assert method.passes == 2
        assert torch.equal(method.compare_all([first, second]), method.compare(first, second))
    assert Consistency() == Consistency(passes=2)
    assert str(Consistency()) == "consistency(1.0)"


def test_it_is_zero_for_equal_passes_and_below_log_m():
    same = randn(4, 6).double()
    assert Consistency(passes=3).compare_all([same] * 3).abs() < 1e-15
    apart = [100 * F.one_hot(torch.tensor([i]), 6).double() for i in range(4)]
    torch.testing.assert_close(Consistency(passes=4).compare_all(apart), torch.tensor(math.log(4)).double())


def test_padding_is_not_compared():
    logits = [randn(2, 4, 5, seed=i).double() for i in range(3)]
    counted = torch.tensor([[True, True, False, False], [True, True, True, False]])
    given = Consistency(passes=3).compare_all(logits, counted)
    torch.testing.assert_close(given, by_hand([one[counted] for one in logits]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("passes", [2, 3, 4])
def test_the_loss_is_the_mean_of_all_and_the_divergence(passes):
    model, _ = vit()
    model, images = model.double(), randn(2, 3, 32, 32).double()
    labels = torch.tensor([1, 3])
    recipe = f"dropkey(0.5) + consistency(0.7, passes={passes})" if passes > 2 else "dropkey(0.5) + consistency(0.7)"
    tempered = attemper.apply(model, recipe)
    assert attemper.render(tempered.methods) == recipe
    torch.manual_seed(5)
    loss = tempered.loss(lambda: model(images), lambda out: F.cross_entropy(out, labels))
    torch.manual_seed(5)
    outs = [model(images) for _ in range(passes)]
    task = sum(F.cross_entropy(out, labels) for out in outs) / passes
    p, q = outs[0].softmax(-1), outs[1].softmax(-1)
    compared = by_hand(outs) if passes > 2 else (p * (p / q).log()).sum(-1).mean()
    expected = task + 0.7 * compared
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    parameters = list(model.parameters())
    for one, other in zip(gradients(loss, parameters), gradients(expected, parameters), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("method", STOCHASTIC)
def test_three_passes_differ_under_every_stochastic_method_alone(method):
    model, inputs = vit()
    tempered = attemper.apply(model, f"{method} + consistency(passes=3)")
    forward = Watched(lambda: call(model, inputs))
    torch.manual_seed(3)
    loss = tempered.loss(forward, mean_square)
    assert len(forward.outputs) == 3
    assert not all(torch.equal(forward.outputs[0], out) for out in forward.outputs)  # two may skip the same blocks
    compared = by_hand(forward.outputs)
    assert compared > 0
    task = sum(mean_square(out) for out in forward.outputs) / 3
    torch.testing.assert_close((loss - task).double(), compared, atol=1e-6, rtol=1e-2)


def test_the_width_of_a_blur_is_drawn_anew_in_each_pass(monkeypatch):
    drawn, plain = [], Stream.uniform
    monkeypatch.setattr(Stream, "uniform", lambda self: drawn.append(plain(self)) or drawn[-1])
    model, inputs = vit()
    tempered = attemper.apply(model, "blur(2.0) + consistency(passes=4)")
    drawn.clear()
    tempered.loss(lambda: call(model, inputs), mean_square)
    assert len(drawn) == 4 * 3
    assert len({float(width) for width in drawn}) == len(drawn)


def test_batch_norm_counts_all_passes_once():
    torch.manual_seed(0)
    model = Normed(0.1).train()
    plain = copy.deepcopy(model)
    tempered = attemper.apply(model, "dropkey(0.3) + consistency(passes=4)")
    x = randn(4, 5, 16)
    tempered.loss(lambda: model(x), mean_square)
    plain(x)
    assert model.norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)


def test_penalties_count_all_passes_once_and_an_image_is_embedded_once(monkeypatch):
    convolutions, run = [], nn.Conv2d._conv_forward
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda self, *args: convolutions.append(1) or run(self, *args))
    model, inputs = vit()
    tempered = attemper.apply(model, "explicit(v=0.5, ff=0.5) + dropkey(0.3) + consistency(passes=3)")
    forward = Watched(lambda: call(model, inputs))
    convolutions.clear()
    loss = tempered.loss(forward, mean_square)
    assert len(convolutions) == 1
    rows = tempered.penalties()
    assert len(rows) == 3 * 3
    assert tempered.penalty().item() == 0.0
    without = sum(mean_square(out) for out in forward.outputs) / 3 + by_hand(forward.outputs)
    assert (loss - without).item() == pytest.approx(sum(row.value for row in rows), rel=1e-4)
    loss.backward()


def test_a_strength_of_zero_and_evaluation_run_one_pass():
    model, inputs = vit()
    tempered = attemper.apply(model, "dropkey(0.3) + consistency(0.0, passes=5)")
    forward = Watched(lambda: call(model, inputs))
    tempered.loss(forward, mean_square)
    assert len(forward.outputs) == 1
    tempered.remove()
    tempered = attemper.apply(model.eval(), "dropkey(0.3) + consistency(passes=5)")
    tempered.loss(forward, mean_square)
    assert len(forward.outputs) == 2


@dataclasses.dataclass(frozen=True)
class Spread(Method, LossTerm):
    """A method of somebody else's, which compares four passes."""

    name: ClassVar[str] = "spread"
    summary: ClassVar[str] = "the variance of the logits over four passes"
    paper: ClassVar[Paper] = Paper("none", "2026")

    strength: float = 2.0
    passes: ClassVar[int] = 4

    def compare_all(self, logits: Sequence[Tensor], counted: Tensor | None = None) -> Tensor:
        return torch.stack(list(logits)).var(0).mean()


def test_a_method_from_outside_says_how_many_passes_it_compares():
    model, inputs = vit()
    tempered = attemper.apply(model, [attemper.methods.DropKey(0.5), Spread()])
    forward = Watched(lambda: call(model, inputs))
    loss = tempered.loss(forward, mean_square)
    assert len(forward.outputs) == 4
    outs = torch.stack(forward.outputs)
    torch.testing.assert_close(loss, outs.square().mean() + 2 * outs.var(0).mean())


@pytest.mark.parametrize("passes", [1, 0, -3, 2.0, True, 1001, "many"])
def test_bad_numbers_of_passes_are_named(passes):
    with pytest.raises(ParameterError, match=f"passes must be an integer from 2 to 1000, got {passes!r}"):
        Consistency(passes=passes)


@pytest.mark.slow
def test_compiled_the_later_passes_share_a_graph():
    model, inputs = vit()
    tempered = attemper.apply(model, "explicit(v=0.5) + dropkey(0.3) + consistency(passes=4)")
    graphs: list[object] = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        torch.manual_seed(1)
        loss = tempered.loss(lambda: call(compiled, inputs), mean_square)
        loss.backward()
    torch.manual_seed(1)
    torch.testing.assert_close(loss, tempered.loss(lambda: call(model, inputs), mean_square))
    assert len(graphs) == 2
