"""Launching a kernel again without what Triton does before every launch.

`kernel[grid](…)` binds its arguments, looks at each of them for what the machine code may be specialised on, hashes all
of that, and finds the compiled kernel: 45 to 75 µs for kernels with as many arguments as ours, on a host on which a
whole call of torch's own attention takes 70. What the outcome depends on is little, so it is compared here in less
time, and the compiled kernel is run by its own launcher.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.common.flops import tell_counter

MOST = 4_096
"""Compiled calls that are remembered. Data of ever new shapes would fill the memory of the host."""


class Compiled:
    """A kernel as Triton compiled it for one kind of arguments, with the values of its compile-time constants."""

    __slots__ = ("function", "metadata", "run", "values")

    def __init__(self, compiled: Any, values: tuple[Any, ...]) -> None:
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.values = values

    def start(self, grid: tuple[int, int, int], stream: int, arguments: tuple[Any, ...]) -> None:
        """Run it. The three None are what profilers would be told, of whom there are none."""
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *arguments, *self.values)


_known: dict[Any, Compiled] = {}
_memories: list[dict[Any, Any]] = []


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Compiled | None:
    """`kernel[grid](*arguments, **constants)` on the current device; what was launched, if it can be again.

    arguments: tensors and numbers, or tuples of them. constants: what is known when a kernel is compiled, and options
    of the compiler.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # −1: the interpreter
    kinds: list[Any] = [kernel, device, *constants.items()]
    add_kinds(arguments, kinds)
    key = tuple(kinds)
    found = _known.get(key)
    if found is None or _is_watched():
        tell_counter()  # now that Triton is loaded anyway
        compiled = kernel[grid](*arguments, **constants)
        if found is None and hasattr(compiled, "packed_metadata"):
            found = Compiled(compiled, _constants_in_order(kernel, len(arguments), constants))
            remember(_known, key, found)
        return found
    x, y, z = (*grid, 1, 1)[:3]
    found.start((x, y, z), torch._C._cuda_getCurrentRawStream(device), arguments)
    return found


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value under a key, and not for ever more of them."""
    if len(known) >= MOST:
        known.clear()
    known[key] = value


def memory() -> dict[Any, Any]:
    """A dict for `remember`, which `forget` empties."""
    _memories.append({})
    return _memories[-1]


def forget() -> None:
    """Decide everything about launches anew."""
    for known in _memories:
        known.clear()


class Launch:
    """A kernel with all that one layout of its tensors decides: its grid and its constants.

    The layout says shapes, strides, dtypes and the device, so that nothing but the tensors' addresses is left to look
    at before the kernel runs again.
    """

    __slots__ = ("compiled", "constants", "device", "grid", "kernel")

    def __init__(self, kernel: Any, programs: int | tuple[int, int], device: int, **constants: Any) -> None:
        across, down = (programs, 1) if isinstance(programs, int) else programs
        self.kernel, self.grid, self.device, self.constants = kernel, (across, down, 1), device, constants
        self.compiled: Compiled | None = None

    def __call__(self, aligned: bool, *arguments: Any) -> None:
        """aligned: whether 16 divides the addresses of all tensors, as it nearly always does."""
        found = self.compiled
        if found is None or not aligned or _is_watched():
            launched = launch(self.kernel, self.grid, *arguments, **self.constants)
            self.compiled = launched if aligned else found
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        found.run(*self.grid, stream, found.function, found.metadata, None, None, None, *arguments, *found.values)


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether 16 divides all addresses."""
    addresses = 0
    for t in tensors:
        if t is not None:
            addresses |= t.data_ptr()
    return addresses & 15 == 0


def layout(*tensors: Tensor | None) -> list[Any]:
    """What tensors are but for their addresses."""
    found: list[Any] = []
    for t in tensors:
        if t is None:
            found.append(None)
        else:
            found += (t.shape, t.stride(), t.dtype)
    return found


def add_kinds(arguments: tuple[Any, ...], kinds: list[Any]) -> None:
    """What machine code may depend on, of every argument: at least as much as Triton specialises on.

    Of a tensor its dtype and whether 16 divides its address; of an integer whether it is 1, whether 16 divides it, and
    how many bits it takes.
    """
    for x in arguments:
        kind = type(x)
        if kind is int:
            if -0x80000000 <= x <= 0x7FFFFFFF:
                kinds.append(1 if x == 1 else 16 if x & 15 == 0 else 0)
            else:
                kinds.append((x & 15 == 0, x > 0x7FFFFFFFFFFFFFFF))
        elif kind is tuple:
            add_kinds(x, kinds)
        elif isinstance(x, Tensor):
            kinds.append(x.dtype)
            kinds.append(x.data_ptr() & 15 == 0)
        else:
            kinds.append(kind)
            if kind is not float:
                kinds.append(x)


def _constants_in_order(kernel: Any, given: int, constants: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(constants[name] for name in kernel.arg_names[given:])


@functools.cache
def _hooks() -> Any:
    from triton import knobs

    return knobs.runtime


def _is_watched() -> bool:
    """Whether a profiler wants to be told of launches, which Triton does."""
    enter = _hooks().launch_enter_hook
    try:
        return bool(enter.calls)
    except AttributeError:
        return bool(enter)
