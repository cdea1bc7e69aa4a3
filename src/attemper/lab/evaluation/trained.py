"""A trained model from the folder of its run, without the data that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import attemper
from attemper.errors import UnreadableError
from attemper.files import Weights
from attemper.lab.models.registry import build_model
from attemper.lab.models.weights import load_weights
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.training.inputs import ImageInputs
from attemper.lab.training.spec import RunSpec
from attemper.lab.training.weights import read_run
from attemper.tempering import Tempered


@dataclass(frozen=True)
class Trained:
    """What a run on images left behind."""

    spec: RunSpec
    inputs: ImageInputs
    model: nn.Module
    """Tempered with the run's recipe, with the chosen weights, in eval mode."""
    tempered: Tempered
    path: Path
    """The file of the weights."""


def read_trained(folder: Path) -> tuple[RunSpec, ImageInputs]:
    """Which run a folder holds, and what its model takes."""
    weights, spec, _ = read_run(folder)
    return spec, inputs_of(weights)


def inputs_of(weights: Weights) -> ImageInputs:
    """What the model takes to which weights of a run belong; raises where they do not say it."""
    if "inputs" not in weights.notes:
        raise UnreadableError(
            f"'{weights.path}' does not say what its model takes: it was trained on something else than "
            "images with a class, or by an earlier version."
        )
    return ImageInputs.from_json(weights.notes["inputs"])


def load_trained(folder: Path, device: torch.device | str = "cpu") -> Trained:
    """The model of a finished run on images."""
    weights, spec, _ = read_run(folder)
    inputs = inputs_of(weights)
    with drawing_from(0):  # what is drawn for weights that are then overwritten shifts nobody's stream
        model = build_model(spec.model, inputs.shape, trained=False)
        tempered = attemper.apply(model, spec.recipe)
    load_weights(model, weights, of=f"{spec.model} with '{spec.recipe}'")
    return Trained(spec, inputs, model.to(device).eval(), tempered, weights.path)
