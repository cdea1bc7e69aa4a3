"""The places of a model where methods act, the same few kinds for every library."""

from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True)
class Geometry:
    """How the keys of an attention lie on the image: `prefix` tokens, then rows × columns patches, row by row."""

    grid: tuple[int, int]
    prefix: int = 0
    class_token: bool = field(default=False, compare=False)
    """Whether the first of the prefix tokens is a class token."""


@dataclass(frozen=True)
class Projection:
    """One linear map inside an attention: some rows of a module's weight."""

    module: nn.Module
    weight: str = "weight"
    rows: tuple[int, int] | None = None
    """First and last-but-one row where several projections share a weight; None: all of them."""

    @property
    def parameter(self) -> Tensor:
        """The whole weight that the rows are taken from."""
        weight: Tensor = getattr(self.module, self.weight)
        return weight

    def matrix(self) -> Tensor:
        """(out, in), a view of the parameter."""
        weight = self.parameter
        return weight if self.rows is None else weight[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Projections:
    """Where Q, K and V come from, and the map behind attention where there is one."""

    q: Projection
    k: Projection
    v: Projection
    out: Projection | None

    @property
    def packed(self) -> bool:
        """Whether one weight makes Q, K and V, in this order."""
        third = self.q.parameter.shape[0] // 3
        rows = [(third * i, third * (i + 1)) for i in range(3)]
        each = (self.q, self.k, self.v)
        return [part.rows for part in each] == rows and all(part.parameter is self.q.parameter for part in each)


@dataclass(frozen=True)
class AttentionSite:
    """A module that computes attention."""

    name: str
    module: nn.Module
    block: int
    heads: int | None
    geometry: Geometry | None
    projections: Projections | None


@dataclass(frozen=True)
class MlpSite:
    """A feed-forward network: `firsts` take its input, `last` gives its output.

    front: the input of `firsts`; mid: the input of `last`; end: the output of `last`.
    """

    name: str
    block: int
    firsts: tuple[nn.Module, ...]
    last: nn.Module


@dataclass(frozen=True)
class BlockSite:
    """A residual block: what holds an attention, a feed-forward network or both."""

    name: str
    module: nn.Module
    index: int


@dataclass(frozen=True)
class PatchSite:
    """A convolution that turns patches which do not overlap into tokens."""

    name: str
    module: nn.Conv2d
    patch: tuple[int, int]


@dataclass(frozen=True)
class Sites:
    """All of them. `left_alone` says which attention-like modules are no sites, and why."""

    attentions: tuple[AttentionSite, ...]
    mlps: tuple[MlpSite, ...]
    blocks: tuple[BlockSite, ...]
    patches: tuple[PatchSite, ...]
    left_alone: dict[str, str] = field(default_factory=dict)
    targeted: frozenset[str] | None = None
    """The names that `targets` match or that lie below a match; None: there were no targets."""

    def reaches(self, name: str) -> bool:
        """Whether a module is to be tempered at all."""
        return self.targeted is None or name in self.targeted
