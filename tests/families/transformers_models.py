"""Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from families.base import Family, Inputs, noise, of_architecture, pixels


def hf(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return build


HF = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 64}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HF_IMAGE = {**HF, **QUIET, "image_size": 32, "patch_size": 8}


def build_detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=5,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return transformers.DetrForObjectDetection(config)


def text(batch: int = 2, length: int = 9) -> Callable[[], Inputs]:
    def make() -> Inputs:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, 90, (batch, length), generator=generator)
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[1, 6:] = 0
        return {"input_ids": ids, "attention_mask": mask}

    return make


TRANSFORMERS = [
    Family("hf-vit", hf("ViTConfig", "ViTForImageClassification", **HF_IMAGE), pixels(), 3, 3, ((4, 4),), prefix=1),
    Family("hf-deit", hf("DeiTConfig", "DeiTForImageClassification", **HF_IMAGE), pixels(), 3, 3, ((4, 4),), prefix=2),
    Family(
        "hf-swin",
        hf(
            "SwinConfig",
            "SwinForImageClassification",
            image_size=32,
            patch_size=2,
            embed_dim=24,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.0,
            **QUIET,
        ),
        pixels(),
        4,
        4,
        ((4, 4),),
    ),
    Family(
        "hf-pvt",
        hf(
            "PvtConfig",
            "PvtForImageClassification",
            image_size=64,
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 24, 32, 48],
            num_attention_heads=[1, 2, 2, 3],
            drop_path_rate=0.0,
            **QUIET,
        ),
        pixels(64),
        4,
        4,
        (None,),
    ),
    Family(
        "hf-dinov2", hf("Dinov2Config", "Dinov2ForImageClassification", **HF_IMAGE), pixels(), 3, 3, ((4, 4),), prefix=1
    ),
    Family(
        "hf-beit",
        hf("BeitConfig", "BeitForImageClassification", **HF_IMAGE, use_relative_position_bias=True, drop_path_rate=0.0),
        pixels(),
        3,
        3,
        ((4, 4),),
        prefix=1,
    ),
    Family("hf-detr", build_detr, pixels(32), 4, 6, (None,), fullgraph=False),
    Family(
        "hf-bert",
        hf("BertConfig", "BertForSequenceClassification", **HF, **QUIET, vocab_size=100, max_position_embeddings=32),
        text(),
        3,
        3,
        (None,),
    ),
    Family(
        "hf-ast",
        hf(
            "ASTConfig",
            "ASTForAudioClassification",
            **HF,
            **QUIET,
            patch_size=8,
            frequency_stride=8,
            time_stride=8,
            max_length=32,
            num_mel_bins=16,
        ),
        lambda: {"input_values": noise((2, 32, 16))()["args"][0]},
        3,
        3,
        ((2, 4),),
        prefix=2,
    ),
    Family(
        "hf-clip",
        hf("CLIPVisionConfig", "CLIPVisionModel", **HF, image_size=32, patch_size=8),
        pixels(),
        3,
        3,
        ((4, 4),),
        prefix=1,
    ),
]


def build_whisper() -> nn.Module:
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        transformers.WhisperConfig(
            d_model=48,
            encoder_layers=3,
            encoder_attention_heads=3,
            encoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=12,
            dropout=0.0,
            attention_dropout=0.0,
            encoder_layerdrop=0.0,
        )
    )


TRANSFORMERS.append(
    Family(
        "hf-whisper",
        build_whisper,
        lambda: {"input_features": noise((2, 8, 24))()["args"][0]},
        3,
        3,
        (None,),
        fullgraph=False,
    )
)


MET_OTHERWISE = [
    of_architecture("hf-segformer", "transformers", "segformer", 4, 4),
    of_architecture("hf-falcon", "transformers", "falcon", 2, 2),
    of_architecture(
        "hf-blip", "transformers", "blip, answering", 6, 10, depths=(0, 1, 2, 2, 3, 3, 4, 4, 5, 5), fullgraph=False
    ),
    of_architecture("hf-vilt", "transformers", "vilt", 2, 2, fullgraph=False, own_randomness=True),
    of_architecture(
        *("hf-mask2former", "transformers", "mask2former", 6, 8),
        depths=(0, 1, 2, 3, 4, 4, 5, 5),
        fullgraph=False,
        pickles=False,
    ),
    of_architecture("hf-perceiver", "transformers", "perceiver", 2, 2),
]
"""Models that meet attention in a way of their own."""
