"""The grid of an attention's keys, read off while the model runs, for methods that act on the image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.methods.base import Method, Place
from attemper.ops.perturbation import Perturbation
from attemper.ops.regions import as_told
from attemper.sites import AttentionSite
from attemper.sites.grids import grid_in_arguments, tells_grid, tokens_before
from attemper.tempering.penalties import Control
from attemper.tempering.subclassing import Action

Grid = tuple[int, int]
MAKES_MAPS = (
    *(F.conv2d, torch.conv2d, F.avg_pool2d, torch.max_pool2d, F.max_pool2d),
    *(F.adaptive_avg_pool2d, torch.nn.functional.interpolate),
)
"""Functions whose output (…, rows, columns) may become keys."""


@dataclass
class MapAction(Action):
    """Notes the rows and columns of a feature map that becomes keys."""

    control: Control
    last: Grid | None = None
    """Those of the map that came last."""

    def acts(self, training: bool) -> bool:
        return self.control.on(training)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        self.last = (int(out.shape[-2]), int(out.shape[-1]))
        return out

    @property
    def size(self) -> Grid | None:
        """Those of the map that the keys of now are made of; None: there was none yet."""
        size: Grid | None = as_told(id(self), self.last)
        return size


@dataclass
class KeyGrids:
    """What is known before a call of how its keys lie, and what else to look for."""

    place: Place
    source: MapAction | None
    """The layer whose output becomes the keys; None: what is seen inside the attention tells."""
    prefixes: tuple[int, ...]
    """How many keys may stand before the patches."""

    def find(self, keys: int, prefix: int | None, maps: Sequence[Grid]) -> tuple[Grid, int]:
        """The grid of the keys, and how many stand before it.

        prefix: as the recipe says; None: it does not. maps: the sizes that were seen inside the attention.
        """
        known = None if self.source is None else self.source.size
        if known is not None:
            maps = [known]
        prefixes = self.prefixes if prefix is None else (prefix,)
        fitting = {(grid, count) for grid in maps for count in prefixes if count + grid[0] * grid[1] == keys}
        if not fitting and known is None:
            built = [] if self.place.grid is None else [self.place.grid]
            fitting = {(grid, count) for grid in built for count in prefixes if count + grid[0] * grid[1] == keys}
        if len(fitting) != 1:
            raise ParameterError(self.unknown(keys, prefixes, maps, len(fitting) > 1))
        return next(iter(fitting))

    def unknown(self, keys: int, prefixes: Iterable[int], maps: Sequence[Grid], several: bool) -> str:
        seen = ", ".join(f"{rows} × {columns}" for rows, columns in dict.fromkeys(maps)) or "none"
        before = " or ".join(str(count) for count in dict.fromkeys(prefixes))
        why = "more than one of them fits" if several else f"none of them and {before} before it make so many"
        return (
            f"{self.place.where} has {keys} keys in this call, and on which image grid they lie is not known: maps "
            f"seen were {seen}, and {why}; give grid and prefix in the recipe, or leave it out with targets="
        )


@dataclass
class SeenMaps:
    """The sizes that are seen while one attention runs."""

    grids: KeyGrids
    samples: int = 0
    """How many there are in what the attention gets; 0: not known."""
    sizes: list[Grid] = field(default_factory=list)

    def note(self, func: Any, out: Any) -> None:
        if func in MAKES_MAPS and out.dim() == 4:
            self.sizes.append((int(out.shape[-2]), int(out.shape[-1])))

    def copy(self) -> SeenMaps:
        """The same at this point."""
        return replace(self, sizes=list(self.sizes))

    def of_call(self, batch: int) -> list[Grid]:
        """Those that may be the grid of the keys: not where a sample's tokens are shared out between windows."""
        return self.sizes if batch == self.samples else []


def watch_maps(grids: KeyGrids, attention: nn.Module, args: Any, kwargs: Any) -> SeenMaps:
    """What an attention is called with tells already."""
    x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    told = grid_in_arguments(attention, args, kwargs)
    return SeenMaps(grids, 0 if x is None else x.shape[0], [] if told is None else [told])


def on_grid(
    methods: tuple[Perturbation, ...], written: Sequence[Method], seen: SeenMaps, batch: int, keys: int
) -> tuple[Perturbation, ...]:
    """The methods that act in a call, those that ask for its grid with the one that was found.

    written: the methods as the recipe has them.
    """
    asking = {each.name: each for each in written if isinstance(each, Perturbation) and each.seeks_grid}

    def settled(method: Any) -> Perturbation:
        if method.name not in asking:
            return method  # type: ignore[no-any-return]
        grid, prefix = seen.grids.find(int(keys), asking[method.name].given_prefix, seen.of_call(batch))
        try:
            return method.on_grid(grid, prefix)  # type: ignore[no-any-return]
        except ParameterError as error:  # a window may be larger
            raise ParameterError(f"{seen.grids.place.where}: {error}") from error

    return tuple(map(settled, methods))


class GridPlacement:
    """Which attentions have their grids read off while the model runs, and from which layers."""

    def __init__(self, model: nn.Module, methods: Sequence[Method], control: Control) -> None:
        self.wanted = any(isinstance(method, Perturbation) and method.seeks_grid for method in methods)
        self.model, self.control = model, control
        self.sources: dict[nn.Module, MapAction] = {}

    def place(self, site: AttentionSite, place: Place) -> tuple[Place, KeyGrids | None]:
        """A place that says that its grid follows, and what will find it; None: the grid is known, or never will be."""
        if not self.wanted:
            return place, None
        if site.source is not None:
            action = self.sources.setdefault(site.source.module, MapAction(self.control))
            found = replace(place, grid_follows=True)
            return found, KeyGrids(found, action, (site.source.prefix,))
        if site.geometry is not None or not tells_grid(site.module):
            return place, None
        found = replace(place, grid_follows=True)
        return found, KeyGrids(found, None, tuple(dict.fromkeys((0, tokens_before(self.model)))))
