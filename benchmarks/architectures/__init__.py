"""Small models with random weights, one for every kind of architecture that people train; nothing is downloaded."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from architectures.base import Architecture

LIBRARIES = {
    "timm": ("timm", "timm_models", "timm_architectures"),
    "transformers": ("transformers", "transformers_models", "transformers_architectures"),
    "vit-pytorch": ("vit_pytorch", "vit_pytorch_models", "vit_pytorch_architectures"),
    "x-transformers": ("x_transformers", "x_transformers_models", "x_transformers_architectures"),
    "torchvision": ("torchvision", "torch_models", "torchvision_architectures"),
    "torch": ("torch", "torch_models", "torch_architectures"),
}
"""Library → the package that it is, and the module and the function here that list its models."""


def is_installed(library: str) -> bool:
    """Whether the models of a library can be built here."""
    return importlib.util.find_spec(LIBRARIES[library][0]) is not None


@functools.cache
def architectures_of(library: str) -> dict[str, Architecture]:
    """The models of an installed library by their names."""
    _, module, function = LIBRARIES[library]
    made: list[Architecture] = getattr(importlib.import_module(f"architectures.{module}"), function)()
    return {architecture.name: architecture for architecture in made}
