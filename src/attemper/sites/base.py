"""The places of a model where methods act, the same few kinds for every library."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn


def original_class(module: object) -> Any:
    """The class that a module was written with; a tempered one has a made subclass of it."""
    cls: Any = type(module)
    while "_attemper_original" in cls.__dict__:
        cls = cls._attemper_original
    return cls


@dataclass(frozen=True)
class Geometry:
    """How the keys of an attention lie on the image: `prefix` tokens, then rows × columns patches, row by row."""

    grid: tuple[int, int]
    prefix: int = 0
    class_token: bool = field(default=False, compare=False)
    """Whether the first of the prefix tokens is a class token."""


@dataclass(frozen=True)
class Slot:
    """Where a layer stands: in which module, and under which name. Another library may put something round it later."""

    owner: nn.Module | None
    """None: nobody's, since the layer was copied without what holds it."""
    name: str

    @property
    def layer(self) -> Any:
        """What stands there now; None: nothing."""
        if self.owner is None:
            return None
        found = self.owner._modules.get(self.name)
        return getattr(self.owner, self.name, None) if found is None else found

    def __deepcopy__(self, memo: dict[int, Any]) -> "Slot":
        # Whoever copies one layer does not want the whole model: an owner that is not copied itself stays behind.
        return Slot(memo.get(id(self.owner)), self.name)


@dataclass(frozen=True)
class Projection:
    """One linear map inside an attention: some rows of a module's weight."""

    module: nn.Module
    """The layer itself, below any adapter that is put round it."""
    weight: str = "weight"
    rows: tuple[int, int] | None = None
    """First and last-but-one row where several projections share a weight; None: all of them."""
    slot: Slot | None = None
    """Where the layer stands in the attention; None: its weight is the attention's own."""
    transposed: bool = False
    """Whether the weight is (in, out); its rows are then its columns."""

    @property
    def parameter(self) -> Tensor:
        """The whole weight that the rows are taken from."""
        weight: Tensor = getattr(self.module, self.weight)
        return weight

    def matrix(self) -> Tensor:
        """(out, in), a view of the parameter."""
        return self.part(self.parameter)

    def part(self, weight: Tensor) -> Tensor:
        """The rows of this projection, (out, in), of a weight like the parameter."""
        weight = weight.t() if self.transposed else weight.flatten(1)
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
        each = (self.q, self.k, self.v)
        if self.q.rows is None or any((part.module, part.weight) != (self.q.module, self.q.weight) for part in each):
            return False
        third = self.q.rows[1]
        return [part.rows for part in each] == [(third * i, third * (i + 1)) for i in range(3)]


@dataclass(frozen=True)
class SeenCall:
    """An attention call, or a softmax that looked like one, in a pass of the model."""

    modules: tuple[str, ...]
    """The names of the modules that were running, the innermost first."""
    over: Literal["keys", "channels", "scores"]
    """What was weighed: keys that met queries; channels; or tokens by scores in which no queries and keys met."""
    what: str
    """The call, for messages."""
    hides: bool = False
    """Whether tokens were hidden from each other, where that was looked at."""


@dataclass(frozen=True)
class GridSource:
    """A layer whose output (B, C, rows, columns) becomes the keys of an attention, row by row, behind `prefix` tokens.

    It tells the grid where images come in sizes that are not known before a model runs.
    """

    module: nn.Module
    prefix: int = 0


@dataclass(frozen=True)
class AttentionSite:
    """A module that computes attention."""

    name: str
    module: nn.Module
    block: int
    heads: int | None
    geometry: Geometry | None
    projections: Projections | None
    source: GridSource | None = None


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
    """The layer that gets an image and cuts it up: a convolution whose patches do not overlap, or the adapter round it.

    Where pieces overlap it is the first layer of what makes tokens of them.
    """

    name: str
    module: nn.Module
    patch: tuple[int, int]
    """Rows and columns of pixels that a token stands for."""
    overlaps: bool = False
    """Whether the layer also sees pixels beyond a patch."""
    grid: tuple[int, int] | None = None
    """How many tokens an image has, down and across, where that is told instead of the patch."""


@dataclass(frozen=True)
class ConvolutionSite:
    """A convolution, or the adapter round it."""

    name: str
    module: nn.Module
    block: int
    """The block that it lies in, or the next one; in a model without blocks, its place among the convolutions."""


@dataclass(frozen=True)
class Sites:
    """All of them. `left_alone` says which attention-like modules are no sites, and why."""

    attentions: tuple[AttentionSite, ...]
    mlps: tuple[MlpSite, ...]
    blocks: tuple[BlockSite, ...]
    patches: tuple[PatchSite, ...]
    left_alone: dict[str, str] = field(default_factory=dict)
    seen: str = ""
    """Of modules that are called attention, what they did in a pass of the model, for messages."""
    reached: dict[Any, frozenset[str]] = field(default_factory=dict)
    """Of each kind of site that `targets` choose: the names that they match or that lie below a match."""
    convolutions: tuple[ConvolutionSite, ...] = ()

    def reaches(self, name: str, kind: str) -> bool:
        """Whether a module is to be tempered as a site of this kind."""
        return kind not in self.reached or name in self.reached[kind]
