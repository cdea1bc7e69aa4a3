"""How well conditioned each branch of each block is: singular values of its Jacobian, without and with its skip.

A branch is what a skip connection leads past: attention and MLP of a transformer's block, the mixing of space and of
channels in a mixer's, the two convolutions in a ResNet's. Both are computed for every branch, whichever of the two the
model has: J, and J + 1 (or J and the Jacobian of the shortcut together). Directions that come out as zero, because a
layer norm or a dead ReLU takes them away, are counted and left out of κ.

The probe of Jacobians (`attemper.probes`) looks at one model, whose κ is infinite where such a direction is no norm's.
Here networks are compared, of which those with ReLUs would all be infinite. What a zero is, both say alike.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from attemper.lab.models.convmixer import MixerBlock
from attemper.lab.models.resnet import ResidualBlock
from attemper.methods.base import Method, Place
from attemper.methods.kinds import SkipRemover
from attemper.probes.float64 import in_float64
from attemper.probes.jacobian import check_limit, differentiable, matrix, rounding, singular_values
from attemper.probes.nulls import null_directions, without
from attemper.probes.watching import in_eval

IMAGES = 4
"""Of the test set, one Jacobian each; one image alone where Jacobians are large."""
SMALL = 2_048
"""Coordinates up to which all singular values are computed as such, and in every block. Of larger ones those of JᵀJ
are, in three blocks: many times faster, and values below a millionth of the largest cannot be told from zero."""

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Branch:
    """One branch of one block, as a function of what goes into it."""

    block: int
    name: str
    entry: nn.Module
    """The module that gets the branch's input first."""
    function: Function
    has_skip: bool
    shortcut: Function = lambda x: x
    norm: Function | None = None
    """The layer norm at its beginning."""
    local: bool = False
    """Whether it mixes channels alone or places alone, so that its Jacobian falls into small blocks."""


