"""Where attention, MLPs, blocks, convolutions, patches and projections sit in a model."""

from attemper.sites.base import (
    AttentionSite,
    BlockSite,
    ConvolutionSite,
    Geometry,
    MlpSite,
    PatchSite,
    Projection,
    Projections,
    Sites,
)
from attemper.sites.find import find_sites

__all__ = [
    "AttentionSite", "BlockSite", "ConvolutionSite", "Geometry", "MlpSite", "PatchSite", "Projection", "Projections",
    "Sites", "find_sites",
]  # fmt: skip
