"""The directions that a normalisation takes away from its input, and a Jacobian without them.

A layer norm gives the same for x, for x + c and, but for its ε, for μ + c·(x − μ): its Jacobian takes two directions of
every token to zero, the mean (1, …, 1) and the centred token x − μ. An RMS norm takes one, x itself. These are no
property of the branch behind the norm; κ with them would be that of ε, or infinite.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-6
"""Of the mean gain: the mean direction is lost exactly, up to rounding; some norms compute in float32."""
NEARLY = 0.1
"""Of the mean gain: along the token itself ε leaves the share ε/(variance + ε), which is small but for tiny tokens."""


MEAN, CENTRED, INPUT = "the mean", "the centred input", "the input"


@dataclass(frozen=True)
class NullDirections:
    """Orthonormal directions that a norm loses, in every group of coordinates that it normalises together."""

    groups: Tensor
    """(G, c): which coordinates of the flattened input stand in each group, such as the channels of a token."""
    directions: tuple[Tensor, ...]
    """Each (G, c), of length 1; zero where a group has no such direction, as a token of equal channels."""
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(int((each != 0).any(1).sum()) for each in self.directions)

    def __str__(self) -> str:
        """Such as 'κ leaves out 2 directions that the norm loses: the input of each of 2 tokens'."""
        each = f" of each of {len(self.groups)} tokens" if len(self.groups) > 1 else ""
        return f"κ leaves out {self.count} directions that the norm loses: {' and '.join(self.names)}{each}"


def null_directions(
    norm: Callable[[Tensor], Tensor], x: Tensor, *, num_groups: int | None = None
) -> NullDirections | None:
    """What a normalisation loses at x; None where that is nothing, as with a batch norm in eval mode or an identity.

    Found by what it computes, not by its class: over the last axis, over channels of a map (B, C, H, W), or over the
    groups of a group norm, the mean, the centred input and the input itself are tried on its Jacobian.

    x: of one sample, in float64.
    num_groups: of a group norm; otherwise its attribute of that name, if it has one.

    >>> norm = torch.nn.LayerNorm(4, dtype=torch.float64)
    >>> found = null_directions(norm, torch.randn(1, 3, 4, dtype=torch.float64))
    >>> found.count, found.names
    (6, ('the mean', 'the centred input'))
    """
    num_groups = getattr(norm, "num_groups", None) if num_groups is None else num_groups
    for groups in _groupings(x, num_groups):
        values = x.detach().flatten()[groups]
        if groups.shape[1] < 2:
            continue
        centred = _unit(values - values.mean(1, keepdim=True))
        mean = torch.full_like(values, groups.shape[1] ** -0.5)
        if _is_lost(norm, x, groups, mean, EXACT):
            lost = _is_lost(norm, x, groups, centred, NEARLY)
            directions = {MEAN: mean} | ({CENTRED: centred} if lost else {})
        elif _is_lost(norm, x, groups, _unit(values), NEARLY):
            directions = {INPUT: _unit(values)}
        else:
            continue
        return NullDirections(groups, tuple(directions.values()), tuple(directions))
    return None


def _groupings(x: Tensor, num_groups: int | None) -> Iterator[Tensor]:
    """Coordinates that may be normalised together."""
    places = torch.arange(x.numel(), device=x.device).view(x.shape)
    yield places.flatten(0, -2) if x.dim() > 1 else places[None]
    if x.dim() == 4:
        yield places.movedim(1, -1).flatten(0, -2)
    if isinstance(num_groups, int) and num_groups > 0 and x.numel() % num_groups == 0:
        yield places.reshape(num_groups, -1)


def _unit(directions: Tensor) -> Tensor:
    """Rows of length 1; those that are zero up to rounding are zero."""
    lengths = directions.norm(dim=1, keepdim=True)
    return torch.where(lengths > 1e-12, directions / lengths.clamp_min(1e-300), 0.0)


def _is_lost(norm: Callable[[Tensor], Tensor], x: Tensor, groups: Tensor, direction: Tensor, share: float) -> bool:
    """Whether a direction comes out smaller than this share of what a random one gives, in most groups.

    Each group has a factor of its own: what is lost only for all groups together is not lost by each.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(groups), 1 + groups.shape[1], dtype=torch.float64, generator=generator).to(direction)
    factor, other = drawn[:, :1], _unit(drawn[:, 1:])
    lost, kept = (_gains(norm, x, groups, factor * each) for each in (direction, other))
    there = (direction != 0).any(1) & (kept > 0)
    return bool(there.any()) and bool((lost <= share * kept)[there].double().mean() > 0.5)


def _gains(norm: Callable[[Tensor], Tensor], x: Tensor, groups: Tensor, direction: Tensor) -> Tensor:
    """(G) lengths of what the Jacobian makes of directions, all groups at once: a norm does not mix them."""
    tangent = torch.zeros_like(x).flatten()
    tangent[groups] = direction
    _, out = torch.autograd.functional.jvp(norm, x.detach(), tangent.view(x.shape))
    lengths: Tensor = torch.as_tensor(out).flatten()[groups].norm(dim=1)
    return lengths


def are_lost(jacobian: Tensor, null: NullDirections) -> bool:
    """Whether a Jacobian loses these directions, as it must where the input is seen through the norm alone."""
    columns = jacobian[:, null.groups]
    typical = columns.square().sum((0, 2)).div(null.groups.shape[1]).sqrt()
    for name, direction in zip(null.names, null.directions, strict=True):
        gains = torch.einsum("ogc,gc->og", columns, direction).norm(dim=0)
        share = EXACT if name == MEAN else NEARLY
        if not bool((gains <= share * typical).double().mean() > 0.5):
            return False
    return True


def without(jacobian: Tensor, null: NullDirections) -> Tensor:
    """The Jacobian (outputs, inputs) on the complement of the directions: (outputs, inputs − count).

    Each direction is turned into the first coordinate of its group by a reflection, and that column left out. Nothing
    is squared, so that small singular values keep their digits.
    """
    columns = jacobian[:, null.groups]
    directions = [each.clone() for each in null.directions]
    kept = []
    for at, direction in enumerate(directions):
        there = (direction != 0).any(1)
        first = torch.zeros_like(direction)
        first[:, 0] = 1.0
        mirror = torch.where(there[:, None], direction, first)
        mirror = mirror + torch.where(mirror[:, :1] < 0, -first, first)
        columns = _reflected(columns, mirror)
        kept.append(columns[:, ~there, 0])
        columns = columns[:, :, 1:]
        directions[at + 1 :] = [_reflected(each[None], mirror)[0, :, 1:] for each in directions[at + 1 :]]
    return torch.cat([columns.flatten(1), *kept], 1)


def _reflected(rows: Tensor, mirror: Tensor) -> Tensor:
    """rows (n, G, c) reflected in every group along mirror (G, c)."""
    along = torch.einsum("ogc,gc->og", rows, mirror)
    return torch.addcmul(rows, along[..., None], mirror / mirror.square().sum(-1, keepdim=True), value=-2.0)
