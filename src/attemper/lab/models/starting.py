"""Trained weights into a model for another task: what fits is loaded, the head made anew, positions resampled."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isqrt
from typing import Any, cast

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.heads import head_parameters

NAMED = 3
"""So many names of each kind are shown."""
POSITIONS = ("pos_embed", "position_embedding", "positional", "position_embeddings")
MOST_PREFIX = 8
"""Tokens before the patches that have a position: class token, distillation token, registers."""


@dataclass(frozen=True)
class StartReport:
    """What became of the tensors of a file, by their names in the model."""

    source: str
    loaded: tuple[str, ...]
    resampled: tuple[str, ...]
    """Loaded for images or patches of another size."""
    renewed: tuple[str, ...]
    """The head, and whatever has another shape: as a model that is trained from nothing begins."""
    missing: tuple[str, ...]
    """Not in the file; begun from nothing as well."""
    ignored: tuple[str, ...]
    """In the file, and not in the model."""
    share: float
    """Of the model's weights without its head, how many come from the file."""

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.resampled) + len(self.renewed) + len(self.missing)
        parts = [f"{len(self.loaded) + len(self.resampled)} of {total} tensors loaded"]
        for what in ("resampled", "renewed", "missing", "ignored"):
            names = getattr(self, what)
            parts += [f"{len(names)} {what} ({_some(names)})"] if names else []
        few = f"; that is only {100 * self.share:.0f} % of the weights before the head" if self.share < 0.5 else ""
        return f"training starts from {self.source}: {', '.join(parts)}{few}"

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def start_from(
    model: nn.Module, tensors: Mapping[str, Tensor], *, source: str, classes: int, keep_head: bool = False
) -> StartReport:
    """Load whatever fits into a model; raises where no weights but those of the head would.

    The head stays as it was drawn, unless `keep_head` says otherwise and it has as many classes. Learnt positions,
    tables of relative positions, patch embeddings and the first layer's colours are resampled to the model's own sizes.
    Names may have a prefix in the file or in the model, such as "backbone.".
    """
    own, parameters = model.state_dict(), dict(model.named_parameters())
    head = head_parameters(model, classes)
    given = _renamed(tensors, own)
    loaded: dict[str, Tensor] = {}
    resampled: dict[str, Tensor] = {}
    renewed = []
    for name, value in own.items():
        found = given.get(name)
        if found is None:
            renewed += [name] if name in head else []
        elif name in head and not (keep_head and found.shape == value.shape):
            renewed.append(name)
        elif found.shape == value.shape:
            loaded[name] = found
        elif (fitted := _resampled(model, name, found, value)) is not None:
            resampled[name] = fitted
        elif name in parameters:
            renewed.append(name)
    counted = {name: p.numel() for name, p in parameters.items() if name not in head}
    share = sum(n for name, n in counted.items() if name in loaded or name in resampled) / max(1, sum(counted.values()))
    report = StartReport(
        source=source,
        loaded=tuple(loaded),
        resampled=tuple(resampled),
        renewed=tuple(renewed),
        missing=tuple(name for name in parameters if name not in given and name not in head),
        ignored=tuple(name for name in given if name not in own),
        share=share,
    )
    if not any(name in parameters and parameters[name].ndim > 1 and name not in head for name in loaded):
        _refuse(report, tensors, own)
    if keep_head and not head.intersection(loaded):
        raise ParameterError(
            f"keep_head is true, and {source} has no head for {classes} classes under the model's name."
        )
    with torch.no_grad():
        for name, value in (loaded | resampled).items():
            own[name].copy_(value)
    return report


