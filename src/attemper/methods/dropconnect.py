"""DropConnect: drop weights instead of activations. Wan et al., ICML 2013."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from attemper.methods.base import Paper
from attemper.methods.kinds import WeightMap, inverted
from attemper.methods.rates import Scheduled
from attemper.ops.stream import Stream


@dataclasses.dataclass(frozen=True)
class DropConnect(Scheduled, WeightMap):
    """Zero single weights of the Q, K, V and output projections of attention; the others are divided by 1 − p.

    p, schedule, match: how much, in which block (see `Scheduled`). One draw per layer and pass, for the whole batch.
    """

    name: ClassVar[str] = "dropconnect"
    summary: ClassVar[str] = "drop single weights of the attention projections"
    paper: ClassVar[Paper] = Paper("Regularization of Neural Networks using DropConnect", "ICML 2013")
    stochastic: ClassVar[bool] = True

    def map_weight(self, weight: Tensor, stream: Stream) -> Tensor:
        rows, columns = weight.shape[0], weight[0].numel()
        keep = stream.keep((1, 1, rows, columns), self.p).view(weight.shape)
        return inverted(weight, keep, self.p)
