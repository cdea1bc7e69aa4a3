"""The weights that a finished run chose, as safetensors, with the run that they belong to."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from attemper.errors import ParameterError, UnreadableError
from attemper.files import WEIGHTS, Weights, atomic_write, parse_json, read_weights, weights_in
from attemper.lab.errors import StorageError
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.boxes.task import BoxTask
from attemper.lab.tasks.vqa.task import QuestionTask
from attemper.lab.training.box_inputs import BoxInputs
from attemper.lab.training.inputs import ImageInputs
from attemper.lab.training.question_inputs import QuestionInputs
from attemper.lab.training.spec import RunSpec

IMAGES, BOXES, QUESTIONS = "inputs", "boxes", "questions"
"""The notes in which weights say what their model takes."""


def notes_of(task: Task) -> dict[str, str]:
    """What models of a task take, for whoever uses them without its data; empty where no program here could."""
    if isinstance(task, BoxTask):
        return {BOXES: BoxInputs.of(task).to_json()}
    if isinstance(task, QuestionTask):
        return {QUESTIONS: QuestionInputs.of(task).to_json()}
    images = ImageInputs.of(task)
    return {} if images is None else {IMAGES: images.to_json()}


def save_weights(
    folder: Path,
    weights: dict[str, Tensor],
    spec: RunSpec,
    fingerprint: str,
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write weights, on the CPU, in place of those that were there.

    fingerprint: of the data that the run saw. inputs: what the model takes, as `notes_of` says it.
    """
    from safetensors.torch import save

    notes = {"format": "pt", "spec": json.dumps(spec.to_dict()), "fingerprint": fingerprint, **inputs}
    data = save({name: value.contiguous() for name, value in weights.items()}, metadata=notes)
    path = folder / WEIGHTS
    try:
        atomic_write(path, data)
    except OSError as error:
        raise StorageError(f"The weights '{path}' could not be written: {error.strerror or error}.") from error


def read_run(folder: Path) -> tuple[Weights, RunSpec, str]:
    """The weights in a run's folder, the run that they belong to, and the fingerprint of its data."""
    weights = read_weights(weights_in(folder))
    try:
        spec = RunSpec.from_dict(parse_json(weights.notes["spec"], "its spec"))
        return weights, spec, weights.notes["fingerprint"]
    except (KeyError, ParameterError, UnreadableError) as error:
        raise UnreadableError(f"'{weights.path}' does not say which run its weights belong to ({error!r}).") from error
