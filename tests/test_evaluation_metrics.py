"""Metrics: equal to those of torchmetrics and scikit-learn, whatever the batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, top_k_accuracy_score
from torchmetrics.classification import MulticlassCalibrationError

from attemper.errors import ParameterError
from attemper.lab.evaluation.metrics import BINS, Reading, Tally, calibration_error, read_probabilities


def read_logits(logits: torch.Tensor, targets: torch.Tensor, bins: int = BINS) -> Reading:
    return read_probabilities(logits.double().softmax(-1), targets, bins=bins)


def predictions(classes: int = 10, count: int = 997) -> tuple[torch.Tensor, torch.Tensor]:
    """Confident logits that are right more often than not."""
    targets = torch.randint(classes, (count,))
    logits = 2.5 * torch.randn(count, classes)
    logits[torch.arange(count), targets] += 2.0
    return logits, targets


@pytest.mark.parametrize("classes", [2, 10, 37])
def test_accuracy_nll_and_brier_equal_scikit_learns(classes: int) -> None:
    logits, targets = predictions(classes)
    p, y = logits.double().softmax(-1).numpy(), targets.numpy()
    reading = read_logits(logits, targets)
    labels = np.arange(classes)
    assert reading["accuracy"] == pytest.approx(accuracy_score(y, p.argmax(1)), abs=1e-12)
    assert reading["nll"] == pytest.approx(log_loss(y, p, labels=labels), abs=1e-12)
    assert reading["brier"] == pytest.approx(brier_score_loss(y, p, labels=labels, scale_by_half=False), abs=1e-12)
    if classes > 5:
        assert reading["top5"] == pytest.approx(top_k_accuracy_score(y, p, k=5, labels=labels), abs=1e-12)
    else:
        assert reading["top5"] is None


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_equals_torchmetrics(bins: int) -> None:
    logits, targets = predictions()
    theirs = MulticlassCalibrationError(num_classes=10, n_bins=bins, norm="l1")(logits.double().softmax(-1), targets)
    assert read_logits(logits, targets, bins=bins)["ece"] == pytest.approx(float(theirs), abs=1e-6)


def test_batches_give_what_the_whole_gives() -> None:
    logits, targets = predictions()
    tally = Tally()
    for part, right in zip(logits.double().softmax(-1).split(100), targets.split(100), strict=True):
        tally.add(part, right)
    whole, parts = read_logits(logits, targets), tally.read()
    assert parts["images"] == whole["images"] == 997
    for name in ("accuracy", "top5", "nll", "brier", "ece"):
        assert parts[name] == pytest.approx(whole[name], abs=1e-12)
    assert [part["count"] for part in parts["bins"]] == [part["count"] for part in whole["bins"]]


def test_the_reliability_diagram_counts_every_prediction_in_its_bin() -> None:
    logits, targets = predictions()
    reading = read_logits(logits, targets)
    confidence, predicted = logits.double().softmax(-1).max(1)
    assert sum(part["count"] for part in reading["bins"]) == 997
    for part in reading["bins"]:
        inside = (confidence > part["low"]) & (confidence <= part["high"])
        assert part["count"] == int(inside.sum())
        if part["count"]:
            assert part["confidence"] == pytest.approx(float(confidence[inside].mean()))
            assert part["accuracy"] == pytest.approx(float((predicted == targets)[inside].double().mean()))
        else:
            assert (part["confidence"], part["accuracy"]) == (None, None)
    assert calibration_error(reading["bins"]) == reading["ece"]


def test_a_model_that_knows_what_it_knows_has_no_calibration_error() -> None:
    p = torch.tensor([[0.75, 0.25]] * 4, dtype=torch.float64)
    assert read_probabilities(p, torch.tensor([0, 0, 0, 1]))["ece"] == pytest.approx(0.0)
    assert read_probabilities(p, torch.tensor([1, 1, 1, 1]))["ece"] == pytest.approx(0.75)


def test_what_is_no_number_is_none_and_no_error() -> None:
    reading = read_logits(torch.full((3, 10), math.nan), torch.tensor([0, 1, 2]))
    assert reading["nll"] is None
    assert reading["ece"] is None
    assert Tally().read()["accuracy"] is None


def test_targets_outside_of_the_classes_are_refused() -> None:
    with pytest.raises(ParameterError, match="There is a target 10, and the model gives 10 classes"):
        read_logits(torch.randn(2, 10), torch.tensor([3, 10]))


def test_bins_must_be_a_count() -> None:
    with pytest.raises(ParameterError, match="bins is 0"):
        Tally(0)
