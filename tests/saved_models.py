"""Six small tempered models of Transformers, for the tests of saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attemper
from attemper import Tempered
from families import build, call, family, hf
from families.base import Family, Inputs

SMALL = {"vocab_size": 60, "max_position_embeddings": 32}


def tokens(*names: str) -> Callable[[], Inputs]:
    return lambda: {name: torch.arange(12).view(2, 6) + 3 for name in names}


BART = hf(
    "BartConfig", "BartForConditionalGeneration", **SMALL, d_model=32, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0,
)  # fmt: skip
LLAMA = hf(
    "LlamaConfig", "LlamaForCausalLM", **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, tie_word_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: Family
    recipe: str
    targets: tuple[str, ...] | None = None

    def tempered(self) -> Tempered:
        """A model whose weights, and whose parameters of methods, are as after a training."""
        tempered = attemper.apply(build(self.family).eval(), self.recipe, targets=self.targets)
        with torch.no_grad():
            for name, parameter in tempered.model.named_parameters():
                if name.startswith("attemper."):
                    parameter.add_(torch.randn_like(parameter))
        return tempered

    def outputs(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            return call(model.eval(), self.family.inputs())


def case(name: str, make: Callable[[], nn.Module], inputs: Callable[[], Inputs], recipe: str, *targets: str) -> Case:
    return Case(Family(name, make, inputs, 2, 2, (None,)), recipe, targets or None)


CASES = [
    Case(family("hf-vit"), "cb(cb_s) + dropkey(0.1)"),
    Case(family("hf-bert"), "cb(cb_s, branch=both)"),
    Case(family("hf-dinov2"), "cb(cb_s) + graying(svd)"),
    Case(family("hf-swin"), "cb(cb_s, position=front)", ("swin.encoder.layers.1.*",)),
    case("hf-bart", BART, tokens("input_ids", "decoder_input_ids"), "cb(cb_s)", "model.encoder.*"),
    case("hf-llama", LLAMA, tokens("input_ids"), "skipless(mlp) + dropkey(0.1)"),
]
VIT = CASES[0]


def loaded(kind: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """What from_pretrained gives, and what it reports."""
    model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    return model.eval(), info
