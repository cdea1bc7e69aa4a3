"""Code that runs twice: activation checkpoints, and autograd functions that compute their forward again in backward.

A random number that is drawn inside must be the same both times, whether or not somebody saves the state of the
generator. What identifies such a region is what torch keeps until its backward pass: the frame of a checkpoint, or the
context of an autograd function. Whatever was drawn inside is noted there, and found there when it is computed again. So
is what other parts of the model had told by then: they may have run for another batch since.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHECKPOINT = "torch.utils.checkpoint"
NOTE = "_attemper"
"""The attribute under which a region keeps its note."""


class Region(NamedTuple):
    """A region that encloses the code which runs now.

    holder: what lives as long as the graph of the region. again: whether the region is being computed again.
    """

    holder: Any
    again: bool


class Drawn(NamedTuple):
    """A seed, and the state of the generator before it was drawn."""

    seed: Tensor
    state: Any


class Note:
    """What was drawn in a region when it ran first."""

    def __init__(self) -> None:
        self.seeds: list[Drawn] = []
        """In their order."""
        self.passes: list[tuple[Any, Any]] = []
        """For each tempered model whose sites drew inside: who asked, and what its pass was like at the beginning."""
        self.task = -1
        """The backward pass that computes the region again."""
        self.taken = 0
        """How many seeds it has found so far."""
        self.told: dict[Any, list[Any]] = {}
        """What code inside was told by other parts of the model, whenever it asked (`as_told`)."""
        self.asked: dict[Any, int] = {}
        """How often it has asked in that backward pass."""
        self.replayed: list[tuple[Any, Any]] = []
        """Like `passes`, as they are in that backward pass."""

    def begin(self) -> None:
        """Start from the beginning where another backward pass than before computes the region."""
        task = torch._C._current_graph_task_id()
        if task != self.task or task == -1:
            self.task, self.taken, self.replayed, self.asked = task, 0, [], {}

    def retell(self, key: Any, now: Any) -> Any:
        """What was told when the region ran first; `now`, if it did not ask then."""
        self.begin()
        before, told = self.asked.get(key, 0), self.told.get(key, [])
        self.asked[key] = before + 1
        return told[before] if before < len(told) else now


def inside_backward() -> bool:
    """Whether autograd runs a backward pass in this thread now."""
    return torch._C._current_graph_task_id() != -1


def may_repeat() -> bool:
    """Whether what runs now may be in a region; in an ordinary training step it is not, which costs nothing to see."""
    if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_ordinary() -> bool:
    """Whether an eager training step runs as most do: outside of regions, and only autograd follows what is done.

    Nobody else sees a kernel that is launched directly: no mode, no transform of torch.func, no forward-mode
    differentiation, no trace.
    """
    return (
        not torch.compiler.is_compiling()
        and not may_repeat()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def regions() -> list[Region]:
    """The regions that enclose the code which runs now, the innermost first, up to one that is computed again."""
    found: dict[int, Region] = {}
    hooked = _hooked()
    if hooked is not None:
        found[id(hooked)] = Region(hooked, False)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        region = _region_of(frame)
        if region is not None:  # a function may have several frames, of which the outer ones tell which way it runs
            before = found.get(id(region.holder))
            found[id(region.holder)] = region if before is None else Region(region.holder, before.again or region.again)
        frame = frame.f_back
    enclosing = list(found.values())
    again = next((i for i, region in enumerate(enclosing) if region.again), len(enclosing))
    return enclosing[: again + 1]


def innermost() -> Any:
    """What holds the region that the code which runs now is in; None: it is in none."""
    found = regions() if may_repeat() else []
    return found[0].holder if found else None


def note_of(holder: Any) -> Note | None:
    """What was noted of a region; None: nothing."""
    found: Note | None = getattr(holder, NOTE, None)
    return found


def noted(holder: Any) -> Note:
    """The same, made if there is none."""
    note = note_of(holder)
    if note is None:
        note = Note()
        setattr(holder, NOTE, note)
    return note


def as_told(key: Any, now: Any) -> Any:
    """What another part of the model tells now; in a region that is computed again, what it told there at first.

    key: names what is asked for.
    """
    if torch.compiler.is_compiling() or not may_repeat():
        return now
    enclosing = regions()
    if enclosing and enclosing[-1].again:
        note = note_of(enclosing.pop().holder)
        now = now if note is None else note.retell(key, now)
    for region in enclosing:
        noted(region.holder).told.setdefault(key, []).append(now)
    return now


def _region_of(frame: FrameType) -> Region | None:
    code = frame.f_code
    if frame.f_globals.get("__name__") == CHECKPOINT:
        if code.co_name == "unpack_hook":
            holder = frame.f_locals.get("frame")
            return None if holder is None else Region(holder, True)
        if "gen" in code.co_varnames:
            running = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            holder = None if running is None else running.f_locals.get("new_frame")
            return None if holder is None else Region(holder, False)
    context = _context(frame)
    return None if context is None else Region(context, "backward" in code.co_name or code.co_name == "vjp")


def _context(frame: FrameType) -> Any:
    """The context of an autograd function whose forward or backward a frame belongs to."""
    first = frame.f_code.co_varnames[:1]
    value = frame.f_locals.get(first[0]) if first else None
    if not isinstance(value, torch._C._FunctionBase):
        return None
    # What a compiler computes again it takes care of itself.
    return None if type(value).__name__ == "CompiledFunctionBackward" else value


def _hooked() -> Any:
    """The frame of the checkpoint whose hooks are the innermost; they may be there without a call of `checkpoint`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", None) != CHECKPOINT:
        return None
    code, cells = getattr(hooks[0], "__code__", None), getattr(hooks[0], "__closure__", None)
    if code is None or cells is None or "frame" not in code.co_freevars:
        return None
    return cells[code.co_freevars.index("frame")].cell_contents
