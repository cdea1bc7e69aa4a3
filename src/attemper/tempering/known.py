"""What is known of tensors while something runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Known:
    """What is known of some tensors, which are not kept alive.

    missing: what is given for all others. The compiler knows no ids of tensors, but finds them in a dict.
    """

    def __init__(self, missing: Any) -> None:
        self.missing = missing
        self.by_id: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self.traced: dict[Tensor, Any] = {}

    def note(self, x: Tensor, what: Any) -> None:
        if torch.compiler.is_compiling():
            self.traced[x] = what
        else:
            self.by_id[id(x)] = (weakref.ref(x), what)

    def of(self, x: Any) -> Any:
        """What is known of this very tensor; another one may have its id after its death."""
        if torch.compiler.is_compiling():
            return self.traced.get(x, self.missing) if isinstance(x, Tensor) else self.missing
        found = self.by_id.get(id(x))
        return self.missing if found is None or found[0]() is not x else found[1]

    def first(self, operands: Any) -> Any:
        """What is known of the first operand of which anything is."""
        found = (self.of(x) for x in operands)
        return next((what for what in found if what != self.missing), self.missing)
