"""DropHead: drop whole attention heads. Zhou et al., 2020."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from attemper.methods.base import Paper
from attemper.methods.rates import Scheduled
from attemper.ops.perturbation import Perturbation, Stage, rescue
from attemper.ops.stream import Stream


def drophead(out: Tensor, keep: Tensor) -> Tensor:
    """Heads set to zero, survivors scaled by H / kept; a sample that would lose every head keeps all of them.

    out: (B, H, …); keep: boolean (B, H), True = kept.

    >>> import torch
    >>> drophead(torch.ones(1, 4, 1, 1), torch.tensor([[True, True, False, True]])).flatten().tolist()
    [1.333..., 1.333..., 0.0, 1.333...]
    """
    keep = rescue(keep, None)
    scale = keep * (keep.shape[1] / keep.sum(1, keepdim=True))
    return out * scale.to(out.dtype).view(*keep.shape, *([1] * (out.dim() - 2)))


@dataclasses.dataclass(frozen=True)
class DropHead(Scheduled, Perturbation):
    """Drop heads, each sample its own; what is left is scaled up by H / kept, and never all of them go.

    p, schedule, match: how much, in which block (see `Scheduled`).
    """

    name: ClassVar[str] = "drophead"
    summary: ClassVar[str] = "drop whole heads and scale up the others"
    paper: ClassVar[Paper] = Paper("Scheduled DropHead", "2020")
    stochastic: ClassVar[bool] = True
    stages: ClassVar[tuple[Stage, ...]] = ("heads",)
    needs_heads: ClassVar[bool] = True

    @property
    def uneven_rows(self) -> str | None:
        return "drophead scales them"

    def perturb_heads(self, out: Tensor, stream: Stream) -> Tensor:
        batch, heads = out.shape[:2]
        return drophead(out, stream.keep((batch, 1, 1, heads), self.p).view(batch, heads))