def _refuse(report: StartReport, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    shapes = [
        f"'{name}' is {tuple(given[name].shape)} there and {tuple(own[name].shape)} in the model"
        for name in report.renewed
        if name in given and given[name].shape != own[name].shape
    ]
    why = shapes[0] if shapes else f"it has {_some(given)}, and the model {_some(own)}"
    raise ParameterError(f"Nothing of {report.source} fits the model: {why}. Choose the model that was trained.")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def _renamed(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the model's names, where all that differs is a prefix on one side."""
    given = {name: value for name, value in given.items() if not name.startswith("attemper.")}
    prefixes: Counter[tuple[str, str]] = Counter({("", ""): sum(name in own for name in given)})
    for name in given:
        head, _, rest = name.partition(".")
        if rest in own:
            prefixes[f"{head}.", ""] += 1
    for name in own:
        for dot in (place for place, sign in enumerate(name) if sign == "."):
            if name[dot + 1 :] in given:
                prefixes["", name[: dot + 1]] += 1
    (there, here), _ = max(prefixes.items(), key=lambda item: item[1])
    return {f"{here}{name.removeprefix(there)}": value for name, value in given.items()}


# ----------------------------------------------------------------------------------------------------------- resampling
def _resampled(model: nn.Module, name: str, found: Tensor, own: Tensor) -> Tensor | None:
    """A tensor in the model's own shape; None where it cannot be resampled in a way that means the same."""
    if any(word in name for word in POSITIONS):
        return _positions(model, found, own)
    if name.endswith("relative_position_bias_table") and found.ndim == own.ndim == 2 and found.shape[1] == own.shape[1]:
        return _table(found, own)
    if found.ndim == own.ndim == 4 and found.shape[0] == own.shape[0]:
        return _patches(found, own)
    return None


def _positions(model: nn.Module, found: Tensor, own: Tensor) -> Tensor | None:
    """Learnt positions (1, N, width), (N, width) or (1, rows, columns, width), interpolated on the image grid."""
    if found.shape[-1] != own.shape[-1] or found.ndim != own.ndim or not found.is_floating_point():
        return None
    if found.ndim == 4:
        return _interpolated(found, tuple(own.shape[1:3]))
    ours, theirs = own.shape[-2], found.shape[-2]
    grid = _grid_of(model)
    for prefix in _prefixes(model):
        side = isqrt(max(0, theirs - prefix))
        there = (side, side) if side and side * side == theirs - prefix else None
        square = isqrt(max(0, ours - prefix))
        here = grid if grid is not None and grid[0] * grid[1] == ours - prefix else None
        here = here or ((square, square) if square and square * square == ours - prefix else None)
        if there is None or here is None:
            continue
        whole = found.reshape(1, theirs, -1)
        patches = _interpolated(whole[:, prefix:].unflatten(1, there), here).flatten(1, 2)
        return torch.cat([whole[:, :prefix], patches], 1).reshape(own.shape)
    return None


def _prefixes(model: nn.Module) -> list[int]:
    """How many tokens before the patches may have a position, likeliest first."""
    known = getattr(model, "num_prefix_tokens", None)
    usual = [1, 0, 2, *range(3, MOST_PREFIX)]
    return [known, *usual] if isinstance(known, int) else usual


def _grid_of(model: nn.Module) -> tuple[int, int] | None:
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    return (int(grid[0]), int(grid[1])) if isinstance(grid, list | tuple) and len(grid) == 2 else None


def _interpolated(grid: Tensor, size: tuple[int, ...]) -> Tensor:
    """(1, rows, columns, width) on another grid, bicubic, as everybody does it."""
    moved = grid.float().permute(0, 3, 1, 2)
    resized = nn.functional.interpolate(moved, size=size, mode="bicubic", antialias=True, align_corners=False)
    return resized.permute(0, 2, 3, 1).to(grid.dtype)


def _table(found: Tensor, own: Tensor) -> Tensor | None:
    """Biases of relative positions (places, heads), one per distance of two tokens in a square window."""
    there, here = isqrt(found.shape[0]), isqrt(own.shape[0])
    if there**2 != found.shape[0] or here**2 != own.shape[0]:
        return None
    return _interpolated(found.unflatten(0, (there, there))[None], (here, here))[0].flatten(0, 1)


def _patches(found: Tensor, own: Tensor) -> Tensor | None:
    """The weight of the first convolution (width, colours, rows, columns) for other colours or larger patches."""
    from timm.layers.patch_embed import resample_patch_embed
    from timm.models import adapt_input_conv

    colours = own.shape[1]
    if found.shape[1] != colours:
        if found.shape[1] != 3 or found.shape[2:] != own.shape[2:]:
            return None
        return adapt_input_conv(colours, found)
    if own.shape[2] != own.shape[3] or found.shape[2] != found.shape[3]:
        return None
    return cast(Tensor, resample_patch_embed(found, list(own.shape[2:])))
