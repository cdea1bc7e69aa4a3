"""Where images become tokens, and of how many pixels each."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from attemper.sites.adapted import inner
from attemper.sites.adapter import pair
from attemper.sites.base import AttentionSite, PatchSite
from attemper.sites.tree import Tree

WORDS = ("patch", "embed", "token")
"""In the names of what makes tokens of an image."""
MOST_LAYERS = 8
"""Of a stem whose strides are multiplied; one with more is a network of its own, whose layers need not be a chain."""


CUTTING = (nn.Conv2d, nn.Unfold, nn.MaxPool2d, nn.AvgPool2d)


def find_patches(tree: Tree, attentions: Sequence[AttentionSite]) -> tuple[PatchSite, ...]:
    """Convolutions that cut images into patches; else the first layer of what makes tokens of overlapping pieces."""
    whole = tuple(_apart(tree))
    if whole or not attentions:
        return whole
    return tuple(_overlapping(tree, attentions))


def _apart(tree: Tree) -> Iterator[PatchSite]:
    """Patches that do not overlap: the convolution, or the adapter round it."""
    inside: set[nn.Module] = set()  # of adapters, which stand for the convolution as a whole
    for name, module in tree.modules.items():
        conv = inner(module)
        if module in inside or not isinstance(conv, nn.Conv2d):
            continue
        inside |= set(module.modules()) if conv is not module else set()
        if _reads_images(conv) and conv.kernel_size == conv.stride and conv.padding in ((0, 0), "valid"):
            yield PatchSite(name, module, (conv.kernel_size[0], conv.kernel_size[1]))


def _overlapping(tree: Tree, attentions: Sequence[AttentionSite]) -> Iterator[PatchSite]:
    """The first layer of an embedding whose pieces overlap, where it is told what a token stands for."""
    for name, module in tree.modules.items():
        conv = inner(module)  # an adapter comes before what it stands round
        if isinstance(module, nn.Unfold) or (isinstance(conv, nn.Conv2d) and _reads_images(conv)):
            embedding = _embedding(tree, name)
            if embedding is not None and _makes_keys(tree.modules[embedding], attentions):
                patch, grid = _pixels_of_a_token(tree.modules[embedding])
                if patch is not None or grid is not None:
                    yield PatchSite(name, module, patch or (1, 1), overlaps=True, grid=grid)
            return


def _reads_images(conv: nn.Conv2d) -> bool:
    return conv.in_channels <= 4 and min(conv.kernel_size) > 1


def _embedding(tree: Tree, name: str) -> str | None:
    """The outermost module that is called an embedding and holds a layer, without other embeddings beside it."""
    found = None
    for above in (name, *tree.ancestors(name)):
        if above == "" or isinstance(tree.modules[above], nn.ModuleList):
            break
        if any(word in part.lower() for part in above.split(".")[-1:] for word in WORDS) or _beside_others(tree, above):
            found = above
    return found


def _beside_others(tree: Tree, name: str) -> bool:
    """Whether a module is one of a list of embeddings, as in pyramids."""
    above, _, _ = name.rpartition(".")
    called = above.rpartition(".")[2].lower()
    return isinstance(tree.modules[above], nn.ModuleList) and any(word in called for word in WORDS)


def _makes_keys(embedding: nn.Module, attentions: Sequence[AttentionSite]) -> bool:
    """Whether no other layer, such as one behind a whole network, is known to make the tokens."""
    inside = set(embedding.modules())
    return all(site.source is None or site.source.module in inside for site in attentions)


def _pixels_of_a_token(embedding: nn.Module) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Rows and columns of pixels that a token stands for; or the grid of tokens, where only that is told."""
    layers = _cutting_layers(embedding)
    if len(layers) > MOST_LAYERS:
        return None, pair(getattr(embedding, "grid_size", None))
    rows, columns = 1, 1
    for layer in layers:
        down, across = _stride(layer)
        rows, columns = rows * down, columns * across
    return ((rows, columns) if min(rows, columns) > 1 else None), None


def _cutting_layers(embedding: nn.Module) -> list[nn.Module]:
    """The layers of an embedding that cut; what adapters put beside one cuts nothing further."""
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in embedding.modules():
        layer = inner(module)
        if module in inside or not isinstance(layer, CUTTING):
            continue
        inside |= set(module.modules())
        layers.append(layer)
    return layers


def _stride(layer: Any) -> tuple[int, int]:
    return pair(layer.stride) or (1, 1)
