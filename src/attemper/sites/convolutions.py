"""The convolutions of a model, and the blocks that they belong to."""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

from attemper.sites.adapted import inner
from attemper.sites.base import ConvolutionSite
from attemper.sites.tree import Tree


def find_convolutions(tree: Tree, blocks: Sequence[str]) -> tuple[ConvolutionSite, ...]:
    """Every convolution of one to three dimensions, transposed ones too, in the order of the modules.

    One that lies in no block belongs to the next one: a patch embedding to the first, what reduces the grid between
    stages to the first behind it. Behind the last block it belongs to that.
    """
    names = _names(tree)
    if not blocks:
        return tuple(ConvolutionSite(name, tree.modules[name], index) for index, name in enumerate(names))
    order = {name: position for position, name in enumerate(tree.modules)}
    numbers = {name: number for number, name in enumerate(blocks)}

    def block_of(name: str) -> int:
        around = (numbers[above] for above in (name, *tree.ancestors(name)) if above in numbers)
        behind = (numbers[block] for block in blocks if order[block] > order[name])
        return next(around, next(behind, len(blocks) - 1))

    return tuple(ConvolutionSite(name, tree.modules[name], block_of(name)) for name in names)


def _names(tree: Tree) -> list[str]:
    """An adapter stands for its convolution as a whole; what it is made of is none itself."""
    found: list[str] = []
    inside: set[nn.Module] = set()
    for name, module in tree.modules.items():
        layer = inner(module)
        if isinstance(layer, _ConvNd) and module not in inside:
            found.append(name)
            inside |= set(module.modules()) if layer is not module else set()
    return found
