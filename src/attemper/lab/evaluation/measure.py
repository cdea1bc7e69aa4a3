"""One evaluation: a model and a set of images, read once, under every condition that was asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import NoSiteError, ParameterError
from attemper.lab.errors import DataError
from attemper.lab.evaluation.attacks import at_rest
from attemper.lab.evaluation.conditions import Condition, conditions_of
from attemper.lab.evaluation.corruption_constants import published_for
from attemper.lab.evaluation.metrics import Reading, Tally
from attemper.lab.evaluation.suites import DEFAULT, Calibration, Robustness, Stochastic, Suite, parse_suites
from attemper.lab.tasks.seed_streams import derive
from attemper.lab.tasks.source import Source
from attemper.methods.kinds import BlockMap, BranchMap, WeightMap
from attemper.methods.rates import Scheduled
from attemper.ops.perturbation import Perturbation
from attemper.tempering import Tempered
from attemper.tempering.outputs import logits_of

BATCH = 512
"""Images that are read at once, as in training's own evaluation."""

Toward = Callable[[Tensor], Tensor]
"""Pixels (B, C, H, W) in [0, 1] → what a model takes."""


@dataclass(frozen=True)
class Normalise:
    """(pixels − mean) / deviation, channel by channel, for pixels in [0, 1].

    >>> Normalise((0.5,), (0.25,))(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: Sequence[float]
    deviation: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.deviation) or not all(part > 0 for part in self.deviation):
            raise ParameterError(
                f"The normalisation has the means {tuple(self.mean)} and the deviations {tuple(self.deviation)}; it "
                "must have one of each per channel, and deviations above 0."
            )

    def __call__(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1] != len(self.mean):
            raise ParameterError(
                f"The normalisation is for {len(self.mean)} channels, and the images have {pixels.shape[1]}."
            )
        mean, deviation = (pixels.new_tensor(tuple(part))[:, None, None] for part in (self.mean, self.deviation))
        return (pixels - mean) / deviation


@dataclass(frozen=True)
class Network:
    """A model with its normalisation in front of it: pixels in [0, 1] → logits, differentiable throughout."""

    model: nn.Module
    normalise: Toward | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        inputs = pixels if self.normalise is None else self.normalise(pixels)
        return logits_of(self.model(inputs)).float()

    def logits(self, pixels: Tensor) -> Tensor:
        """The same, with an error that names a model which cannot take such images."""
        kind = type(self.model).__name__
        try:
            logits = self(pixels)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError, IndexError, TypeError) as error:
            shape = " × ".join(map(str, pixels.shape[1:]))
            raise ParameterError(f"{kind} does not run on images of {shape}: {error}") from error
        if logits.dim() != 2 or len(logits) != len(pixels):
            raise ParameterError(
                f"{kind} must give logits (B, classes); for {len(pixels)} images it gave {tuple(logits.shape)}."
            )
        return logits

    @property
    def device(self) -> torch.device:
        tensor = next(iter(self.model.parameters()), None)
        return torch.device("cpu") if tensor is None else tensor.device


def evaluate(
    model: nn.Module,
    source: Source,
    *,
    normalise: Toward | None = None,
    suites: str | Sequence[str | Suite] = DEFAULT,
    train: Source | None = None,
    seed: int = 0,
    batch_size: int = BATCH,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """How accurate, how well calibrated and how robust a classifier is.

    The images are read once, and every condition is tried on a batch while it is there. The model runs in eval mode and
    is left as it was: modes, gradients, random state.

    model: images → logits (B, classes). source: images as uint8 with their classes.
    normalise: pixels in [0, 1] → what the model takes, such as `Normalise(mean, deviation)`; none: pixels themselves.
    suites: "calibration", "robustness" and "stochastic", with options in call form, or as objects.
    train: images that the model was trained on, for the generalisation gap.
    seed: of starting points, places of occlusion, noise and stochastic passes.
    progress: called with the share of the work that is done.

    Returns plain data that can be written as JSON: images, suites, accuracy, top5, and per suite what it found.
    """
    trial = Trial(Network(model, normalise), parse_suites(suites), seed)
    if not len(source):
        raise DataError("There are no images to evaluate on.")
    advance = Share(trial.rounds * len(source), progress)
    with at_rest(model), torch.no_grad(), torch.random.fork_rng():
        stored_batches = source.to(trial.network.device).batches(torch.arange(len(source)), batch_size)
        for number, (stored, targets) in enumerate(stored_batches):
            trial.add(to_pixels(stored), targets, number, advance)
        known = _read_clean(trial.network, train, batch_size) if train is not None else None
    found = trial.read()
    return found if known is None else {**found, "gap": gap(known, found)}


class Trial:
    """A network, everything that is asked of it, and the counts so far."""

    def __init__(self, network: Network, suites: Sequence[Suite], seed: int) -> None:
        self.network, self.suites, self.seed = network, suites, seed
        self.calibration = next((suite for suite in suites if isinstance(suite, Calibration)), None)
        bins = (self.calibration or Calibration()).bins
        self.clean = Tally(bins)
        self.conditions: list[Condition] | None = None
        self.averaged: Averaged | None = None
        self.image: tuple[int, ...] = ()
        for suite in suites:
            if isinstance(suite, Robustness):
                self.conditions = conditions_of(suite, network)
            if isinstance(suite, Stochastic):
                self.averaged = Averaged(network, suite.passes, bins)

    @property
    def rounds(self) -> int:
        """How often every image is looked at."""
        return 1 + len(self.conditions or ())

    def add(self, pixels: Tensor, targets: Tensor, number: int, advance: Share) -> None:
        """Try everything on one batch. number: its place, from which all that is drawn for it follows."""
        self.image = tuple(pixels.shape[1:])
        self.clean.add(predict(self.network, pixels), targets)
        if self.averaged is not None:
            self.averaged.add(pixels, targets, derive(self.seed, "stochastic", number))
        advance(len(targets))
        for condition in self.conditions or ():
            harder = condition.change(pixels, targets, derive(self.seed, "batch", number))
            condition.tally.add(predict(self.network, harder), targets)
            advance(len(targets))

    def read(self) -> dict[str, Any]:
        """What was found, as plain data."""
        reading = self.clean.read()
        found: dict[str, Any] = {"suites": [suite.text for suite in self.suites]}
        found |= {name: reading[name] for name in ("images", "accuracy", "top5", "nll")}
        if self.calibration is not None:
            found["calibration"] = {name: reading[name] for name in ("brier", "ece", "bins")}
        if self.conditions is not None:
            found["robustness"] = _by_group(self.conditions)
            found["corruption_constants"] = published_for(*self.image).to_dict()
        if self.averaged is not None:
            found["stochastic"] = self.averaged.read()
        return found


@dataclass
class Share:
    """Tells which share of the work is done."""

    total: int
    progress: Callable[[float], None] | None
    done: int = 0

    def __call__(self, more: int) -> None:
        self.done += more
        if self.progress is not None:
            self.progress(self.done / self.total)


def to_pixels(stored: Tensor) -> Tensor:
    """uint8 as sources store it → float32 in [0, 1]."""
    if stored.dtype != torch.uint8 or stored.dim() != 4:
        raise ParameterError(
            f"Images must be uint8 (B, C, H, W) with values from 0 to 255; these are {stored.dtype}, "
            f"{tuple(stored.shape)}."
        )
    return stored.float() / 255


def predict(network: Network, pixels: Tensor) -> Tensor:
    """Probabilities (B, classes) in float64."""
    return network.logits(pixels).double().softmax(-1)


def gap(train: Mapping[str, Any], test: Mapping[str, Any]) -> dict[str, float | None]:
    """How much better the training images are known: larger means more overfitting, in accuracy as in NLL."""
    return {"accuracy": _difference(train["accuracy"], test["accuracy"]), "nll": _difference(test["nll"], train["nll"])}


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _read_clean(network: Network, source: Source, batch_size: int) -> Reading:
    tally = Tally()
    for stored, targets in source.to(network.device).batches(torch.arange(len(source)), batch_size):
        tally.add(predict(network, to_pixels(stored)), targets)
    return tally.read()


def _by_group(conditions: Sequence[Condition]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {"occlusion": [], "attacks": [], "corruptions": []}
    for condition in conditions:
        groups[condition.group].append(condition.read())
    return groups


class Averaged:
    """Predictions averaged over passes in which the recipe's methods act, where it has any that act by chance."""

    def __init__(self, network: Network, passes: int, bins: int) -> None:
        self.network, self.passes, self.tally = network, passes, Tally(bins)
        self.tempered: Tempered | None = None
        with contextlib.suppress(NoSiteError):
            self.tempered = Tempered.of(network.model)

    @property
    def acts(self) -> bool:
        """Whether two passes can differ at all."""
        return self.tempered is not None and any(by_chance(method) for method in self.tempered.methods)

    def add(self, pixels: Tensor, targets: Tensor, seed: int) -> None:
        if not self.acts:
            return
        assert self.tempered is not None
        torch.manual_seed(seed)
        self.tally.add(self.tempered.average(lambda: predict(self.network, pixels), self.passes), targets)

    def read(self) -> dict[str, Any] | None:
        """The same figures as without chance; None for a recipe in which nothing is drawn."""
        return {"passes": self.passes, **self.tally.read()} if self.acts else None


def by_chance(method: object) -> bool:
    """Whether a method makes two passes differ: it acts in training alone, changes the pass, and is not idle."""
    if isinstance(method, Scheduled) and method.idle:
        return False
    return isinstance(method, Scheduled | Perturbation | BlockMap | BranchMap | WeightMap)
