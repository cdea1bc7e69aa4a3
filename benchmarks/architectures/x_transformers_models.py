"""x-transformers: its wrappers, and the options of its layers that people use, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from architectures.base import Architecture, Inputs, ids, image, noise

LAYERS: dict[str, Any] = {"dim": 48, "depth": 2, "heads": 3, "attn_dim_head": 16, "verbose": False}

ENCODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rmsnorm": {"use_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "glu": {"ff_glu": True, "ff_swish": True},
    "relu squared": {"ff_relu_squared": True, "ff_no_bias": True},
    "post-act norm": {"ff_post_act_ln": True},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "relative bias": {"rel_pos_bias": True},
    "dynamic bias": {"dynamic_pos_bias": True},
    "qk norm": {"attn_qk_norm": True},
    "qk rmsnorm": {"attn_qk_rmsnorm": True},
    "post-norm": {"pre_norm": False},
    "sandwich norm": {"sandwich_norm": True},
    "residual attention": {"residual_attn": True},
    "gated residual": {"gate_residual": True},
    "scaled residual": {"scale_residual": True},
    "layer scale": {"use_layerscale": True},
    "macaron": {"macaron": True},
    "sandwich order": {"sandwich_coef": 1},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "head scale": {"attn_head_scale": True},
    "memory keys": {"attn_num_mem_kv": 4},
    "one key head": {"attn_one_kv_head": True},
    "grouped keys": {"heads": 4, "attn_dim_head": 12, "attn_kv_heads": 2},
    "gated values": {"attn_gate_values": True},
    "attention on attention": {"attn_on_attn": True},
    "top-k": {"attn_sparse_topk": 4},
    "value residual": {"add_value_residual": True},
    "hyper-connections": {"num_residual_streams": 2},
    "unet skips": {"unet_skips": True},
    "shifted tokens": {"shift_tokens": 1},
    "tied layers": {"weight_tie_layers": True},
    "attention only": {"only_attn": True},
}
DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rotary, rmsnorm, glu": {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "rotary, flash": {"rotary_pos_emb": True, "attn_flash": True},
    "alibi": {"alibi_pos_bias": True},
    "max attend past": {"attn_max_attend_past": 4},
    "selective": {"attn_selective": True},
}


def encoder(**options: Any) -> Callable[[], nn.Module]:
    """A bare encoder on vectors."""

    def make() -> nn.Module:
        from x_transformers import Encoder

        model: nn.Module = Encoder(**{**LAYERS, **options})
        return model

    return make


def language_model(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """Token embeddings, layers of a kind, and logits."""

    def make() -> nn.Module:
        import x_transformers

        layers = getattr(x_transformers, kind)(**{**LAYERS, **options})
        model: nn.Module = x_transformers.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)
        return model

    return make


def wrapped(wrapper: str, **options: Any) -> Callable[[], nn.Module]:
    """One of the other wrappers round a plain encoder."""

    def make() -> nn.Module:
        import x_transformers

        model: nn.Module = getattr(x_transformers, wrapper)(attn_layers=x_transformers.Encoder(**LAYERS), **options)
        return model

    return make


def cross_attending() -> nn.Module:
    """A decoder that looks at vectors besides its own tokens."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(**LAYERS, cross_attend=True)
    model: nn.Module = TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)
    return model


def autoregressive() -> nn.Module:
    """A language model with its loss."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    model: nn.Module = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=Decoder(**LAYERS))
    )
    return model


def translation() -> nn.Module:
    """An encoder and a decoder, with the loss."""
    from x_transformers import XTransformer

    part = {"depth": 2, "heads": 3, "attn_dim_head": 16, "num_tokens": 100, "max_seq_len": 32}
    options = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in part.items()}
    model: nn.Module = XTransformer(dim=48, **options)
    return model


def cross_attender() -> nn.Module:
    """Layers of nothing but cross-attention."""
    from x_transformers import CrossAttender

    model: nn.Module = CrossAttender(**LAYERS)
    return model


def padded() -> Inputs:
    """Tokens of two sentences, and which of them are real."""
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 7:] = False
    return {"args": (ids(),), "mask": mask}


def words() -> Inputs:
    """Tokens of two sentences."""
    return {"args": (ids(),)}


def x_transformers_architectures() -> list[Architecture]:
    """Those of x-transformers."""
    name = "x-transformers"
    made = [Architecture(name, f"Encoder, {key}", encoder(**o), noise((2, 10, 48))) for key, o in ENCODERS.items()]
    made += [
        Architecture(name, f"Decoder, {key}", language_model("Decoder", **o), words) for key, o in DECODERS.items()
    ]
    return [
        *made,
        Architecture(name, "TransformerWrapper", language_model("Encoder"), padded),
        Architecture(name, "PrefixDecoder", language_model("PrefixDecoder"), words),
        Architecture(
            name,
            "ViTransformerWrapper",
            wrapped("ViTransformerWrapper", image_size=32, patch_size=8, num_classes=5),
            image(32),
        ),
        Architecture(
            name,
            "ViTransformerWrapper, registers",
            wrapped("ViTransformerWrapper", image_size=32, patch_size=8, num_classes=5, num_register_tokens=4),
            image(32),
        ),
        Architecture(
            name,
            "ContinuousTransformerWrapper",
            wrapped("ContinuousTransformerWrapper", dim_in=12, dim_out=6, max_seq_len=32),
            noise((2, 10, 12)),
        ),
        Architecture(
            name,
            "Decoder, cross-attention",
            cross_attending,
            lambda: {**words(), "context": noise((2, 6, 48))()["args"][0]},
        ),
        Architecture(
            name,
            "CrossAttender",
            cross_attender,
            lambda: {**noise((2, 10, 48))(), "context": noise((2, 6, 48))()["args"][0]},
        ),
        Architecture(name, "AutoregressiveWrapper", autoregressive, words),
        Architecture(
            name, "XTransformer", translation, lambda: {"args": (ids(), ids(seed=2)), "mask": padded()["mask"]}
        ),
    ]
