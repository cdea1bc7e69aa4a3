"""Attemper regularises attention in any PyTorch transformer, and shows whether it helped."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attemper import errors, methods
    from attemper.comparing import compare
    from attemper.integrations import flex
    from attemper.methods.registry import list_methods
    from attemper.ops.dispatch import attention, implementations
    from attemper.ops.merging import merge_parts
    from attemper.ops.stream import Offsets, keep_mask
    from attemper.probes import diagnose
    from attemper.recipe import parse, render
    from attemper.tempering import Tempered, apply, load

__version__ = "0.1.0"

__all__ = [
    "Offsets", "Tempered", "apply", "attention", "compare", "diagnose", "errors", "flex", "implementations",
    "keep_mask", "list_methods", "load", "merge_parts", "methods", "parse", "render",
]  # fmt: skip

HOMES = {
    "Offsets": "attemper.ops.stream",
    "Tempered": "attemper.tempering",
    "apply": "attemper.tempering",
    "attention": "attemper.ops.dispatch",
    "compare": "attemper.comparing",
    "diagnose": "attemper.probes",
    "implementations": "attemper.ops.dispatch",
    "keep_mask": "attemper.ops.stream",
    "list_methods": "attemper.methods.registry",
    "load": "attemper.tempering",
    "merge_parts": "attemper.ops.merging",
    "parse": "attemper.recipe",
    "render": "attemper.recipe",
}
"""Where a public name lives: it is loaded when it is first asked for, so that nothing waits for torch without need."""

ROOMS = {
    name: f"attemper.{name}"
    for name in (
        "errors", "files", "integrations", "kernels", "methods", "ops", "probes", "recipe", "sites", "tempering",
    )
} | {"flex": "attemper.integrations.flex"}  # fmt: skip
"""Modules that are attributes of the package, loaded in the same way."""


def __getattr__(name: str) -> Any:
    if name in HOMES:
        value = getattr(importlib.import_module(HOMES[name]), name)
    elif name in ROOMS:
        value = importlib.import_module(ROOMS[name])
    else:
        raise AttributeError(f"module 'attemper' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
