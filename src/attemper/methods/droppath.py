"""DropPath (stochastic depth per sample): drop whole residual branches. Huang et al., ECCV 2016."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor

from attemper.methods.base import Paper, check_choice, check_flag
from attemper.methods.kinds import BranchMap, PreparedSum, inverted
from attemper.methods.rates import Scheduled
from attemper.ops import fused
from attemper.ops.stream import Offsets, Stream


@dataclasses.dataclass(frozen=True)
class DropPath(Scheduled, BranchMap):
    """Drop the attention branch and the MLP branch of a block, each sample by itself; survivors are divided by 1 − p.

    p, schedule, match: how much, in which block (see `Scheduled`).
    replace: where the model has a drop path of its own, set that to 0 instead of refusing.
    saving: "none" computes branches for all samples; "auto" for those alone that keep them, where a trial shows that it
        changes nothing but rounding.
    """

    name: ClassVar[str] = "droppath"
    summary: ClassVar[str] = "drop whole residual branches, sample by sample"
    paper: ClassVar[Paper] = Paper("Deep Networks with Stochastic Depth", "ECCV 2016")
    stochastic: ClassVar[bool] = True
    replaces_own: ClassVar[Literal["drop_path", "mlp_dropout"] | None] = "drop_path"

    replace: bool = False
    saving: Literal["auto", "none"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("replace", self.replace)
        check_choice("saving", self.saving, ("auto", "none"))

    @property
    def leaves_out(self) -> bool:
        return self.saving == "auto"

    def kept_samples(self, samples: int, stream: Stream) -> Tensor:
        return self.drawn((samples,), stream)

    def drawn(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """Which samples keep the branch: boolean (B, 1, …)."""
        keep = stream.placed(Offsets(stream.at.sample)).keep((shape[0], 1, 1, 1), self.p)
        return keep.view(-1, *([1] * (len(shape) - 1)))

    def map_branch(self, branch: Tensor, stream: Stream) -> Tensor:
        if fused.masks.drops(branch):
            return fused.masks.dropped_branch(branch, stream, self.p)
        return inverted(branch, self.drawn(branch.shape, stream), self.p)

    def add_branch(self, x: Tensor, branch: Tensor, stream: Stream) -> Tensor:
        if fused.masks.adds(x, branch):
            return fused.masks.dropped_sum(x, branch, stream, self.p)
        return super().add_branch(x, branch, stream)

    def prepare(self, x: Tensor, branch: Tensor) -> PreparedSum | None:
        return fused.masks.BranchDrop(x, branch, self.p) if fused.masks.adds(x, branch) else None
