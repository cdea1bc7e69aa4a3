"""LayerDrop: skip whole blocks in training. Fan et al., ICLR 2020."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from attemper.methods.base import Paper
from attemper.methods.kinds import BlockMap
from attemper.methods.rates import Scheduled
from attemper.ops.stream import NOWHERE, Stream


@dataclasses.dataclass(frozen=True)
class LayerDrop(Scheduled, BlockMap):
    """Skip a block, for the whole batch at once, without rescaling.

    p, schedule, match: how often, which block (see `Scheduled`).

    The block is computed and then not used: so that a compiled or captured step stays one graph, no time is saved.
    """

    name: ClassVar[str] = "layerdrop"
    summary: ClassVar[str] = "skip whole blocks, without rescaling"
    paper: ClassVar[Paper] = Paper("Reducing Transformer Depth on Demand with Structured Dropout", "ICLR 2020")
    stochastic: ClassVar[bool] = True

    def drawn(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """Whether the block is kept: boolean, 0-dim."""
        return stream.placed(NOWHERE).keep((1, 1, 1, 1), self.p).view(())

    def map_block(self, before: Tensor, after: Tensor, stream: Stream) -> Tensor:
        return torch.where(self.drawn(after.shape, stream), after, before)
