"""Models of Transformers for text, pages, numbers over time and several kinds of input at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from architectures.base import Inputs, ids
from architectures.shrinking import TOKENS, WIDTH
from architectures.transformers_builders import (
    MROPE,
    SERIES,
    build_dual_encoder,
    build_encoder_decoder,
    build_perceiver,
    by_class,
    by_type,
)
from architectures.transformers_inputs import boxes, floats, named, series, text, text_and_pixels, words_of_image

READING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    # text that wants more
    "esm": (by_type("esm", vocab_size=TOKENS, pad_token_id=1, mask_token_id=3), text()),
    "reformer": (
        by_type(
            "reformer",
            axial_pos_shape=[4, 4],
            axial_pos_embds_dim=[24, 24],
            attn_layers=["local", "lsh"],
            lsh_attn_chunk_length=4,
            local_attn_chunk_length=4,
            num_buckets=2,
            feed_forward_size=64,
        ),
        lambda: {"input_ids": ids(length=16)},
    ),
    "funnel": (
        by_class(
            "FunnelConfig",
            "FunnelModel",
            block_sizes=[1, 1],
            block_repeats=[1, 1],
            num_hidden_layers=...,
            num_decoder_layers=1,
            n_head=4,
            d_head=12,
            d_inner=64,
        ),
        text(),
    ),
    "gpt_neo": (by_type("gpt_neo", attention_types=[[["global", "local"], 1]]), text()),
    "xmod": (by_type("xmod", languages=["en_XX"], default_language="en_XX"), text()),
    "qwen2_vl_text": (by_type("qwen2_vl_text", **MROPE), text()),
    "jamba": (
        by_type("jamba", attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4),
        text(),
    ),
    "zamba2": (by_type("zamba2", num_hidden_layers=2, layers_block_type=["mamba", "hybrid"], mamba_d_state=8), text()),
    "hunyuan_v1_dense": (by_type("hunyuan_v1_dense", head_dim=12), text()),
    "nemotron": (by_type("nemotron", head_dim=12, num_key_value_heads=2), text()),
    "ministral": (by_type("ministral", head_dim=12), text()),
    "bros": (by_type("bros", hidden_size=64), lambda: {"input_ids": ids(), "bbox": floats(2, 9, 8).abs()}),
    "layoutlmv3": (
        by_type("layoutlmv3", input_size=32, coordinate_size=8, shape_size=8),
        lambda: {"input_ids": ids(), "bbox": boxes(), "pixel_values": floats(2, 3, 32, 32)},
    ),
    "udop": (by_type("udop"), lambda: {"input_ids": ids(), "bbox": boxes() / 1000, "decoder_input_ids": ids(seed=2)}),
    "perceiver": (build_perceiver, lambda: {"inputs": ids()}),
    "decision_transformer": (
        by_type("decision_transformer", max_ep_len=32),
        lambda: {
            "states": floats(2, 5, 17),
            "actions": floats(2, 5, 4),
            "rewards": floats(2, 5, 1),
            "returns_to_go": floats(2, 5, 1),
            "timesteps": torch.arange(5).repeat(2, 1),
            "attention_mask": torch.ones(2, 5),
        },
    ),
    "bert, causal": (by_class("BertConfig", "BertLMHeadModel", is_decoder=True), text()),
    # numbers over time
    "patchtst": (
        by_type("patchtst", num_input_channels=2, context_length=16, patch_length=4, patch_stride=4),
        named(past_values=(2, 16, 2)),
    ),
    "time_series_transformer": (
        by_class("TimeSeriesTransformerConfig", "TimeSeriesTransformerModel", **SERIES),
        series,
    ),
    "informer": (by_class("InformerConfig", "InformerModel", **SERIES), series),
    "autoformer": (by_class("AutoformerConfig", "AutoformerModel", **SERIES, label_length=4), series),
    "timesfm2_5": (by_type("timesfm2_5", context_length=64, patch_length=8), named(past_values=(2, 64))),
    # several kinds of input
    "clip": (by_type("clip"), text_and_pixels()),
    "siglip": (by_type("siglip"), text_and_pixels()),
    "altclip": (by_type("altclip"), text_and_pixels()),
    "chinese_clip": (by_type("chinese_clip"), text_and_pixels()),
    "clipseg": (by_type("clipseg"), text_and_pixels()),
    "groupvit": (
        by_type(
            "groupvit",
            **{
                "vision_config.": {
                    "depths": [1, 1, 1],
                    "num_group_tokens": [8, 4, 0],
                    "num_output_groups": [8, 4, 0],
                    "hidden_size": WIDTH,
                }
            },
        ),
        text_and_pixels(),
    ),
    "owlvit": (by_type("owlvit"), text_and_pixels()),
    "xclip": (
        by_type(
            "xclip",
            **{
                "vision_config.": {
                    "num_frames": 4,
                    "mit_hidden_size": WIDTH,
                    "mit_intermediate_size": 64,
                    "mit_num_attention_heads": 4,
                }
            },
        ),
        lambda: {"input_ids": ids(), "pixel_values": floats(2, 4, 3, 32, 32)},
    ),
    "flava": (by_type("flava"), text_and_pixels()),
    "vilt": (by_type("vilt"), text_and_pixels()),
    "blip": (by_type("blip"), text_and_pixels()),
    "blip, answering": (
        by_class("BlipConfig", "BlipForQuestionAnswering"),
        text_and_pixels(decoder_input_ids=ids(seed=2), labels=ids(seed=2)),
    ),
    "blip, describing": (by_class("BlipConfig", "BlipForConditionalGeneration"), text_and_pixels()),
    "git": (by_type("git"), text_and_pixels()),
    "bridgetower": (by_type("bridgetower", **{"vision_config.": {"hidden_size": 64}}), text_and_pixels()),
    "lxmert": (
        by_type("lxmert", l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16),
        lambda: {"input_ids": ids(), "visual_feats": floats(2, 5, 16), "visual_pos": floats(2, 5, 4)},
    ),
    "llava": (
        by_type("llava", image_token_index=99, image_token_id=99, vision_feature_select_strategy="default"),
        words_of_image,
    ),
    "paligemma": (by_type("paligemma", image_token_id=99, image_token_index=99, projection_dim=WIDTH), words_of_image),
    "vision-text-dual-encoder": (build_dual_encoder, text_and_pixels()),
    "vision-encoder-decoder": (
        build_encoder_decoder,
        lambda: {"pixel_values": floats(2, 3, 32, 32), "decoder_input_ids": ids()},
    ),
    "kosmos-2": (
        by_type("kosmos-2", latent_query_num=4, **{"text_config.": {"attention_heads": 4, "layers": 2}}),
        lambda: {
            "input_ids": ids(),
            "pixel_values": floats(2, 3, 32, 32),
            "image_embeds_position_mask": (torch.arange(9) < 4).long().expand(2, 9),
        },
    ),
    "clap": (
        by_type("clap", **{"audio_config.": {"depths": [1, 1, 1, 1], "num_mel_bins": 64, "hidden_size": 768}}),
        lambda: {"input_ids": ids(), "input_features": floats(2, 1, 1024, 64)},
    ),
    "seggpt": (
        by_type("seggpt", image_size=[64, 32]),
        lambda: {
            "pixel_values": floats(2, 3, 32, 32),
            "prompt_pixel_values": floats(2, 3, 32, 32),
            "prompt_masks": floats(2, 3, 32, 32),
        },
    ),
}
