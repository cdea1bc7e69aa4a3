"""Small configurations for the models of Transformers: the fields that they share, set to small values."""

from __future__ import annotations

import inspect
from typing import Any

HEADS, WIDTH, LAYERS, TOKENS = 4, 48, 2, 100

SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "model_dim", "hidden_dim"), WIDTH
    ),
    **dict.fromkeys(
        ("encoder_hidden_size", "decoder_hidden_size", "cross_attention_hidden_size", "lm_hidden_size"), WIDTH
    ),
    **dict.fromkeys(("embedding_size", "text_embed_dim", "projection_dim", "embedding_dim", "out_hidden_size"), WIDTH),
    **dict.fromkeys(
        ("mm_hidden_size", "image_text_hidden_size", "word_embed_proj_dim", "output_dim", "hidden_dim"), WIDTH
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(
        ("num_encoder_layers", "num_decoder_layers", "depth", "encoder_depth", "num_hidden_groups"), LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 64),
    **dict.fromkeys(
        ("dim_feedforward", "hidden_dim_ffn", "ffn_hidden_size", "mlp_hidden_size", "encoder_intermediate_size"), 64
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), 32),
    **dict.fromkeys(
        ("head_dim", "d_kv", "attention_head_size", "kv_channels", "v_head_dim", "global_head_dim"), WIDTH // HEADS
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "swa_head_dim"), 12),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "vocab_size": TOKENS,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "num_queries": 5,
    "rotary_dim": 8,
    "num_labels": 5,
    "vocab_size_per_layer_input": TOKENS,
    "hidden_size_per_layer_input": 16,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
}
"""Where a field holds a number, or what it is named after says all. Lists of numbers are left as they are."""

AT_MOST = {"max_position_embeddings": 64, "n_positions": 64, "max_target_positions": 64, "n_ctx": 64, "max_seq_len": 64}
LISTED = ("conv_dim", "conv_stride", "conv_kernel")
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}


def small_config(config_class: Any, **given: Any) -> Any:
    """A configuration of a class with small values; `given` comes first.

    A value of ... keeps the default. The name of a part and a full stop, as in {"vision_config.": {…}}, gives to it.
    """
    default = config_class()
    chosen: dict[str, Any] = {}
    for name in inspect.signature(config_class).parameters:
        value = getattr(default, name, None)
        if name in SMALL and (type(value) is int or (name in LISTED and value is not None)):
            chosen[name] = SMALL[name]
        elif name in AT_MOST and type(value) is int:
            chosen[name] = min(value, AT_MOST[name])
        elif name in TOKEN_IDS and type(value) is int and value >= TOKENS:
            chosen[name] = TOKEN_IDS[name]
        elif is_config(value):
            chosen[name] = small_config(type(value), **given.get(f"{name}.", {}))
    chosen |= {name: value for name, value in given.items() if not name.endswith(".")}
    return config_class(**{name: value for name, value in chosen.items() if value is not ...})


def is_config(value: Any) -> bool:
    """Whether a field holds the configuration of a part."""
    return hasattr(value, "to_dict") and hasattr(value, "model_type")
