"""Where attention, MLPs, blocks, patches and projections sit in a model."""

from attemper.sites.base import AttentionSite, BlockSite, Geometry, MlpSite, PatchSite, Projection, Projections, Sites
from attemper.sites.find import find_sites

__all__ = [
    "AttentionSite", "BlockSite", "Geometry", "MlpSite", "PatchSite", "Projection", "Projections", "Sites",
    "find_sites",
]  # fmt: skip
