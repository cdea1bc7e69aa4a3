"""timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from families.base import Family, image


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=5, **options)
        return model

    return build


def build_volo() -> nn.Module:
    from timm.models.volo import VOLO

    return VOLO(
        (1, 1, 1),
        img_size=64,
        embed_dims=(24, 48, 48),
        num_heads=(2, 4, 4),
        stem_hidden_dim=16,
        num_classes=5,
        downsamples=(True, False, False),
        outlook_attention=(True, False, False),
        qkv_bias=True,
    )


def build_mvitv2() -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    config = MultiScaleVitCfg(depths=(1, 1), embed_dim=24, num_heads=1, stride_q=((1, 1), (2, 2)))
    return MultiScaleVit(config, img_size=(32, 32), num_classes=5)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}

TIMM = [
    Family("timm-vit", timm_model("vit_tiny_patch16_224", **VIT), image(), 3, 3, ((4, 4),), prefix=1),
    Family("timm-deit", timm_model("deit_tiny_distilled_patch16_224", **VIT), image(), 3, 3, ((4, 4),), prefix=2),
    Family(
        "timm-vit-registers",
        timm_model("vit_tiny_patch16_224", **VIT, class_token=False, reg_tokens=4, global_pool="avg"),
        image(),
        3,
        3,
        ((4, 4),),
        prefix=4,
    ),
    Family(
        "timm-swin",
        timm_model(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            patch_size=2,
            window_size=4,
            embed_dim=24,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
        ),
        image(),
        4,
        4,
        ((4, 4),),
    ),
    Family(
        "timm-swinv2",
        timm_model(
            "swinv2_tiny_window8_256",
            img_size=32,
            patch_size=2,
            window_size=4,
            embed_dim=24,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
        ),
        image(),
        4,
        4,
        ((4, 4),),
    ),
    Family(
        "timm-pvtv2",
        timm_model(
            "pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(16, 24, 32, 48), num_heads=(1, 2, 2, 3), drop_path_rate=0.0
        ),
        image(64),
        4,
        4,
        (None,),
    ),
    Family(
        "timm-cait",
        timm_model("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, depth_token_only=2),
        image(),
        4,
        4,
        ((4, 4),),
        prefixes=(0, 0, 1, 1),
    ),
    Family("timm-volo", build_volo, image(64), 5, 4, ((4, 4),), prefixes=(0, 0, 1, 1)),
    Family("timm-beit", timm_model("beit_base_patch16_224", **VIT), image(), 3, 3, ((4, 4),), prefix=1),
    Family("timm-eva02", timm_model("eva02_tiny_patch14_224", **VIT), image(), 3, 3, ((4, 4),), prefix=1),
    Family("timm-mvitv2", build_mvitv2, image(), 2, 2, (None,)),
    Family(
        "timm-pit",
        timm_model("pit_ti_224", img_size=24, patch_size=4, stride=2, base_dims=(12, 12), depth=(1, 1), heads=(2, 4)),
        image(24),
        2,
        2,
        ((11, 11), (6, 6)),
        prefix=1,
    ),
]
