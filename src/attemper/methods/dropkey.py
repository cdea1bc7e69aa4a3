"""DropKey: drop keys before softmax. Li et al., "DropKey", CVPR 2023.

Algorithm 1 of the paper adds −1e12 to each logit with probability p and lets softmax renormalise over the rest. Here
the dropped logits are −inf, and a row that would lose all of its allowed keys is left as it is.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Paper, Place, check_choice, check_grid, check_odd, check_prefix
from attemper.methods.learning import LearnableRate
from attemper.methods.structure import seed_rate, structured_keep
from attemper.ops import fused
from attemper.ops.perturbation import DrawnKeys, SeedDrop, drop_logits
from attemper.ops.stream import Offsets, Stream, threshold


def dropkey(logits: Tensor, keep: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Attention weights softmax(S + log keep), (B, H, Nq, Nk).

    keep: boolean, broadcastable to the logits, True = kept.
    allowed: the keys that the logits' masks leave; a row that would lose all of them keeps all of them.

    >>> logits = torch.zeros(1, 1, 1, 4)
    >>> dropkey(logits, torch.tensor([True, True, False, False])).tolist()
    [[[[0.5, 0.5, 0.0, 0.0]]]]
    """
    return drop_logits(logits, keep, allowed)[0].softmax(-1)


def shared_keep(stream: Stream, batch: int, heads: int, keys: int, p: float) -> Tensor:
    """(batch, heads, 1, keys) boolean: one key set per head, drawn without replacement.

    N − ⌊p·N⌋ keys are drawn, at least one, and the last of them is kept with probability 1 − frac(p·N): the number of
    drawn keys never changes, and the expected share of dropped keys is p.
    """
    drawn = draw_shared(stream, batch, heads, keys, p)
    first = drawn.order[..., : drawn.count]
    kept = torch.ones_like(first, dtype=torch.bool) if drawn.kept is None else drawn.kept
    return torch.zeros_like(drawn.order, dtype=torch.bool).scatter(-1, first, kept)[:, :, None]


def draw_shared(stream: Stream, batch: int, heads: int, keys: int, p: float) -> DrawnKeys:
    """What `shared_keep` is made of: all keys in the order in which they are drawn, and how many of them are."""
    count = shared_count(keys, p)
    part = p * keys - math.floor(p * keys)
    always = count == 1 or part == 0
    stream = stream.placed(Offsets(stream.at.sample, stream.at.head))
    if fused.keys.runs_on(stream.seed):
        limit = None if always else threshold(part)
        order, rank, kept = fused.keys.draw_order(stream, batch, heads, keys, count, limit)
        return DrawnKeys(order, count, None if always else kept, rank)
    order = stream.scores(batch, heads, keys).argsort(dim=-1, stable=True)
    if always:
        return DrawnKeys(order, count)
    last = stream.keep((batch, heads, 1, keys + 1), part)[..., 0, keys:]
    return DrawnKeys(order, count, (torch.arange(count, device=order.device) < count - 1) | last)


def shared_count(keys: int, p: float) -> int:
    """N − ⌊p·N⌋, at least one: how many keys the shared forms draw.

    >>> shared_count(10, 0.25), shared_count(2, 0.9)
    (8, 1)
    """
    return max(1, keys - math.floor(p * keys))


