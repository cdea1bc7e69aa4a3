"""The teacher of a distilled run: a trained network that is only ever asked, and never changed."""

import dataclasses
import hashlib

import torch
from torch import nn

import attemper
from attemper.errors import ParameterError, UnreadableError
from attemper.files import Weights, parse_json, read_weights
from attemper.lab.call_syntax import parse_call, render_call
from attemper.lab.models.libraries import from_timm
from attemper.lab.models.registry import build_model
from attemper.lab.models.weights import load_weights
from attemper.lab.tasks.base import InputShape, Shape
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.training.spec import Budget
from attemper.tempering.outputs import logits_of

DIGITS = 20
"""Of a hash."""


def budget_with_teacher_hash(budget: Budget, shape: Shape) -> Budget:
    """The budget with the hash of its teacher's weights, if it has a teacher and the hash is not there yet."""
    if budget.teacher is None or budget.teacher_hash is not None:
        return budget
    return dataclasses.replace(budget, teacher_hash=_open(budget.teacher, budget.teacher_weights, shape)[1])


def with_untrained_teacher(budget: Budget) -> Budget:
    """The budget with an untrained teacher where it asks for a download: a step takes the same time with either."""
    name, options = parse_call(budget.teacher or "none")
    if not options.pop("pretrained", False):
        return budget
    options = {**options, "pretrained": False}
    return dataclasses.replace(budget, teacher=render_call(name, options), teacher_hash=None)


def open_teacher(budget: Budget, shape: Shape) -> nn.Module:
    """The budget's teacher with its weights, on the CPU, in eval mode and without gradients.

    Raises unless it has weights, they are those of `teacher_hash` where the budget has one, and it predicts as many
    classes as the task has. `timm:NAME(pretrained=false)` stands for an untrained one, to measure times with.
    """
    assert budget.teacher is not None
    teacher, found = _open(budget.teacher, budget.teacher_weights, shape)
    if budget.teacher_hash not in (None, found):
        raise ParameterError(
            f"teacher_hash is {budget.teacher_hash}, and the weights of the teacher '{budget.teacher}' have {found}: "
            "they are others than this run was planned with."
        )
    return teacher


def _open(text: str, weights: str | None, shape: Shape) -> tuple[nn.Module, str]:
    """The teacher, and the hash of what it has learnt."""
    with drawing_from(0):  # what it draws for weights that are then overwritten must not shift the run's own streams
        if weights is None:
            teacher, recipe = _from_library(text, shape), "none"
        else:
            if "pretrained" in parse_call(text)[1]:
                raise ParameterError(
                    f"teacher is '{text}', and '{weights}' are weights as well: leave out one of them."
                )
            given, trained, recipe = _read(weights)
            if trained not in (None, text):  # weights can fit where heads, say, are divided in another way
                raise ParameterError(f"teacher is '{text}', and '{weights}' says that it holds a '{trained}'.")
            teacher = build_model(text, shape)
            attemper.apply(teacher, recipe)  # some methods compute in eval mode too: the teacher is what was trained
            _check_classes(teacher, given, text, shape)
            load_weights(teacher, given, of=f"the teacher '{text}'")
        teacher.eval().requires_grad_(False)
        _check_predictions(teacher, text, shape)
    return teacher, _hash(teacher, recipe)


def _from_library(text: str, shape: Shape) -> nn.Module:
    name, options = parse_call(text)
    library, _, model = name.partition(":")
    pretrained = options.pop("pretrained", None)
    if library != "timm" or not isinstance(pretrained, bool):
        raise ParameterError(
            f"The teacher '{text}' has no weights. Give teacher_weights a file of weights, or let timm load its own: "
            "timm:NAME(pretrained=true)."
        )
    if not isinstance(shape, InputShape):
        raise ParameterError(f"The teacher '{text}' does not take inputs of {shape}.")
    return from_timm(model, shape, options, pretrained=pretrained)


def _read(path: str) -> tuple[Weights, str | None, str]:
    """Weights in a file, and the model and recipe that they belong to where a run has written it."""
    try:
        weights = read_weights(path)
    except UnreadableError as error:
        raise UnreadableError(f"teacher_weights: {error}") from error
    try:
        spec = parse_json(weights.notes["spec"], "its spec")
        return weights, render_call(*parse_call(spec["model"])), str(spec["recipe"])
    except (KeyError, TypeError, ParameterError, UnreadableError):  # somebody else's file
        return weights, None, "none"


def _check_classes(teacher: nn.Module, weights: Weights, text: str, shape: Shape) -> None:
    """Raise if the weights are the teacher's, but for another number of classes."""
    own, given = teacher.state_dict(), weights.tensors
    if set(own) != set(given):
        return
    other = [(given[name].shape, value.shape) for name, value in own.items() if given[name].shape != value.shape]
    if other and all(wanted[:1] == (shape.classes,) and found[1:] == wanted[1:] for found, wanted in other):
        raise ParameterError(
            f"The weights '{weights.path}' of the teacher '{text}' are for {other[0][0][0]} classes, and the task "
            f"has {shape.classes}."
        )


@torch.no_grad()
def _check_predictions(teacher: nn.Module, text: str, shape: Shape) -> None:
    inputs, _ = shape.example(2)
    try:
        given = tuple(logits_of(teacher(inputs)).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ParameterError(f"The teacher '{text}' does not run on inputs of {shape}: {error}") from error
    if given == (2, shape.classes):
        return
    if len(given) == 2:
        raise ParameterError(f"The teacher '{text}' predicts {given[1]} classes, and the task has {shape.classes}.")
    raise ParameterError(
        f"The teacher '{text}' gives {' × '.join(map(str, given))} scores for two samples; a student learns from one "
        "score per class and sample."
    )


def _hash(teacher: nn.Module, recipe: str) -> str:
    """Of everything that decides what a teacher says beside its text."""
    digest = hashlib.sha256(recipe.encode())
    for name, value in sorted(teacher.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(memoryview(value.detach().contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()[:DIGITS]
