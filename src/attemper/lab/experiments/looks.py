"""What is looked at in a trained model: entropy of attention, κ of patches and of tokens."""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError
from attemper.methods.base import Method
from attemper.methods.kinds import PatchMap
from attemper.probes.conditioning import singular_values
from attemper.probes.diagnosis import find_attention, head_rows
from attemper.probes.tokens import conditioning_after
from attemper.probes.watching import in_eval
from attemper.sites import find_sites
from attemper.tempering.embedding import to_patches


def entropies(model: nn.Module, inputs: Tensor) -> list[float]:
    """Normalised entropy of every block, the mean over its heads."""
    with in_eval(model), torch.no_grad():
        rows, _ = head_rows(model, inputs, find_attention(model), frozenset({"entropy"}))
    blocks = sorted({row.block for row in rows})
    return [statistics.fmean(row.normalised or 0.0 for row in rows if row.block == block) for block in blocks]


def token_conditions(model: nn.Module, inputs: Tensor) -> list[float]:
    """κ of the tokens that the first block computes with, then behind every block; medians over images."""
    sites = find_sites(model)
    if not sites.attentions:
        stem, *blocks = convolutional_parts(model)
        return [each.condition for each in conditioning_after(model, inputs, [stem, *blocks]).values()]
    behind = conditioning_after(model, inputs, [site.name for site in sites.blocks])
    # Graying acts at the entry of the first block, which is seen from inside of it.
    tokens = attemper.diagnose(model, inputs, ["conditioning"]).tokens
    return [
        next(row.condition for row in tokens if row.place == "input"),
        *(each.condition for each in behind.values()),
    ]


def convolutional_parts(model: nn.Module) -> list[str]:
    """The names of what makes feature maps of an image, and of the blocks behind it, of our own networks."""
    parts = dict(model.named_children())
    stem = next((name for name in ("patches", "stem") if name in parts), None)
    if stem is None or not isinstance(parts.get("blocks"), nn.Sequential):
        raise NoSiteError(f"{type(model).__name__} has neither attention nor the parts of our own convolutional models")
    return [stem, *(f"blocks.{at}" for at in range(len(list(parts["blocks"].children()))))]


def patch_condition(model: nn.Module, inputs: Tensor, methods: Sequence[Method]) -> float:
    """κ of the patches that are embedded, with what the recipe does to them before; the median over images.

    Directions in which the patches of an image do not differ from zero by more than rounding do not count.
    """
    site = find_sites(model).patches[0]
    grid = (inputs.shape[-2] // site.patch[0], inputs.shape[-1] // site.patch[1])
    patches = to_patches(inputs, grid, site.patch)
    for method in methods:
        if isinstance(method, PatchMap) and not getattr(method, "positions", ()):
            patches = method.map_patches(patches)
    return float(_known_condition(patches).median())


def _known_condition(x: Tensor) -> Tensor:
    """κ of X (B, N, d) over the singular values that rounding lets one know, (B,)."""
    sigma = singular_values(x)
    largest = sigma[..., :1]
    rounding = max(x.shape[-2:]) * torch.finfo(x.dtype).eps * largest
    smallest = torch.where(sigma > rounding, sigma, largest).amin(-1)
    return largest[..., 0] / smallest
