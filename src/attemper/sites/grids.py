"""Where the grid of an attention's keys can be read off while a model runs."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from attemper.sites.adapter import Adapter
from attemper.sites.base import Geometry, GridSource, original_class
from attemper.sites.tree import Tree

PAIRS = (("height", "width"), ("H", "W"), ("h", "w"))
SIZES = ("feat_size", "size", "hw_shape", "hw", "x_size", "spatial_shape", "grid_size")
"""What people call the rows and columns of the tokens, in arguments of an attention's forward."""
TOKENS = (
    *("cls_token", "class_token", "class_embedding", "dist_token", "distillation_token"),
    *("reg_token", "register_tokens"),
)
"""Parameters that stand before the patches."""
ON_MAPS = (nn.Conv2d, nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d)


class ConventionsAdapter:
    """What models of any library tell if they name things as timm does: a patch embedding with a grid, and blocks."""

    def geometry(self, owner: nn.Module, attention: nn.Module) -> Geometry | None:
        grid = getattr(getattr(owner, "patch_embed", None), "grid_size", None)
        prefix, blocks = getattr(owner, "num_prefix_tokens", None), getattr(owner, "blocks", None)
        if not isinstance(grid, tuple) or not isinstance(prefix, int) or not isinstance(blocks, nn.Module):
            return None
        if not any(module is attention for module in blocks.modules()):
            return None
        return Geometry((int(grid[0]), int(grid[1])), prefix, getattr(owner, "cls_token", None) is not None)

    def leave_alone(self, module: nn.Module) -> str | None:
        return None


ADAPTER = ConventionsAdapter()


def find_source(tree: Tree, name: str, adapters: Sequence[Adapter]) -> GridSource | None:
    """The layer whose output becomes the keys of an attention, as the nearest enclosing model of a library tells."""
    for owner in (name, *tree.ancestors(name)):
        for adapter in adapters:
            tell = getattr(adapter, "source", None)  # other packages' adapters need not have it
            source: GridSource | None = None if tell is None else tell(tree.modules[owner], tree.modules[name])
            if source is not None:
                return source
    return None


def tells_grid(attention: nn.Module) -> bool:
    """Whether an attention may show the grid of its keys when it runs: by its arguments, or by maps that it makes."""
    return bool(_names(attention)) or any(isinstance(module, ON_MAPS) for module in attention.modules())


def grid_in_arguments(attention: nn.Module, args: Any, kwargs: Any) -> tuple[int, int] | None:
    """(rows, columns) that an attention is called with; None: it is told neither."""
    names = _names(attention)
    if not names:
        return None
    given = {**dict(zip(_parameters(attention), args, strict=False)), **kwargs}
    values = [given.get(name) for name in names]
    pair = values if len(values) == 2 else values[0]
    if not isinstance(pair, list | tuple) or len(pair) != 2 or any(isinstance(value, Tensor) for value in pair):
        return None
    return None if None in pair else (int(pair[0]), int(pair[1]))


def tokens_before(model: nn.Module) -> int:
    """How many class tokens and registers a model has among its parameters."""
    found = 0
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in TOKENS:
            found += parameter.shape[-2] if parameter.dim() == 3 else 1
    return found


def _names(attention: nn.Module) -> tuple[str, ...]:
    """The arguments of an attention's forward that are the rows and columns, together or apart."""
    parameters = _parameters(attention)
    for pair in PAIRS:
        if all(name in parameters for name in pair):
            return pair
    return next(((name,) for name in SIZES if name in parameters), ())


def _parameters(attention: nn.Module) -> list[str]:
    return list(inspect.signature(original_class(attention).forward).parameters)[1:]
