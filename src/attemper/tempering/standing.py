"""Where the calls of a pass stand in those that a single process would make for the whole batch."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attemper.ops.stream import NOWHERE, Offsets
from attemper.ops.tracing import constant
from attemper.tempering.mesh import ALONE, Position

if TYPE_CHECKING:
    from attemper.tempering.penalties import Control

Place = Callable[[Position], Offsets]
"""Where among all heads, tokens and channels a call stands, by the position of its process."""

CONTROLS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The tempered models of this process, for operators, which cannot take them as arguments."""
NUMBERS = itertools.count()


def register(control: Control) -> tuple[int, str]:
    """A number by which operators find a tempered model, and the same as text."""
    key = next(NUMBERS)
    CONTROLS[key] = control
    return key, str(key)


def position_of_pass(control: Control, module: nn.Module, where: Tensor | torch.device) -> Position:
    """Where this process stands in a pass that begins with a module."""
    if torch.compiler.is_compiling():
        return traced_position(control)
    if control.trial:  # on a model that may be made parallel later
        return ALONE
    position = control.locator.find(module)
    if getattr(module, "_is_replica", False):  # of nn.DataParallel: another device has other samples
        device = where.device if isinstance(where, Tensor) else where
        position = position._replace(base=(device.index or 0) << 20)
    return position


def standing(control: Control) -> Position:
    """Where this process stands, for a site that runs by itself or draws nothing."""
    return traced_position(control) if torch.compiler.is_compiling() else control.locator.find_again()


def traced_position(control: Control) -> Position:
    """The same for what a compiler traces."""
    found: Position = _constant_position(control.label)
    return found


@constant
def _constant_position(label: str) -> Position:
    found: Position = CONTROLS[int(label)].locator.find_again()
    return found


def offsets(control: Control, position: Position, rows: int, place: Place | None, counted: bool = False) -> Offsets:
    """Where a call stands.

    rows: how many samples, or windows of them, it has; 0: it is not about samples. counted: whether it is known that
    all processes have equally many.
    """
    at = place(position) if place is not None and len(position.axes) > 0 else NOWHERE
    if rows == 0:
        return at
    if control.samples is not None:
        return at._replace(sample=at.sample + control.samples.row(rows))
    if position.base:
        return at._replace(sample=at.sample + position.base)
    if len(position.axes) == 0:
        return at
    data = position.along("data")
    if data.size == 1:
        return at
    if not (counted or torch.compiler.is_compiling() or control.trial or control.looking):
        control.evenness.check(rows, position.ranks)
    return at._replace(sample=at.sample + data.rank * rows)
