"""Ordinary dropout on the MLP's hidden and output activations: the baseline beside which attention methods are put."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor

from attemper.methods.base import Paper, check_flag
from attemper.methods.kinds import Position, PreparedMap, TokenMap, Tokens, elementwise_keep, inverted
from attemper.methods.rates import Scheduled
from attemper.ops import fused
from attemper.ops.stream import Stream


@dataclasses.dataclass(frozen=True)
class FeedForwardDropout(Scheduled, TokenMap):
    """Inverted dropout on what goes into an MLP's last layer and on what comes out of it.

    p, schedule, match: how much, in which block (see `Scheduled`).
    replace: where the model has dropout of its own in its MLPs, set that to 0 instead of refusing.
    """

    name: ClassVar[str] = "ffdropout"
    summary: ClassVar[str] = "ordinary dropout on the MLP's hidden and output activations"
    paper: ClassVar[Paper] = Paper("Dropout", "JMLR 2014")
    stochastic: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = False
    replaces_own: ClassVar[Literal["drop_path", "mlp_dropout"] | None] = "mlp_dropout"

    replace: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("replace", self.replace)

    @property
    def positions(self) -> tuple[Position, ...]:
        return ("mlp_mid", "mlp_end")

    def drawn(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """Which activations are kept: boolean (B, N, C)."""
        return elementwise_keep(shape, self.p, stream)

    def map_tokens(self, x: Tensor, tokens: Tokens, stream: Stream | None) -> Tensor:
        assert stream is not None
        if fused.masks.drops(x):
            return fused.masks.dropped_tokens(x, stream, self.p)
        return inverted(x, self.drawn(x.shape, stream), self.p)

    def prepare(self, x: Tensor) -> PreparedMap | None:
        return fused.masks.TokenDrop(x, self.p) if fused.masks.drops(x) else None