def branch_conditions(model: nn.Module, inputs: Tensor, methods: Sequence[Method] = ()) -> list[dict[str, Any]]:
    """One row per block and branch, medians over some images; none for models whose blocks are not known here.

    methods: of the recipe, which may have removed skips.
    """
    branches = list(branches_of(model, methods))
    if not branches:
        return []
    with in_eval(model):
        given = _entering(model, inputs[:IMAGES], branches)
        sizes = {branch.block: given[branch.entry][0].numel() for branch in branches}
        if max(sizes.values()) > SMALL:
            given = {entry: x[:1] for entry, x in given.items()}
            last = max(sizes)
            branches = [branch for branch in branches if branch.block in (0, last // 2, last)]
        return [_row(branch, given[branch.entry]) for branch in branches]


def branches_of(model: nn.Module, methods: Sequence[Method] = ()) -> Iterator[Branch]:
    """The branches of our own models and of timm's transformers, block by block."""
    blocks = model.blocks if isinstance(getattr(model, "blocks", None), nn.Sequential) else ()
    for at, block in enumerate(cast(Any, blocks)):
        if isinstance(block, MixerBlock):
            yield Branch(at, "spatial", block.spatial, block.spatial, block.spatial_skip, local=_is_depthwise(block))
            yield Branch(at, "channel", block.channel, block.channel, block.channel_skip, local=True)
        elif isinstance(block, ResidualBlock):
            yield Branch(at, "residual", block.branch, block.branch, block.skip, block.shortcut)
        elif all(hasattr(block, part) for part in ("norm1", "attn", "ls1", "norm2", "mlp", "ls2")):
            yield from _transformer_branches(block, at, _removed(methods, at, len(cast(Any, blocks))))


def _is_depthwise(block: MixerBlock) -> bool:
    convolution = cast(nn.Conv2d, block.spatial[0])
    return convolution.groups == convolution.in_channels


def _transformer_branches(block: Any, at: int, removed: tuple[bool, bool]) -> Iterator[Branch]:
    def attention(x: Tensor) -> Tensor:
        out: Tensor = block.ls1(block.attn(block.norm1(x)))
        return out

    def mlp(x: Tensor) -> Tensor:
        out: Tensor = block.ls2(block.mlp(block.norm2(x)))
        return out

    yield Branch(at, "attention", block.norm1, attention, not removed[0], norm=block.norm1)
    yield Branch(at, "MLP", block.norm2, mlp, not removed[1], norm=block.norm2, local=True)


def _removed(methods: Sequence[Method], block: int, blocks: int) -> tuple[bool, bool]:
    """Whether a recipe takes away the skip round attention and the one round the MLP."""
    found = [each.removes(Place(block, blocks)) for each in methods if isinstance(each, SkipRemover)]
    return any(attention for attention, _ in found), any(mlp for _, mlp in found)


def _entering(model: nn.Module, inputs: Tensor, branches: Sequence[Branch]) -> dict[nn.Module, Tensor]:
    """What goes into each branch when the model runs."""
    given: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        given[module] = args[0].detach()

    hooks = [branch.entry.register_forward_pre_hook(note) for branch in branches]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return given


def _row(branch: Branch, given: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"block": branch.block, "branch": branch.name, "has_skip": branch.has_skip}

    def joined(x: Tensor) -> Tensor:
        return branch.shortcut(x) + branch.function(x)

    for name, function, norm in (("alone", branch.function, branch.norm), ("with_skip", joined, None)):
        found = [each for x in given if (each := spectrum(function, x[None], norm, branch.local)) is not None]
        row |= {name: _median([each.condition for each in found])}
        row |= {f"{name}_lost": _median([each.lost for each in found])}
        row |= {f"{name}_to_median": _median([each.to_median for each in found])}
    return row


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# ---------------------------------------------------------------------------------------------------------- one matrix
@dataclass(frozen=True)
class Spectrum:
    """The singular values of a Jacobian that are not lost, in short."""

    largest: float
    median: float
    smallest: float
    lost: float
    """The share of directions that come out as zero, of as many as the smaller side of the Jacobian has."""

    @property
    def condition(self) -> float:
        """κ of what is not lost."""
        return self.largest / self.smallest

    @property
    def to_median(self) -> float:
        """How far the largest stands above most of the others: no single small value decides it, as it decides κ."""
        return self.largest / self.median


def spectrum(function: Function, x: Tensor, norm: Function | None = None, local: bool = False) -> Spectrum | None:
    """Of ∂function/∂x at one sample x (1, …), in float64; None above the limit of the probe, or if all is lost.

    >>> found = spectrum(lambda x: x * torch.tensor([8.0, 4.0, 2.0, 0.0]), torch.ones(1, 4))
    >>> found.largest, found.median, found.smallest, found.lost
    (8.0, 4.0, 2.0, 0.25)
    """
    with torch.enable_grad(), in_float64(x.device):
        leaf, branch = differentiable(function, x)
        if branch.larger_side > check_limit(None, x.device):
            return None
        null = None if norm is None else null_directions(norm, leaf)
        jacobian = matrix(branch)
    sides, zero = min(jacobian.shape), rounding(jacobian)
    if local or max(jacobian.shape) <= SMALL:
        values = singular_values(jacobian, leaf.shape, null)
    else:
        values, zero = gram_values(jacobian if null is None else without(jacobian, null)), zero**0.5
    kept = values[values > zero * values[0]]
    if not len(kept):
        return None
    middle = float(kept.sort().values[len(kept) // 2])
    return Spectrum(float(kept[0]), middle, float(kept[-1]), max(0.0, 1 - len(kept) / sides))


def gram_values(jacobian: Tensor) -> Tensor:
    """Singular values, largest first, as roots of the eigenvalues of the smaller of JᵀJ and JJᵀ."""
    tall = jacobian if jacobian.shape[0] >= jacobian.shape[1] else jacobian.mT
    values: Tensor = torch.linalg.eigvalsh(tall.mT @ tall).clamp_min(0).sqrt().flip(0)
    return values
