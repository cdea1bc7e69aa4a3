"""Telling squeeze-and-excite from a feed-forward network: both have two layers, but one of them makes a gate."""

from torch import nn

from attemper.sites.adapted import widths
from attemper.sites.base import original_class
from attemper.sites.detect import names_in

SQUASHES = ("sigmoid", "hardsigmoid", "hard_sigmoid", "hsigmoid", "h_sigmoid")
POOLS = ("pool", "mean", "reduce_mean")


def is_gate(module: nn.Module, holder: nn.Module | None, firsts: tuple[nn.Module, ...], last: nn.Module) -> bool:
    """Whether two layers squeeze and excite: pooled features → narrow → wide → sigmoid → a factor for each channel.

    module: what holds the two layers; holder: the module above whose forward calls it. What pools and squashes is
        looked for in both. A feed-forward network that is merely narrow does neither.
    """
    if isinstance(module, nn.Sequential) and _ends_squashed(module, last):
        return True
    where = [module, *([holder] if isinstance(module, nn.Sequential) and holder is not None else [])]
    squashes, pools = any(map(_squashes, where)), any(map(_pools, where))
    wide, hidden = widths(firsts[0])
    narrow = hidden < wide
    if module is not where[-1]:  # a whole block may pool or squash for another reason
        return squashes and pools and narrow
    return squashes and (pools or narrow)


def _ends_squashed(module: nn.Sequential, last: nn.Module) -> bool:
    layers = list(module)
    behind = layers[layers.index(last) + 1 :] if last in layers else []
    return any(_is_sigmoid(layer) for layer in behind)


def _squashes(module: nn.Module) -> bool:
    return any(word in name for name in _words(module) for word in SQUASHES) or any(map(_is_sigmoid, module.children()))


def _pools(module: nn.Module) -> bool:
    children = [type(child).__name__.lower() for child in module.children()]
    return any("pool" in name or name in POOLS for name in (*_words(module), *children))


def _words(module: nn.Module) -> list[str]:
    return [name.lower() for name in names_in(original_class(module))]


def _is_sigmoid(layer: nn.Module) -> bool:
    return type(layer).__name__.lower() in SQUASHES
