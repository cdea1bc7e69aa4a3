"""timm: where its models keep their grid, and which of its attentions are not attention over keys."""

from typing import Any

from torch import nn

from attemper.sites.adapter import from_library, pair
from attemper.sites.base import Geometry

NOT_OVER_KEYS = {
    "OutlookAttention": "outlook attention weighs a window of values without keys",
    "XCA": "cross-covariance attention is over channels, not over keys",
    "CrossCovarianceAttn": "cross-covariance attention is over channels, not over keys",
    "ChannelAttention": "channel attention is over channels, not over keys",
    "ChannelAttentionV2": "channel attention is over channels, not over keys",
    "GPSA": "gated positional attention mixes two softmaxes, of contents and of positions",
    "FactorAttnConvRelPosEnc": "factorised attention multiplies keys by values first, and has no logits",
}


class TimmAdapter:
    """What timm's models tell; see `Adapter`."""

    def geometry(self, owner: nn.Module, attention: nn.Module) -> Geometry | None:
        if not from_library(owner, "timm"):
            return None
        if "Window" in type(attention).__name__:
            window = pair(getattr(attention, "window_size", None))
            return Geometry(window) if window else None
        if type(owner).__name__ == "VOLO":
            positions: Any = owner.pos_embed
            first = _class_attention(attention)
            return Geometry((positions.shape[1], positions.shape[2]), int(first), first)
        grid = pair(getattr(getattr(owner, "patch_embed", None), "grid_size", None))
        if grid is None:
            return None
        if type(owner).__name__ == "Cait":
            first = _class_attention(attention)
            return Geometry(grid, int(first), first)
        prefix = getattr(owner, "num_prefix_tokens", None)
        has_class_token = getattr(owner, "cls_token", None) is not None
        return None if prefix is None else Geometry(grid, prefix, has_class_token)

    def leave_alone(self, module: nn.Module) -> str | None:
        return NOT_OVER_KEYS.get(type(module).__name__) if from_library(module, "timm") else None


def _class_attention(attention: nn.Module) -> bool:
    """One class token before the patches in class attention; none in the blocks before it."""
    return type(attention).__name__ in ("ClassAttn", "ClassAttention")


ADAPTER = TimmAdapter()
