"""DropConnect: drop weights instead of activations. Wan et al., ICML 2013."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from attemper.methods.base import Paper
from attemper.methods.kinds import WeightMap, inverted
from attemper.methods.rates import Scheduled
from attemper.ops.stream import Offsets, Stream


@dataclasses.dataclass(frozen=True)
class DropConnect(Scheduled, WeightMap):
    """Zero single weights of the Q, K, V and output projections of attention; the others are divided by 1 − p.

    p, schedule, match: how much, in which block (see `Scheduled`). One draw per layer and pass, for the whole batch.
    """

    name: ClassVar[str] = "dropconnect"
    summary: ClassVar[str] = "drop single weights of the attention projections"
    paper: ClassVar[Paper] = Paper("Regularization of Neural Networks using DropConnect", "ICML 2013")
    stochastic: ClassVar[bool] = True

    def drawn(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """Which weights are kept: boolean, of the shape of the weight."""
        stream = stream.placed(Offsets(query=stream.at.query, key=stream.at.key))  # of its first row and column
        return stream.keep((1, 1, shape[0], math.prod(shape[1:])), self.p).view(tuple(shape))

    def map_weight(self, weight: Tensor, stream: Stream) -> Tensor:
        return inverted(weight, self.drawn(weight.shape, stream), self.p)
