"""timm: where its models keep their grid, and which of its attentions are not attention over keys."""

from typing import Any

from torch import nn

from attemper.sites.adapter import from_library, pair
from attemper.sites.base import Geometry, GridSource

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
        if type(attention).__name__ == "LocallyGroupedAttn":
            return Geometry((attention.ws, attention.ws))  # type: ignore[arg-type]
        if type(owner).__name__ == "PoolingVisionTransformer":
            return _of_pit(owner, attention)
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

    def source(self, owner: nn.Module, attention: nn.Module) -> GridSource | None:
        """Of models that take images of any size: the convolution that makes patches of them."""
        embed: Any = getattr(owner, "patch_embed", None)
        projection, prefix = getattr(embed, "proj", None), getattr(owner, "num_prefix_tokens", None)
        if not from_library(owner, "timm") or getattr(embed, "strict_img_size", True) or not isinstance(prefix, int):
            return None
        return GridSource(projection, prefix) if isinstance(projection, nn.Conv2d) else None

    def leave_alone(self, module: nn.Module) -> str | None:
        return NOT_OVER_KEYS.get(type(module).__name__) if from_library(module, "timm") else None


def _class_attention(attention: nn.Module) -> bool:
    """One class token before the patches in class attention; none in the blocks before it."""
    return type(attention).__name__ in ("ClassAttn", "ClassAttention")


def _of_pit(owner: Any, attention: nn.Module) -> Geometry | None:
    """PiT halves its grid before every stage but the first; class tokens stand before it."""
    grid = (owner.pos_embed.shape[-2], owner.pos_embed.shape[-1])
    for stage in owner.transformers:
        if stage.pool is not None:
            conv = stage.pool.conv
            grid = (_reduced(grid[0], conv, 0), _reduced(grid[1], conv, 1))
        if any(module is attention for module in stage.modules()):
            return Geometry(grid, owner.cls_token.shape[1], True)
    return None


def _reduced(size: int, conv: nn.Conv2d, axis: int) -> int:
    """What a convolution makes of so many rows or columns."""
    return (size + 2 * int(conv.padding[axis]) - conv.kernel_size[axis]) // conv.stride[axis] + 1


ADAPTER = TimmAdapter()
