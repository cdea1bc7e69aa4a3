"""Every method by name: Attemper's own, and those that other packages add under the entry point `attemper.methods`."""

import functools
import importlib.metadata

from attemper.errors import AttemperError
from attemper.methods.arora import AroraDropout
from attemper.methods.base import Method
from attemper.methods.blur import Blur
from attemper.methods.broadcast import ContextBroadcast
from attemper.methods.consistency import Consistency, RDrop
from attemper.methods.dropattention import DropAttention
from attemper.methods.dropconnect import DropConnect
from attemper.methods.drophead import DropHead
from attemper.methods.dropkey import DropKey
from attemper.methods.droppath import DropPath
from attemper.methods.explicit import ExplicitDropout
from attemper.methods.feedforward import FeedForwardDropout
from attemper.methods.graying import TokenGraying
from attemper.methods.hardmask import HardMask
from attemper.methods.layerdrop import LayerDrop
from attemper.methods.skipless import Skipless

OWN: tuple[type[Method], ...] = (
    DropKey,
    DropAttention,
    HardMask,
    Blur,
    Consistency,
    RDrop,
    ExplicitDropout,
    AroraDropout,
    ContextBroadcast,
    TokenGraying,
    Skipless,
    DropHead,
    LayerDrop,
    DropPath,
    FeedForwardDropout,
    DropConnect,
)


@functools.cache
def methods_by_name() -> dict[str, type[Method]]:
    """Recipe name → method class."""
    found = {method.name: method for method in OWN}
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
