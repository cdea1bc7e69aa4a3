"""Skipless blocks: what happens without the skip connections. Always Skip Attention, ICCV 2025."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from attemper.errors import ParameterError
from attemper.methods.base import Method, Paper, Place, check_choice
from attemper.methods.kinds import SkipRemover


@dataclasses.dataclass(frozen=True)
class Skipless(Method, SkipRemover):
    """Remove the skip connection round attention, round the MLP, or both. Acts in eval mode too.

    skip: which one goes: "attention", "mlp" or "both".
    blocks: the blocks in which it goes, by index; None: all.
    """

    name: ClassVar[str] = "skipless"
    summary: ClassVar[str] = "remove the skip connection round attention or the MLP"
    paper: ClassVar[Paper] = Paper("Always Skip Attention", "ICCV 2025")

    skip: Literal["attention", "mlp", "both"] = "attention"
    blocks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("skip", self.skip, ("attention", "mlp", "both"))
        if self.blocks is None:
            return
        blocks = self.blocks if isinstance(self.blocks, list | tuple) else (self.blocks,)
        if not blocks or any(isinstance(block, bool) or not isinstance(block, int) or block < 0 for block in blocks):
            raise ParameterError(f"blocks must be a list of block indices, 0 or more; got {self.blocks!r}")
        object.__setattr__(self, "blocks", tuple(blocks))

    def at(self, place: Place) -> Skipless:
        beyond = [block for block in self.blocks or () if block >= place.blocks]
        if beyond:
            raise ParameterError(f"blocks: there is no block {beyond[0]}; the model has blocks 0 … {place.blocks - 1}")
        return self

    def removes(self, place: Place) -> tuple[bool, bool]:
        if self.blocks is not None and place.block not in self.blocks:
            return False, False
        return self.skip in ("attention", "both"), self.skip in ("mlp", "both")
