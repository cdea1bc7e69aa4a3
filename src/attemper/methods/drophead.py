"""DropHead: drop whole attention heads. Zhou et al., 2020."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Paper
from attemper.methods.rates import Scheduled
from attemper.ops.perturbation import Perturbation, Stage, rescue
from attemper.ops.stream import Offsets, Stream


def drophead(out: Tensor, keep: Tensor, first: int = 0) -> Tensor:
    """Heads set to zero, survivors scaled by H / kept; a sample that would lose every head keeps all of them.

    out: (B, H, …); keep: boolean (B, H), True = kept. Of a part of the heads, `first` is the first one in `keep`.

    >>> import torch
    >>> drophead(torch.ones(1, 4, 1, 1), torch.tensor([[True, True, False, True]])).flatten().tolist()
    [1.333..., 1.333..., 0.0, 1.333...]
    """
    keep = rescue(keep, None)
    work = torch.promote_types(out.dtype, torch.float32)
    scale = keep * (keep.shape[1] / keep.sum(1, keepdim=True, dtype=work))
    scale = scale[:, first : first + out.shape[1]]
    return out * scale.to(out.dtype).view(*scale.shape, *([1] * (out.dim() - 2)))


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

    def drawn(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        """Which heads are kept: boolean (B, H, 1, 1)."""
        batch, here, first = shape[0], shape[1], stream.at.head
        return rescue(self._keep(batch, here, stream), None)[:, first : first + here, None, None]

    def _keep(self, batch: int, here: int, stream: Stream) -> Tensor:
        """(batch, heads) boolean, of all heads, of which a call may have a part."""
        at = stream.at
        heads = at.heads or here
        if at.head + here > heads:
            raise ParameterError(
                f"drophead scales by how many of all heads are kept, so a call of {here} heads from head {at.head} on "
                f"must say how many there are, and at.heads is {at.heads}"
            )
        return stream.placed(Offsets(at.sample)).keep((batch, 1, 1, heads), self.p).view(batch, heads)

    def perturb_heads(self, out: Tensor, stream: Stream) -> Tensor:
        return drophead(out, self._keep(out.shape[0], out.shape[1], stream), stream.at.head)
