"""What a library's adapter answers."""

from typing import Protocol

from torch import nn

from attemper.sites.base import Geometry


class Adapter(Protocol):
    """What Attemper cannot see in a module itself, for the models of one library."""

    def geometry(self, owner: nn.Module, attention: nn.Module) -> Geometry | None:
        """The grid of an attention's keys, if `owner` (a module around it) is of this library and tells."""

    # An adapter may have `source(owner, attention) -> GridSource | None` besides: the layer that tells the grid of the
    # keys where it is only known when the model runs.

    def leave_alone(self, module: nn.Module) -> str | None:
        """Why a module that looks like attention over keys is none, or None."""


def from_library(module: nn.Module, library: str) -> bool:
    """Whether a module's class, or one that it was derived from, comes from `library`."""
    return any(cls.__module__.partition(".")[0] == library for cls in type(module).__mro__)


def pair(value: object) -> tuple[int, int] | None:
    """A size given as one number or two, as (rows, columns)."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) for n in value):
        return int(value[0]), int(value[1])
    return None
