"""The conditions under which a model is tried: each changes a batch of pixels and keeps count of what was right."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attemper.lab.evaluation.attacks import Classifier, fgsm, pgd
from attemper.lab.evaluation.corruption_constants import MAIN, SEVERITIES
from attemper.lab.evaluation.corruptions import corrupt
from attemper.lab.evaluation.metrics import Tally
from attemper.lab.evaluation.occlusion import occlude_centre, occlude_random
from attemper.lab.evaluation.suites import Robustness
from attemper.lab.tasks.seed_streams import derive, generator

ATTACKED = 128
"""Images that are attacked at once: a gradient takes many times the memory of a plain pass."""

Change = Callable[[Tensor, Tensor, int], Tensor]
"""Pixels (B, C, H, W), targets (B) and the batch's own seed → pixels."""


@dataclasses.dataclass
class Condition:
    """One way to make images harder."""

    group: str
    """"occlusion", "attacks" or "corruptions"."""
    facts: dict[str, Any]
    """Which one it is, such as {"kind": "pgd", "epsilon": 0.03}."""
    change: Change
    tally: Tally = dataclasses.field(default_factory=Tally)

    def read(self) -> dict[str, Any]:
        """Which condition, and how the model did."""
        reading = self.tally.read()
        return {**self.facts, "accuracy": reading["accuracy"], "nll": reading["nll"]}


def conditions_of(suite: Robustness, classifier: Classifier) -> list[Condition]:
    """All conditions of the suite, for one model."""
    found = []
    for share in suite.occlusion:
        found.append(Condition("occlusion", {"kind": "centre", "share": share}, partial(_centre, share)))
    for share in suite.occlusion:
        found.append(Condition("occlusion", {"kind": "random", "share": share}, partial(_random, share)))
    for epsilon in suite.epsilon:
        found.append(Condition("attacks", {"kind": "fgsm", "epsilon": epsilon}, partial(_fgsm, classifier, epsilon)))
    for epsilon in suite.epsilon:
        facts = {"kind": "pgd", "epsilon": epsilon, "steps": suite.steps}
        found.append(Condition("attacks", facts, partial(_pgd, classifier, epsilon, suite.steps)))
    for name in MAIN if suite.corruptions is None else suite.corruptions:
        for severity in SEVERITIES:
            facts = {"kind": name, "severity": severity}
            found.append(Condition("corruptions", facts, partial(_corrupt, name, severity)))
    return found


def _centre(share: float, pixels: Tensor, targets: Tensor, seed: int) -> Tensor:
    return occlude_centre(pixels, share)


def _random(share: float, pixels: Tensor, targets: Tensor, seed: int) -> Tensor:
    return occlude_random(pixels, share, generator=generator(seed, "occlusion"))


def _fgsm(classifier: Classifier, epsilon: float, pixels: Tensor, targets: Tensor, seed: int) -> Tensor:
    return _in_parts(lambda x, y, part: fgsm(classifier, x, y, epsilon), pixels, targets)


def _pgd(classifier: Classifier, epsilon: float, steps: int, pixels: Tensor, targets: Tensor, seed: int) -> Tensor:
    def attack(x: Tensor, y: Tensor, part: int) -> Tensor:
        return pgd(classifier, x, y, epsilon, steps=steps, generator=generator(seed, "pgd", part))

    return _in_parts(attack, pixels, targets)


def _in_parts(attack: Callable[[Tensor, Tensor, int], Tensor], pixels: Tensor, targets: Tensor) -> Tensor:
    parts = zip(pixels.split(ATTACKED), targets.split(ATTACKED), strict=True)
    return torch.cat([attack(x, y, part) for part, (x, y) in enumerate(parts)])


def _corrupt(name: str, severity: int, pixels: Tensor, targets: Tensor, seed: int) -> Tensor:
    return corrupt(pixels, name, severity, seed=derive(seed, "corruptions"))
