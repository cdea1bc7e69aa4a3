"""Models of one's own: a function that returns one, by 'module:function' or handed over by a Python program."""

import copy
from typing import Any

from torch import nn

from attemper.errors import ParameterError
from attemper.lab.call_syntax import parse_call, render_call
from attemper.lab.own_code import call_own, find_own, hash_of_code
from attemper.lab.tasks.base import Shape


def build_own(text: str, shape: Shape) -> nn.Module:
    """The model that a function makes.

    It gets the options in brackets, and the `shape` of the task's inputs and `classes` where it has such parameters.
    A module in the place of a function is copied.
    """
    name, options = parse_call(text)
    function = find_own(name, "model")
    if isinstance(function, nn.Module):
        return copy.deepcopy(function)
    if not callable(function):
        raise ParameterError(
            f"The model '{name}' is {type(function).__name__}; it must be a function that returns one."
        )
    offered = {"shape": shape, "classes": shape.classes, "num_classes": shape.classes}
    made: Any = call_own(function, name, "model", offered, options)
    if not isinstance(made, nn.Module):
        raise ParameterError(f"The model '{name}' gave a {type(made).__name__}; it must give a torch.nn.Module.")
    return made


def code_hash(text: str) -> str:
    """Of everything of one's own that a model is made of."""
    name, options = parse_call(text)
    return hash_of_code((find_own(name, "model"), render_call("", options)))
