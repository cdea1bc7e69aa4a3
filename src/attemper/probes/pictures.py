"""Where attention looks: one query's weights per block and head, and attention rollout, as maps over the patches."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import NoSiteError, ParameterError
from attemper.probes.attention import Seen, weights_of_rows
from attemper.probes.watching import AttentionWatch, find_attention, in_eval, looking, run_model
from attemper.sites import AttentionSite, Geometry
from attemper.tempering.subclassing import Action

Query = tuple[int, int] | None
"""Row and column of a patch; None is the class token."""


@dataclass(frozen=True)
class Look:
    """Where one query looks in one attention."""

    block: int
    site: str
    weights: Tensor
    """(heads, rows, columns), the weights of the patches; with those of prefix tokens they sum to 1."""


@torch.no_grad()
def query_looks(model: nn.Module, image: Any, query: Query = None) -> list[Look]:
    """Where a query looks in every block, in eval mode.

    image: a batch of one image.
    query: row and column of a patch, or None for the class token.
    """
    looks = []
    for site, call in _whole_image_calls(model, image):
        assert site.geometry is not None
        row = _row(site.geometry, query, call.shape[2])
        if row is not None:
            weights = weights_of_rows(call, row, row + 1)[0, :, 0, site.geometry.prefix :]
            looks.append(Look(site.block, site.name, weights.unflatten(-1, site.geometry.grid).cpu()))
    if not looks:
        raise NoSiteError("no attention of this model has a class token; choose a patch as (row, column)")
    return looks


@torch.no_grad()
def rollout(model: nn.Module, image: Any, query: Query = None) -> Tensor:
    """Attention rollout: how much of every patch reaches the query's output through all blocks, (rows, columns).

    Heads are averaged, and each block is half attention and half skip. Abnar and Zuidema, Quantifying Attention Flow in
    Transformers, 2020. Only the query's row of the product is computed, a few rows of attention at a time.
    """
    calls = [(site, call) for site, call in _whole_image_calls(model, image) if call.shape[2] == call.shape[3]]
    if not calls:
        raise NoSiteError("rollout needs blocks in which every token attends to every token")
    geometry = calls[-1][0].geometry
    assert geometry is not None
    tokens = calls[-1][1].shape[2]
    start = _row(geometry, query, tokens)
    if start is None:
        raise NoSiteError("this model has no class token to roll out from; choose a patch as (row, column)")
    reached = torch.zeros(tokens, dtype=torch.float64)
    reached[start] = 1.0
    for _, call in reversed(calls):
        if call.shape[2] != tokens:
            raise NoSiteError(f"rollout needs the same tokens in every block; got {call.shape[2]} and {tokens}")
        through = torch.zeros_like(reached)
        for first, rows in call.rows():
            weights = rows[0].softmax(-1).nan_to_num(0.0).mean(0).double().cpu()
            through += reached[first : first + len(weights)] @ weights
        reached = (reached + through) / 2
    map_: Tensor = reached[geometry.prefix :].view(geometry.grid)
    return map_


@torch.no_grad()
def module_weights(model: nn.Module, batch: Any, name: str) -> Tensor:
    """The weights of the last attention call that a module makes, in eval mode: (B, heads, queries, keys).

    name: of an attention module, such as the one by which a decoder looks at an image.
    """
    calls: list[Seen] = []
    sites = [site for site in find_attention(model).attentions if site.name == name]
    if not sites:
        raise NoSiteError(f"'{name}' is no attention of this {type(model).__name__}")

    def tell(site: AttentionSite, call: Seen) -> None:
        calls.append(call)

    with in_eval(model), looking([(site.module, AttentionWatch(site, tell)) for site in sites]):
        run_model(model, batch)
    if not calls:
        raise NoSiteError(f"'{name}' made no attention call that can be seen")
    return weights_of_rows(calls[-1], 0, calls[-1].shape[2])


def _whole_image_calls(model: nn.Module, image: Any) -> list[tuple[AttentionSite, Seen]]:
    """The attention calls whose keys are all patches of the one image, in the order in which they happen."""
    sites = find_attention(model)
    calls: list[tuple[AttentionSite, Seen]] = []
    samples = image.shape[0] if isinstance(image, Tensor) else None
    if samples != 1:
        raise ParameterError(f"pictures need a batch of one image; got {samples or type(image).__name__}")

    def tell(site: AttentionSite, call: Seen) -> None:
        grid = site.geometry
        # In windowed attention the first axis counts windows.
        if grid is not None and call.shape[0] == 1 and call.shape[3] == grid.prefix + math.prod(grid.grid):
            calls.append((site, call))

    watches: list[tuple[nn.Module, Action]] = [(site.module, AttentionWatch(site, tell)) for site in sites.attentions]
    with in_eval(model), looking(watches):
        run_model(model, image)
    if not calls:
        raise NoSiteError(
            f"no attention of {type(model).__name__} is over all patches of an image on a known grid (windows, pooled "
            "keys and text are not), so there is no picture to draw"
        )
    return calls


def _row(geometry: Geometry, query: Query, queries: int) -> int | None:
    """Which row of attention a query is; None where this attention does not have it."""
    if query is None:
        return 0 if geometry.class_token else None
    (row, column), (rows, columns) = query, geometry.grid
    if not (0 <= row < rows and 0 <= column < columns):
        raise ParameterError(f"the patch ({row}, {column}) is outside of the grid of {rows} × {columns} patches")
    return geometry.prefix + row * columns + column if queries > 1 else None
