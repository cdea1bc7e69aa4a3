"""Attacks: FGSM as computed by hand, PGD inside of its ball and as strong as FGSM, the model left as it was."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.evaluation.attacks import at_rest, fgsm, pgd
from attemper.lab.evaluation.measure import Network, Normalise
from attemper.lab.evaluation.runs import FinishedRun
from evaluated import trained_digits

MEAN, DEVIATION = (0.4, 0.5), (0.2, 0.1)


def linear_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 3 * 3, 4))


def network() -> Network:
    return Network(linear_model(), Normalise(MEAN, DEVIATION))


def test_fgsm_equals_a_computation_by_hand() -> None:
    attacked = network()
    pixels, targets = torch.rand(6, 2, 3, 3), torch.randint(4, (6,))
    weight, bias = attacked.model[1].weight.detach(), attacked.model[1].bias.detach()
    mean, deviation = (torch.tensor(part)[:, None, None].expand(2, 3, 3).flatten() for part in (MEAN, DEVIATION))
    # For softmax and cross-entropy, d loss / d logits = p − y; the chain rule goes on through W and 1/deviation.
    p = ((pixels.flatten(1) - mean) / deviation @ weight.T + bias).softmax(-1)
    slope = (p - nn.functional.one_hot(targets, 4)) @ weight / deviation
    expected = (pixels + 0.03 * slope.sign().view_as(pixels)).clamp(0, 1)
    torch.testing.assert_close(fgsm(attacked, pixels, targets, 0.03), expected)


def test_epsilon_is_an_amount_of_light_whatever_the_normalisation() -> None:
    attacked = network()
    pixels, targets = torch.rand(6, 2, 3, 3), torch.randint(4, (6,))
    for epsilon in (0.0, 0.03):
        moved = (fgsm(attacked, pixels, targets, epsilon) - pixels).abs()
        assert float(moved.max()) == pytest.approx(epsilon, abs=1e-6)
    raw = Network(attacked.model)  # the same model on what it really takes
    inputs = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
    assert not torch.allclose(raw(pixels), attacked(pixels))
    torch.testing.assert_close(raw(inputs), attacked(pixels))


def test_pgd_on_a_linear_model_of_two_classes_reaches_the_best_corner() -> None:
    model = Network(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)))
    pixels, targets = 0.3 + 0.4 * torch.rand(5, 2, 2, 2), torch.tensor([0, 1, 0, 1, 1])
    weight = model.model[1].weight.detach()
    towards = torch.where(targets[:, None] == 0, weight[1] - weight[0], weight[0] - weight[1]).sign()
    best = pixels + 0.1 * towards.view_as(pixels)
    found = pgd(model, pixels, targets, 0.1, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, best)


@pytest.mark.parametrize("attack", [fgsm, pgd], ids=["fgsm", "pgd"])
def test_attacks_stay_in_the_ball_and_among_the_pixels(attack: Callable[..., Tensor]) -> None:
    attacked = network()
    pixels, targets = torch.rand(20, 2, 3, 3).round(decimals=1), torch.randint(4, (20,))
    for epsilon in (0.0, 0.01, 0.2, 2.0):
        extra = {"generator": torch.Generator().manual_seed(1)} if attack is pgd else {}
        found = attack(attacked, pixels, targets, epsilon, **extra)
        assert float((found - pixels).abs().max()) <= epsilon + 1e-6
        assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_pgd_draws_its_start_from_its_own_generator() -> None:
    attacked = network()
    pixels, targets = torch.rand(6, 2, 3, 3), torch.randint(4, (6,))
    state = torch.get_rng_state()
    first, second = (
        pgd(attacked, pixels, targets, 0.1, steps=1, generator=torch.Generator().manual_seed(2)) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_is_sure_of_itself_is_attacked_all_the_same() -> None:
    """In float32 its loss is exactly 0, and so would be the gradient."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    with torch.no_grad():
        model[1].weight.mul_(60 / model[1].weight.abs().max())
    pixels = torch.rand(8, 2, 2, 2)
    targets = model(pixels).argmax(1)
    sure = nn.functional.cross_entropy(model(pixels), targets, reduction="none") == 0
    assert bool(sure.any()), "nobody is sure enough for this test"
    moved = (fgsm(Network(model), pixels, targets, 0.1) != pixels).flatten(1).any(1)
    assert bool(moved.all())


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    model[2].eval()
    model[4].weight.requires_grad_(False)
    model[1].weight.grad = torch.ones_like(model[1].weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pixels, targets = torch.rand(6, 2, 3, 3), torch.randint(4, (6,))
    with at_rest(model):
        assert not any(module.training for module in model.modules())
        first = fgsm(Network(model), pixels, targets, 0.1)
        assert torch.equal(first, fgsm(Network(model), pixels, targets, 0.1)), "dropout acts in eval mode"
        pgd(Network(model), pixels, targets, 0.1)
    assert [module.training for module in model] == [True, True, False, True, True]
    assert [p.requires_grad for p in model[4].parameters()] == [False, True]
    assert all(p.requires_grad for p in model[1].parameters())
    assert torch.equal(model[1].weight.grad, torch.ones_like(model[1].weight))
    assert model[1].bias.grad is None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_model_is_left_as_it_was_after_an_error_too() -> None:
    model = linear_model()
    with pytest.raises(RuntimeError), at_rest(model):
        fgsm(Network(model), torch.rand(2, 5, 3, 3), torch.tensor([0, 1]), 0.1)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("epsilon", [-0.1, math.nan, math.inf, "8/255", True])
def test_an_epsilon_that_cannot_be_is_refused(epsilon: float) -> None:
    for attack in (fgsm, pgd):
        with pytest.raises(ParameterError, match=r"ε is .*; it must be a number of at least 0"):
            attack(network(), torch.rand(1, 2, 3, 3), torch.tensor([0]), epsilon)
    with pytest.raises(ParameterError, match="steps is 0"):
        pgd(network(), torch.rand(1, 2, 3, 3), torch.tensor([0]), 0.1, steps=0)


# --------------------------------------------------------------------------------------------- a trained digits model
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return trained_digits(tmp_path_factory.mktemp("run"))


def test_pgd_is_at_least_as_strong_as_fgsm_on_trained_digits(run: FinishedRun) -> None:
    attacked = Network(run.model, run.normalise)
    stored, targets = next(run.task.test().batches(torch.arange(360), 360))
    pixels = stored.float() / 255

    def accuracy(images: Tensor) -> float:
        with torch.no_grad():
            return float((attacked(images).argmax(1) == targets).double().mean())

    clean = accuracy(pixels)
    assert clean > 0.85
    with at_rest(run.model):
        for epsilon in (0.03, 0.1, 0.2):
            once = accuracy(fgsm(attacked, pixels, targets, epsilon))
            many = pgd(attacked, pixels, targets, epsilon, generator=torch.Generator().manual_seed(0))
            assert float((many - pixels).abs().max()) <= epsilon + 1e-6
            assert accuracy(many) <= once <= clean
        assert accuracy(many) < 0.5 * clean, "an attack that hurts nobody shows nothing"
