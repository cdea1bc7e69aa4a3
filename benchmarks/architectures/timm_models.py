"""timm: one small variant for every kind of model that has attention or blocks, and some that have none.

Where a model takes other widths and depths they are small, since time is spent on pairs and not on arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from architectures.base import Architecture, image

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
EVA = {**VIT, "embed_dim": 48, "num_heads": 3}
SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
STAGES = {"depths": (1, 1, 1, 1)}

OPTIONS: dict[str, dict[str, Any]] = {
    # ViTs
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "deit3_small_patch16_224": VIT,
    "vit_small_patch14_reg4_dinov2": VIT,
    "vit_giant_patch14_dinov2": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "vit_base_patch16_clip_quickgelu_224": VIT,
    "vit_little_patch16_reg4_gap_256": VIT,
    "vit_dlittle_patch16_reg1_gap_256": VIT,
    "vit_small_patch16_18x2_224": VIT,
    "vit_dpwee_patch16_reg1_gap_256": VIT,
    "vit_base_patch16_xp_224": VIT,
    "vit_so150m_patch16_reg4_map_256": VIT,
    "vit_srelpos_small_patch16_224": VIT,
    "vit_relpos_small_patch16_rpn_224": VIT,
    "vit_relpos_base_patch32_plus_rpn_256": VIT,
    "vit_tiny_r_s16_p8_224": {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "size": 64},
    "vit_base_mci_224": {"img_size": 64, "depth": 2, "size": 64},
    "samvit_base_patch16": {**VIT, "use_rel_pos": True},
    "naflexvit_base_patch16_gap": {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8},
    "naflexvit_base_patch16_par_gap": {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8},
    "test_vit": {"img_size": 32, "size": 32},
    "test_vit2": {"img_size": 32, "size": 32},
    "test_vit3": {"img_size": 32, "size": 32},
    "test_vit4": {"img_size": 32, "size": 32},
    "beit_base_patch16_224": VIT,
    "beitv2_base_patch16_224": VIT,
    "eva02_tiny_patch14_224": EVA,
    "eva_giant_patch14_224": EVA,
    "vit_pe_core_tiny_patch16_384": EVA,
    "vit_small_patch16_rope_224": EVA,
    "vit_small_patch16_rope_mixed_224": EVA,
    "vit_small_patch16_dinov3": EVA,
    "vit_medium_patch16_rope_reg1_gap_256": EVA,
    "deepseek_vit_412m": VIT,
    "gemma4_vit_167m": {"embed_dim": 48, "depth": 2, "num_heads": 2},
    "qwen3_vit_88m": {"embed_dim": 48, "depth": 2, "num_heads": 3},
    "cait_xxs24_224": {**VIT, "depth_token_only": 2},
    "convit_tiny": {**VIT, "local_up_to_layer": 1},
    "crossvit_tiny_240": {"size": 240},
    "crossvit_9_dagger_240": {"size": 240},
    "pit_ti_224": {"img_size": 64, "size": 64},
    "pit_ti_distilled_224": {"img_size": 64, "size": 64},
    "tnt_s_patch16_224": {"img_size": 32, "embed_dim": 48, "depth": 2},
    "tnt_s_legacy_patch16_224": {"img_size": 32, "embed_dim": 48, "depth": 2},
    "volo_d1_224": {"img_size": 64, "size": 64},
    "xcit_nano_12_p16_224": {"img_size": 64, "size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "xcit_tiny_12_p8_224": {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3},
    # windows and pyramids
    "swin_tiny_patch4_window7_224": SWIN,
    "swin_s3_tiny_224": {**SWIN, "window_size": (4, 4)},
    "swinv2_tiny_window8_256": SWIN,
    "swinv2_cr_tiny_ns_224": SWIN,
    "mvitv2_tiny": {"img_size": 64, "size": 64},
    "mvitv2_small_cls": {"img_size": 64, "size": 64},
    "pvt_v2_b0": {**STAGES, "size": 64},
    "pvt_v2_b2_li": {**STAGES, "size": 64, "embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 2, 3)},
    "twins_pcpvt_small": {"img_size": 64, "size": 64, "depths": (1, 1, 1, 1)},
    "twins_svt_small": {"img_size": 64, "size": 64, "depths": (1, 1, 2, 1)},
    "nest_tiny": {"img_size": 64, "size": 64},
    "nest_tiny_jx": {"img_size": 64, "size": 64},
    "gcvit_xxtiny": {"size": 224},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (24, 48, 48, 96), "num_heads": (1, 2, 2, 4), "size": 64},
    "focalnet_tiny_srf": {"size": 64},
    "hiera_tiny_224": {"img_size": 64, "size": 64},
    "hiera_small_abswin_256": {"img_size": 64, "size": 64},
    "sam2_hiera_tiny": {"size": 64},
    "vitamin_small_224": {"img_size": 64, "size": 64},
    "visformer_tiny": {"img_size": 64, "size": 64},
    "coat_tiny": {"img_size": 64, "size": 64},
    "coat_lite_tiny": {"img_size": 64, "size": 64},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64, "size": 64},
    "maxvit_tiny_tf_224": {"img_size": 64, "size": 64, "depths": (1, 1, 1, 1)},
    "maxvit_nano_rw_256": {"img_size": 64, "size": 64},
    "coatnet_pico_rw_224": {"img_size": 64, "size": 64},
    "coatnet_rmlp_nano_rw_224": {"img_size": 64, "size": 64},
    "coatnext_nano_rw_224": {"img_size": 64, "size": 64},
    "maxxvit_rmlp_nano_rw_256": {"img_size": 64, "size": 64},
    "maxxvitv2_nano_rw_256": {"img_size": 64, "size": 64},
    # hybrids
    "levit_128s": {"size": 224},
    "levit_conv_128s": {"size": 224},
    "efficientformer_l1": {"size": 224},
    "efficientformerv2_s0": {"size": 224},
    "efficientvit_b0": {"size": 64},
    "efficientvit_l1": {"size": 64},
    "efficientvit_m0": {"img_size": 224, "size": 224},
    "edgenext_xx_small": {"size": 64},
    "mobilevit_xxs": {"size": 64},
    "mobilevitv2_050": {"size": 64},
    "mobilevit_xs": {"size": 64},
    "nextvit_small": {"size": 64},
    "tiny_vit_5m_224": {"size": 64},
    "repvit_m0_9": {"size": 64},
    "shvit_s1": {"size": 64},
    "swiftformer_xs": {"size": 64},
    "fastvit_t8": {"size": 64},
    "fastvit_sa12": {"size": 64},
    "fastvit_mci0": {"size": 64},
    "iformer_s": {"size": 64},
    "lowformer_b0": {"size": 64},
    "cpubone_t0": {"size": 64},
    "efficientvim_m1": {"size": 64},
    "csatv2": {"size": 64},
    "mobilenetv4_hybrid_medium": {"size": 64},
    "mobilenetv5_base": {"size": 64},
    "caformer_s18": {"size": 64},
    "convformer_s18": {"size": 64},
    "poolformer_s12": {"size": 64},
    "poolformerv2_s12": {"size": 64},
    "botnet26t_256": {"size": 64, "img_size": 64},
    "botnet50ts_256": {"size": 64, "img_size": 64},
    "halonet26t": {"size": 256},
    "lambda_resnet26t": {"size": 64, "img_size": 64},
    "lambda_resnet26rpt_256": {"size": 64, "img_size": 64},
    "sehalonet33ts": {"size": 256},
    "eca_botnext26ts_256": {"size": 64, "img_size": 64},
    "resnet50_clip": {"size": 64, "img_size": 64},
    "sequencer2d_s": {"size": 32, "img_size": 32, "layers": (1, 1, 1, 1)},
    "mambaout_femto": {"size": 64, **STAGES},
    # neither attention nor anything like it
    "mixer_s32_224": {"img_size": 64, "size": 64},
    "gmlp_s16_224": {"img_size": 64, "size": 64},
    "resmlp_12_224": {"img_size": 64, "size": 64},
    "gmixer_12_224": {"img_size": 64, "size": 64},
    "convmixer_768_32": {"size": 32},
    "convnext_atto": {"size": 64, **STAGES, "dims": (16, 24, 32, 48)},
    "convnextv2_atto": {"size": 64, **STAGES, "dims": (16, 24, 32, 48)},
    "inception_next_atto": {"size": 64},
    "resnet10t": {"size": 64},
    "seresnet18": {"size": 64},
    "efficientnet_b0": {"size": 64},
    "regnety_002": {"size": 64},
}


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Builds a model of timm with five classes and random weights."""

    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **options)
        return model

    return make


def timm_architectures() -> list[Architecture]:
    """Those of timm; a version that does not have one leaves it out."""
    import timm

    known = set(timm.list_models())
    made = []
    for name, options in OPTIONS.items():
        if name in known:
            kept = {key: value for key, value in options.items() if key != "size"}
            made.append(Architecture("timm", name, timm_model(name, **kept), image(options.get("size", 32))))
    return made
