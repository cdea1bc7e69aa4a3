"""vit-pytorch: all of its vision transformers that train on a CPU.

Left out are wrappers that only teach another model (MAE, DINO …), models that call FlexAttention, which has no backward
pass on a CPU (vit_nd), NaViT on nested tensors, and VAT, a ViT with a policy for robots behind it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from architectures.base import Architecture, Inputs, image, noise

SIZE = {"image_size": 32, "patch_size": 8, "num_classes": 5}
SHAPE = {"dim": 48, "depth": 2, "heads": 3, "dim_head": 16, "mlp_dim": 64}
VIT = {**SIZE, **SHAPE}
VIDEO = {
    **{key: value for key, value in VIT.items() if key != "patch_size"},
    "image_patch_size": 8,
    "frames": 4,
    "frame_patch_size": 2,
}
VIVIT = {**{key: value for key, value in VIDEO.items() if key != "depth"}, "spatial_depth": 2, "temporal_depth": 2}
CVT_SMALL = {f"s{i}_{key}": value for i in (1, 2, 3) for key, value in (("emb_dim", 24), ("heads", 2), ("depth", 1))}
TWINS_SMALL = {
    f"s{i}_{key}": value
    for i in (1, 2, 3, 4)
    for key, value in (("emb_dim", 24), ("local_patch_size", 1), ("global_k", 1), ("depth", 1))
}

VITS = (
    "learnable_memory_vit mp3 parallel_vit vit vit_5 vit_for_small_dataset vit_with_decorr vit_with_keel_post_ln "
    "vit_with_patch_dropout vit_with_patch_merger"
)
SIMPLE_VITS = (
    "attn_residual_with_dca_simple_vit simple_flash_attn_vit simple_vit simple_vit_orthog_residual_update "
    "simple_vit_with_patch_dropout simple_vit_with_qk_norm simple_vit_with_register_tokens "
    "simple_vit_with_relative_proj_pos_bias simple_vit_with_specialized_cls simple_vit_with_value_residual"
)

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(VITS.split(), ("ViT", VIT)),
    **dict.fromkeys(SIMPLE_VITS.split(), ("SimpleViT", VIT)),
    "simple_vit_with_fft": ("SimpleViT", {**VIT, "freq_patch_size": 8}),
    "simple_vit_with_hyper_connections": ("SimpleViT", {**VIT, "num_residual_streams": 2}),
    "simple_vit_attn_residual": ("SimpleViTAttnResidual", VIT),
    "simple_vit_with_sparse_gating": ("SimpleViTWithSparseGating", VIT),
    "deepvit": ("DeepViT", VIT),
    "vit_detpool": ("ViTDetPool", VIT),
    "ats_vit": ("ViT", {**VIT, "max_tokens_per_depth": (16, 8)}),
    "cait": ("CaiT", {**VIT, "cls_depth": 2}),
    "xcit": ("XCiT", {**VIT, "cls_depth": 2}),
    "cct": (
        "CCT",
        {"img_size": 32, "embedding_dim": 48, "n_conv_layers": 2, "num_layers": 2, "num_heads": 3, "mlp_ratio": 2.0,
         "num_classes": 5, "positional_embedding": "learnable", "stochastic_depth_rate": 0.0},
    ),
    "cct_3d": (
        "CCT",
        {"img_size": 32, "num_frames": 4, "embedding_dim": 48, "n_conv_layers": 2, "num_layers": 2, "num_heads": 3,
         "mlp_ratio": 2.0, "num_classes": 5, "positional_embedding": "learnable", "stochastic_depth_rate": 0.0},
    ),
    "cross_vit": (
        "CrossViT",
        {"image_size": 32, "num_classes": 5, "sm_dim": 24, "lg_dim": 48, "sm_patch_size": 4, "sm_enc_heads": 2,
         "sm_enc_mlp_dim": 32, "sm_enc_dim_head": 12, "lg_patch_size": 8, "lg_enc_depth": 2, "lg_enc_heads": 3,
         "lg_enc_mlp_dim": 64, "lg_enc_dim_head": 16, "cross_attn_heads": 2, "cross_attn_dim_head": 16, "depth": 2},
    ),
    "crossformer": (
        "CrossFormer",
        {"dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "global_window_size": (4, 2, 2, 1), "local_window_size": 2,
         "num_classes": 5},
    ),
    "cvt": ("CvT", {"num_classes": 5, **CVT_SMALL}),
    "jet_vit": ("JetViT", {**VIT, "window_size": 2}),
    "jumbo_vit": ("JumboViT", {**VIT, "jumbo_cls_k": 2}),
    "levit": (
        "LeViT",
        {"image_size": 64, "num_classes": 5, "dim": (32, 48, 64), "depth": 1, "heads": (2, 2, 4), "mlp_mult": 2,
         "dim_key": 8, "dim_value": 16},
    ),
    "local_vit": ("LocalViT", VIT),
    "look_vit": (
        "LookViT",
        {"dim": 48, "image_size": 32, "num_classes": 5, "depth": 2, "patch_size": 8, "heads": 3, "dim_head": 16,
         "highres_patch_size": 4, "cross_attn_heads": 2, "cross_attn_dim_head": 16},
    ),
    "looped_vit": (
        "LoopedViT",
        {"num_classes": 5, "dim": 48, "image_size": 32, "patch_size": 8, "pre_loop_depth": 1, "num_looped_blocks": 1,
         "post_loop_depth": 1, "loop_depth": 2, "heads": 3, "dim_head": 16, "mlp_dim": 64},
    ),
    "max_vit": ("MaxViT", {"num_classes": 5, "dim": 32, "depth": (1, 1), "dim_head": 16, "window_size": 4}),
    "max_vit_with_registers": (
        "MaxViT",
        {"num_classes": 5, "dim": 32, "depth": (1, 1), "dim_head": 16, "window_size": 4},
    ),
    "mobile_vit": (
        "MobileViT",
        {"image_size": (64, 64), "dims": (24, 32, 48), "channels": (8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64),
         "num_classes": 5, "depths": (1, 1, 1)},
    ),
    "nest": (
        "NesT",
        {"image_size": 32, "patch_size": 4, "num_classes": 5, "dim": 24, "heads": 2, "num_hierarchies": 2,
         "block_repeats": (1, 1), "dim_head": 16},
    ),
    "normalized_vit": ("nViT", VIT),
    "pit": ("PiT", {**VIT, "patch_size": 8, "depth": (1, 1)}),
    "regionvit": (
        "RegionViT",
        {"dim": (32, 32, 48, 64), "depth": (1, 1, 1, 1), "window_size": 2, "num_classes": 5},
    ),
    "rvt": ("RvT", VIT),
    "scalable_vit": (
        "ScalableViT",
        {"num_classes": 5, "dim": 16, "depth": (1, 1, 1, 1), "heads": (1, 2, 2, 4), "reduction_factor": (4, 2, 2, 1),
         "window_size": (4, 2, None, None),
         "iwsa_dim_key": 8, "iwsa_dim_value": 8, "ssa_dim_key": 8, "ssa_dim_value": 8},
    ),
    "sep_vit": (
        "SepViT",
        {"num_classes": 5, "dim": 16, "depth": (1, 1, 1), "heads": (1, 2, 2), "window_size": 2, "dim_head": 16},
    ),
    "simple_uvit": ("SimpleUViT", VIT),
    "t2t": ("T2TViT", {"image_size": 32, "num_classes": 5, **SHAPE, "t2t_layers": ((3, 2), (3, 2))}),
    "twins_svt": ("TwinsSVT", {"num_classes": 5, **TWINS_SMALL}),
    "wwt": ("WWT", {**VIT, "num_slots": 4}),
    "simple_vit_1d": ("SimpleViT", {"seq_len": 32, "patch_size": 8, "num_classes": 5, **SHAPE}),
    "vit_1d": ("ViT", {"seq_len": 32, "patch_size": 8, "num_classes": 5, **SHAPE}),
    "simple_vit_3d": ("SimpleViT", VIDEO),
    "simple_flash_attn_vit_3d": ("SimpleViT", VIDEO),
    "vit_3d": ("ViT", VIDEO),
    "vivit": ("ViViT", {**VIVIT, "use_flash_attn": False}),
    "vivit_with_moss": ("ViViT", {**VIVIT, "use_flash_attn": False, "pool": "mean"}),
    "na_vit": ("NaViT", VIT),
}  # fmt: skip
"""Module → class and options."""

INPUTS: dict[str, Callable[[], Inputs]] = {
    "simple_vit_1d": noise((2, 3, 32)),
    "vit_1d": noise((2, 3, 32)),
    **dict.fromkeys(("simple_vit_3d", "simple_flash_attn_vit_3d", "vit_3d", "cct_3d"), noise((2, 3, 4, 32, 32))),
    **dict.fromkeys(("vivit", "vivit_with_moss"), noise((2, 3, 4, 32, 32))),
    **dict.fromkeys(
        ("levit", "mobile_vit", "scalable_vit", "crossformer", "regionvit", "max_vit", "max_vit_with_registers"),
        image(64),
    ),
    "sep_vit": image(112),
}


def packed() -> Inputs:
    """Images of several sizes, packed into two sequences, as NaViT takes them."""
    images = noise((3, 32, 32), (3, 16, 32), (3, 24, 24))()["args"]
    return {"args": ([list(images[:2]), [images[2]]],)}


INPUTS["na_vit"] = packed


def vit_pytorch_model(name: str) -> Callable[[], nn.Module]:
    """Builds the model of one of vit-pytorch's modules."""

    def make() -> nn.Module:
        kind, options = CLASSES[name]
        model: nn.Module = getattr(importlib.import_module(f"vit_pytorch.{name}"), kind)(**options)
        return model

    return make


def vit_pytorch_architectures() -> list[Architecture]:
    """Those of vit-pytorch."""
    return [Architecture("vit-pytorch", name, vit_pytorch_model(name), INPUTS.get(name, image(32))) for name in CLASSES]
