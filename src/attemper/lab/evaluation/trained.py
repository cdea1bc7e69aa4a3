"""A trained model from the folder of its run, without the data that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import nn

import attemper
from attemper.errors import UnreadableError
from attemper.files import Weights
from attemper.lab.models.registry import build_model
from attemper.lab.models.weights import load_weights
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.training.box_inputs import BoxInputs
from attemper.lab.training.inputs import ImageInputs
from attemper.lab.training.question_inputs import QuestionInputs
from attemper.lab.training.spec import RunSpec
from attemper.lab.training.weights import BOXES, IMAGES, QUESTIONS, read_run
from attemper.tempering import Tempered

Inputs = TypeVar("Inputs", ImageInputs, BoxInputs, QuestionInputs)


@dataclass(frozen=True)
class TrainedOn(Generic[Inputs]):
    """What a run left behind. inputs: what its model takes."""

    spec: RunSpec
    inputs: Inputs
    model: nn.Module
    """Tempered with the run's recipe, with the chosen weights, in eval mode."""
    tempered: Tempered
    path: Path
    """The file of the weights."""


Trained = TrainedOn[ImageInputs]
"""Of images with one class each, or with a class for every pixel."""
TrainedFinder = TrainedOn[BoxInputs]
"""Of images with boxes."""
TrainedAnswerer = TrainedOn[QuestionInputs]
"""Of questions about images."""


def read_trained(folder: Path) -> tuple[RunSpec, ImageInputs]:
    """Which run a folder holds, and what its model takes."""
    weights, spec, _ = read_run(folder)
    return spec, _image_inputs(weights, spec)


def _image_inputs(weights: Weights, spec: RunSpec) -> ImageInputs:
    """What the model takes to which weights of a run belong; raises where they do not say it."""
    if IMAGES not in weights.notes:
        raise UnreadableError(
            f"'{weights.path}' does not say what its model takes: it was trained on '{spec.task}', which is something "
            "else than images with a class, or by an earlier version."
        )
    return ImageInputs.from_json(weights.notes[IMAGES])


def load_trained(folder: Path, device: torch.device | str = "cpu") -> Trained:
    """The model of a finished run on images."""
    weights, spec, _ = read_run(folder)
    return _loaded(weights, spec, _image_inputs(weights, spec), device)


def load_predicting(folder: Path, device: torch.device | str = "cpu") -> Trained | TrainedFinder | TrainedAnswerer:
    """The model of a finished run on images, whatever it predicts: a class, a mask, boxes or answers."""
    weights, spec, _ = read_run(folder)
    if QUESTIONS in weights.notes:
        return _loaded(weights, spec, QuestionInputs.from_json(weights.notes[QUESTIONS]), device)
    if BOXES in weights.notes:
        return _loaded(weights, spec, BoxInputs.from_json(weights.notes[BOXES]), device)
    return _loaded(weights, spec, _image_inputs(weights, spec), device)


def _loaded(weights: Weights, spec: RunSpec, inputs: Inputs, device: torch.device | str) -> TrainedOn[Inputs]:
    with drawing_from(0):  # what is drawn for weights that are then overwritten shifts nobody's stream
        model = build_model(spec.model, inputs.shape, trained=False)
        tempered = attemper.apply(model, spec.recipe)
    load_weights(model, weights, of=f"{spec.model} with '{spec.recipe}'")
    return TrainedOn(spec, inputs, model.to(device).eval(), tempered, weights.path)
