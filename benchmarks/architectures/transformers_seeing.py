"""Models of Transformers for images, videos and sound that want more than small numbers and the usual input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from architectures.base import Inputs, ids
from architectures.shrinking import WIDTH
from architectures.transformers_builders import (
    SWIN,
    VIDEO,
    build_mask2former,
    build_maskformer,
    by_class,
    by_type,
    detector,
)
from architectures.transformers_inputs import floats, named, pixels

SEEING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    # images
    "swin": (by_type("swin", **SWIN), pixels()),
    "swinv2": (by_type("swinv2", **{**SWIN, "pretrained_window_sizes": [0, 0]}), pixels()),
    "donut-swin": (by_type("donut-swin", **SWIN), pixels()),
    "maskformer-swin": (by_type("maskformer-swin", **SWIN), pixels()),
    "swin2sr": (
        by_class(
            "Swin2SRConfig",
            "Swin2SRModel",
            image_size=32,
            patch_size=1,
            embed_dim=24,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        pixels(),
    ),
    "hiera": (
        by_type(
            "hiera", image_size=[64, 64], patch_size=[7, 7], embed_dim=24, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4]
        ),
        pixels(64),
    ),
    "levit": (
        by_type(
            "levit",
            image_size=64,
            patch_size=16,
            hidden_sizes=[16, 24, 32],
            num_attention_heads=[1, 2, 2],
            depths=[1, 1, 1],
            key_dim=[8, 8, 8],
        ),
        pixels(64),
    ),
    "convnext": (by_type("convnext", depths=[1, 1], hidden_sizes=[16, 24], patch_size=4, num_stages=2), pixels()),
    "mobilevitv2": (by_type("mobilevitv2", image_size=64, patch_size=2), pixels(64)),
    "imagegpt": (by_type("imagegpt"), lambda: {"input_ids": ids(length=16)}),
    "detr": (detector("DetrConfig", "DetrModel"), pixels(64)),
    "conditional_detr": (detector("ConditionalDetrConfig", "ConditionalDetrModel"), pixels(64)),
    "deformable_detr": (
        detector("DeformableDetrConfig", "DeformableDetrModel", d_model=64, num_feature_levels=2),
        pixels(64),
    ),
    "table-transformer": (detector("TableTransformerConfig", "TableTransformerModel"), pixels(64)),
    "dab-detr": (detector("DabDetrConfig", "DabDetrModel", hidden_size=WIDTH), pixels(64)),
    "mask2former": (build_mask2former, pixels(64)),
    "maskformer": (build_maskformer, pixels(64)),
    "siglip2_vision_model": (
        by_type("siglip2_vision_model", num_patches=16),
        lambda: {
            "pixel_values": floats(2, 16, 192),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        },
    ),
    "mgp-str": (by_type("mgp-str", image_size=[32, 32], patch_size=8), pixels()),
    # video
    "vivit": (by_type("vivit", num_frames=4, tubelet_size=[2, 8, 8]), named(pixel_values=(2, 4, 3, 32, 32))),
    "videomae": (by_type("videomae", **VIDEO), named(pixel_values=(2, 4, 3, 32, 32))),
    "timesformer": (by_type("timesformer", num_frames=4), named(pixel_values=(2, 4, 3, 32, 32))),
    "vjepa2": (
        by_type(
            "vjepa2",
            crop_size=32,
            frames_per_clip=4,
            pred_hidden_size=WIDTH,
            pred_num_hidden_layers=2,
            pred_num_attention_heads=4,
        ),
        named(pixel_values_videos=(2, 4, 3, 32, 32)),
    ),
    # sound
    "audio-spectrogram-transformer": (
        by_type("audio-spectrogram-transformer", max_length=32, frequency_stride=8, time_stride=8),
        named(input_values=(2, 32, 16)),
    ),
    "whisper": (by_type("whisper"), lambda: {"input_features": floats(2, 16, 64), "decoder_input_ids": ids()}),
    "speech_to_text": (
        by_type("speech_to_text", input_feat_per_channel=16, conv_channels=32),
        lambda: {"input_features": floats(2, 64, 16), "decoder_input_ids": ids()},
    ),
    "speecht5": (
        by_class("SpeechT5Config", "SpeechT5ForSpeechToText", max_text_positions=32),
        lambda: {"input_values": floats(2, 1000), "decoder_input_ids": ids()},
    ),
    "wav2vec2-bert": (by_type("wav2vec2-bert", feature_projection_input_dim=16), named(input_features=(2, 20, 16))),
    "moonshine": (
        by_type(
            "moonshine",
            encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=4,
            decoder_num_attention_heads=4,
        ),
        lambda: {"input_values": floats(2, 2000), "decoder_input_ids": ids()},
    ),
    "qwen2_audio_encoder": (by_type("qwen2_audio_encoder"), named(input_features=(2, 16, 64))),
    "parakeet_encoder": (by_type("parakeet_encoder", subsampling_conv_channels=16), named(input_features=(2, 64, 16))),
}
