"""Every method by name: Attemper's own, and those that other packages add under the entry point `attemper.methods`."""

import functools
import importlib
import importlib.metadata

from attemper.errors import AttemperError
from attemper.methods.base import Method

OWN = (
    "DropKey", "DropAttention", "HardMask", "Blur", "Consistency", "RDrop", "ExplicitDropout", "AroraDropout",
    "ContextBroadcast", "TokenGraying", "Skipless", "DropHead", "LayerDrop", "DropPath", "FeedForwardDropout",
    "DropConnect",
)  # fmt: skip
"""Attemper's own, by the names of their classes in `attemper.methods`, in the order of the documentation."""


@functools.cache
def methods_by_name() -> dict[str, type[Method]]:
    """Recipe name → method class."""
    own = importlib.import_module("attemper.methods")
    found: dict[str, type[Method]] = {getattr(own, name).name: getattr(own, name) for name in OWN}
    for entry in importlib.metadata.entry_points(group="attemper.methods"):
        method = entry.load()
        if not (isinstance(method, type) and issubclass(method, Method)):
            raise AttemperError(f"entry point '{entry.name}' of attemper.methods is no Method: {method!r}")
        if method.name in found:
            raise AttemperError(f"entry point '{entry.name}' of attemper.methods names '{method.name}', which exists")
        found[method.name] = method
    return found


def list_methods() -> list[type[Method]]:
    """Every method there is, in the order of the documentation.

    >>> [method.name for method in list_methods()][:2]
    ['dropkey', 'dropattention']
    """
    return list(methods_by_name().values())
