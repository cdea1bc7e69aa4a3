"""Ways to build small models of Transformers: by type, by class, and by hand where parts must fit each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from architectures.shrinking import TOKENS, WIDTH, small_config

Options = dict[str, Any]


def by_type(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """The bare model of a type, such as "bert"."""

    def make() -> nn.Module:
        from transformers import CONFIG_MAPPING, AutoModel

        model: nn.Module = AutoModel.from_config(small_config(CONFIG_MAPPING[kind], **options))
        return model

    return make


def by_class(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of a class by a configuration of another."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(small_config(getattr(transformers, config), **options))
        return made

    return make


def detector(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    """A model that finds objects on the features of a small ResNet."""

    def make() -> nn.Module:
        import transformers

        backbone = transformers.ResNetConfig(**RESNET)
        kept = inspect.signature(getattr(transformers, config)).parameters
        off = {name: value for name, value in OWN_BACKBONE.items() if name in kept}
        made: nn.Module = getattr(transformers, model)(
            getattr(transformers, config)(**{**DETECTOR, **off, "backbone_config": backbone, **options})
        )
        return made

    return make


RESNET: Options = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 32, 48],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
OWN_BACKBONE: Options = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
DETECTOR: Options = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 5,
}
SWIN: Options = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 24,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
PYRAMID: Options = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 12,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
VIDEO: Options = {"num_frames": 4, "tubelet_size": 2}


def build_mask2former() -> nn.Module:
    """Mask2Former on a small Swin."""
    import transformers

    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(**PYRAMID),
        feature_size=64,  # its norms have 32 groups
        mask_feature_size=64,
        hidden_dim=64,
        encoder_feedforward_dim=64,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=5,
    )
    return transformers.Mask2FormerModel(config)


def build_maskformer() -> nn.Module:
    """MaskFormer on a small Swin with a decoder of DETR's."""
    import transformers

    config = transformers.MaskFormerConfig(
        backbone_config=transformers.SwinConfig(**PYRAMID),
        decoder_config=transformers.DetrConfig(
            **DETECTOR, backbone_config=transformers.ResNetConfig(depths=[1, 1, 1, 1])
        ),
        fpn_feature_size=32,
        mask_feature_size=32,
    )
    return transformers.MaskFormerModel(config)


def build_dual_encoder() -> nn.Module:
    """A ViT and a BERT side by side."""
    import transformers

    vision, words = small_config(transformers.ViTConfig), small_config(transformers.BertConfig)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, words, projection_dim=WIDTH)
    return transformers.VisionTextDualEncoderModel(config)


def build_encoder_decoder() -> nn.Module:
    """A ViT that a GPT-2 describes."""
    import transformers

    vision = small_config(transformers.ViTConfig)
    words = small_config(transformers.GPT2Config, add_cross_attention=True, is_decoder=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, words)
    return transformers.VisionEncoderDecoderModel(config=config)


def build_perceiver() -> nn.Module:
    """Perceiver on text."""
    import transformers

    config = transformers.PerceiverConfig(
        num_latents=8, d_latents=WIDTH, d_model=WIDTH, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=4, num_cross_attention_heads=4, qk_channels=WIDTH, v_channels=WIDTH,
        vocab_size=TOKENS, max_position_embeddings=9,
    )  # fmt: skip
    return transformers.PerceiverForMaskedLM(config)


MROPE: Options = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
SERIES: Options = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