@dataclasses.dataclass(frozen=True)
class DropKey(LearnableRate):
    """Drop keys before softmax; what is left renormalises by itself.

    p, schedule, match: how much, in which block (see `Scheduled`); p=learn learns it (see `LearnableRate`).
    share: "none" draws anew for every (sample, head, query, key); "queries" draws one key set for all queries of a
        head; "heads" one for all heads too.
    structure: "none"; "block" drops w × w windows of the image grid (w = 3); "cross" drops horizontal and vertical
        stripes of width w (w = 1). Prefix tokens are never dropped by a structure.
    w: the width of the structure, odd; None is the structure's default.
    grid, prefix: (rows, columns) of the patches among the keys, and how many keys stand before them. In a tempered
        model they come from the model.
    """

    name: ClassVar[str] = "dropkey"
    summary: ClassVar[str] = "drop keys before softmax, which renormalises over the rest"
    paper: ClassVar[Paper] = Paper("DropKey", "CVPR 2023")
    stochastic: ClassVar[bool] = True

    share: Literal["none", "queries", "heads"] = "none"
    structure: Literal["none", "block", "cross"] = "none"
    w: int | None = None
    grid: tuple[int, int] | None = None
    prefix: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("share", self.share, ("none", "queries", "heads"))
        check_choice("structure", self.structure, ("none", "block", "cross"))
        if self.structure == "none":
            for name in ("w", "grid", "prefix"):
                if getattr(self, name) is not None:
                    raise ParameterError(f"{name} belongs to structure=block or cross, and structure is none")
            return
        if self.w is not None:
            check_odd("w", self.w)
        if self.prefix is not None:
            check_prefix(self.prefix)
        if self.grid is not None:
            object.__setattr__(self, "grid", check_grid("grid", self.grid))
            self._check_width(self.grid)

    def _check_width(self, grid: tuple[int, int], where: str = "") -> None:
        if self.width > min(grid):
            raise ParameterError(
                f"a {self.structure} of width w={self.width} is larger than the grid of {grid[0]} × {grid[1]} keys"
                f"{where}; give a smaller w, or leave it out with targets="
            )

    @property
    def cannot_learn(self) -> str | None:
        return None if self.share == "none" and self.structure == "none" else "share=none and structure=none"

    @property
    def width(self) -> int:
        """The width of the structure, its default filled in."""
        return self.w if self.w is not None else 3 if self.structure == "block" else 1

    def at(self, place: Place) -> DropKey:
        here = super().at(place)
        if self.structure == "none" or self.grid is not None:
            return here
        if place.grid is None and place.grid_follows:
            return here
        if place.grid is None:
            raise ParameterError(
                f"structure={self.structure} needs the keys to lie on an image grid, and none is known for "
                f"{place.where}; give it as grid=[rows, columns] and prefix=n, or use structure=none"
            )
        self._check_width(place.grid, f" of {place.where}")
        prefix = place.prefix if self.prefix is None else self.prefix
        return dataclasses.replace(here, grid=place.grid, prefix=prefix)

    @property
    def seeks_grid(self) -> bool:
        return self.structure != "none" and self.grid is None

    @property
    def given_prefix(self) -> int | None:
        return self.prefix

    def on_grid(self, grid: tuple[int, int], prefix: int) -> DropKey:
        return dataclasses.replace(self, grid=grid, prefix=prefix)

    @property
    def tells_heads(self) -> bool:
        return self.share == "heads"

    @property
    def independent_drop(self) -> float | None:
        drops_each = self.share == "none" and self.structure == "none" and not self.learns
        return self.rate if drops_each else None

    @property
    def drops_keys(self) -> bool:
        return not self.learns

    def kept_keys(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor | None:
        return None if self.learns else self.keep(shape, stream)

    def seed_drop(self, keys: int) -> SeedDrop | None:
        if self.structure == "none":
            return None
        grid, prefix = self._image(keys)
        rate = seed_rate(self.structure, grid, self.width, self.rate)
        shared = self.share != "none", self.share == "heads"
        return SeedDrop(rate, self.structure, self.width, grid, prefix, *shared)

    def shared_count(self, keys: int) -> int | None:
        return shared_count(keys, self.rate) if self.share != "none" and self.structure == "none" else None

    def draw_keys(self, batch: int, heads: int, keys: int, stream: Stream) -> DrawnKeys:
        if self.share == "heads":
            return draw_shared(stream.for_all_heads(), batch, 1, keys, self.rate)
        return draw_shared(stream, batch, heads, keys, self.rate)

    def drawn(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        return self.keep(shape, stream)

    def keep(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        """Which keys are kept in a call of this (B, H, Nq, Nk): boolean, broadcastable to it."""
        batch, heads, queries, keys = shape
        if self.share == "heads":
            heads, stream = 1, stream.for_all_heads()
        if self.share != "none":
            queries, stream = 1, stream.for_all_queries()
        if self.structure != "none":
            return self._structured(batch, heads, queries, keys, stream)
        if self.share != "none":
            return shared_keep(stream, batch, heads, keys, self.rate)
        return stream.keep(shape, self.rate)

    def _image(self, keys: int) -> tuple[tuple[int, int], int]:
        """The grid of a call with so many keys, and how many of them stand before it."""
        prefix = self.prefix or 0
        if self.grid is None or keys != prefix + self.grid[0] * self.grid[1]:
            raise ParameterError(
                f"structure={self.structure} needs keys = prefix + rows × columns; this call has {keys} keys, "
                f"grid={self.grid}, prefix={prefix}"
            )
        return self.grid, prefix

    def _structured(self, batch: int, heads: int, queries: int, keys: int, stream: Stream) -> Tensor:
        grid, prefix = self._image(keys)
        rate = seed_rate(self.structure, grid, self.width, self.rate)
        patches = structured_keep(stream, (batch, heads, queries), grid, self.structure, self.width, rate)
        return torch.nn.functional.pad(patches, (prefix, 0), value=True)

    def perturb_logits(self, logits: Tensor, allowed: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor | None]:
        batch, heads, queries, keys = logits.shape
        return drop_logits(logits, self.keep((batch, heads, queries, keys), stream), allowed)
