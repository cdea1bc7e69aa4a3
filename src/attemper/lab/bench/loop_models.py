"""The models whose training loops are measured: what people train, with random weights and made-up data."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.bench.vit_models import BASE, ViT, make_vit, pick_library

TINY_VIT = ViT("tiny ViT", image=32, patch=8, width=48, blocks=2, heads=2, classes=10)
VOCABULARY = {"large": 8192, "small": 64}


@dataclass(frozen=True)
class Trainable:
    """A model, and a batch for it."""

    model: nn.Module
    inputs: tuple[Any, ...]
    """What the model is called with."""
    criterion: Callable[[Any], Tensor]
    """The loss of an output."""


@dataclass(frozen=True)
class LoopModel:
    """A kind of model, in two sizes: one for GPUs, and a small one for CPUs."""

    large: str
    """What the large one is, for the reader."""
    small: str
    make: Callable[[bool, int, torch.device], Trainable]
    """Of whether it is large, the batch and the device."""


def make_vision_transformer(large: bool, batch: int, device: torch.device) -> Trainable:
    """ViT-S/16 at 224 pixels, or a tiny one."""
    sizes = BASE if large else TINY_VIT
    return classifier(make_vit(sizes, pick_library("auto")), batch, sizes.image, sizes.classes, device)


def make_swin(large: bool, batch: int, device: torch.device) -> Trainable:
    """Swin-T at 224 pixels, of timm, or a tiny one."""
    require("timm")
    from timm.models.swin_transformer import SwinTransformer

    given: dict[str, Any] = {"img_size": 224, "num_classes": 1000}
    if not large:
        given = {"img_size": 32, "window_size": 4, "patch_size": 4, "num_classes": 10}
        given |= {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    model = SwinTransformer(**given, drop_path_rate=0.0)
    return classifier(model, batch, given["img_size"], given["num_classes"], device)


def make_bert(large: bool, batch: int, device: torch.device) -> Trainable:
    """A BERT that classifies texts of different lengths, padded to the longest, of Transformers."""
    require("transformers")
    import transformers

    tokens, words = (128, VOCABULARY["large"]) if large else (12, VOCABULARY["small"])
    sizes: dict[str, Any] = {} if large else {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_labels": 4, "attn_implementation": "sdpa", "intermediate_size": 3072 if large else 64}
    config = transformers.BertConfig(
        vocab_size=words, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
    )
    lengths = torch.linspace(tokens // 2, tokens, batch, device=device).round()
    mask = (torch.arange(tokens, device=device) < lengths[:, None]).long()
    labels = torch.randint(4, (batch,), device=device)
    model = Texts(transformers.BertForSequenceClassification(config)).to(device).train()
    given = torch.randint(words, (batch, tokens), device=device)
    return Trainable(model, (given, mask), lambda out: F.cross_entropy(out, labels))


def make_gpt(large: bool, batch: int, device: torch.device) -> Trainable:
    """A GPT-2 that predicts the next token, of Transformers."""
    require("transformers")
    import transformers

    tokens, words = (256, VOCABULARY["large"]) if large else (12, VOCABULARY["small"])
    sizes: dict[str, Any] = {} if large else {"n_embd": 32, "n_layer": 2, "n_head": 2}
    sizes |= {"attn_implementation": "sdpa", "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        vocab_size=words, n_positions=tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes
    )
    model = Texts(transformers.GPT2LMHeadModel(config)).to(device).train()
    given = torch.randint(words, (batch, tokens), device=device)
    wanted = given.roll(-1, 1).flatten()
    return Trainable(model, (given, None), lambda out: F.cross_entropy(out.flatten(0, 1), wanted))


class Texts(nn.Module):
    """A model of Transformers that gives its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Tensor, mask: Tensor | None) -> Tensor:
        """Logits of token numbers (B, N); mask: (B, N), 0 at padding."""
        out: Tensor = self.model(input_ids=given, attention_mask=mask).logits
        return out


def make_call(large: bool, batch: int, device: torch.device) -> Trainable:
    """One call of attention and nothing else, at the sizes of a ViT-S."""
    sizes = (batch, 6, 197, 64) if large else (batch, 2, 9, 8)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(sizes, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    return Trainable(nn.Module(), (q, k, v), torch.sum)


def classifier(model: nn.Module, batch: int, size: int, classes: int, device: torch.device) -> Trainable:
    """An image classifier on noise."""
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(classes, (batch,), device=device)
    return Trainable(model.to(device).train(), (images,), lambda out: F.cross_entropy(out, labels))


def require(package: str) -> None:
    """Raise where a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ParameterError(f"this model comes from {package}, which is not installed: pip install {package}")


MODELS = {
    "vit-s": LoopModel(str(BASE), str(TINY_VIT), make_vision_transformer),
    "swin-t": LoopModel("Swin-T at 224, windows of 49 tokens", "tiny Swin at 32, windows of 16 tokens", make_swin),
    "bert": LoopModel(
        "BERT base, 12 blocks, width 768, 128 tokens, half of them padded at most",
        "BERT, 2 blocks, width 32, 12 tokens",
        make_bert,
    ),
    "gpt": LoopModel("GPT-2, 12 blocks, width 768, 256 tokens", "GPT-2, 2 blocks, width 32, 12 tokens", make_gpt),
    "call": LoopModel(
        "one call of attention, forward and backward, 6 heads, 197 tokens, head width 64",
        "one call of attention, 2 heads, 9 tokens, head width 8",
        make_call,
    ),
}
"""What is measured, by name; "call" has no loop, and what counts is the time of the host."""
