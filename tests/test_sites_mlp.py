"""Feed-forward networks, by the names of their layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModel, GPTNeoXConfig, ModernBertConfig, Phi3Config, PretrainedConfig, Wav2Vec2Config

import attemper
from attemper.sites.mlp import find_mlp

SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 3, "sep_token_id": 4,
}  # fmt: skip
AUDIO = {
    "conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
WORDS = {"input_ids": torch.arange(20).view(2, 10)}


def holder(**sizes: tuple[int, int]) -> nn.Module:
    """A module with linear layers of these names and sizes."""
    module = nn.Module()
    for name, (wide, out) in sizes.items():
        module.add_module(name, nn.Linear(wide, out))
    return module


@pytest.mark.parametrize(
    ("layers", "firsts", "last"),
    [
        ({"fc1": (8, 24), "fc2": (24, 8)}, ["fc1"], "fc2"),
        ({"intermediate_dense": (8, 24), "output_dense": (24, 8)}, ["intermediate_dense"], "output_dense"),
        ({"dense_h_to_4h": (8, 24), "dense_4h_to_h": (24, 8)}, ["dense_h_to_4h"], "dense_4h_to_h"),
        ({"fc_in": (8, 24), "fc_out": (24, 8)}, ["fc_in"], "fc_out"),
        ({"ffn": (8, 24), "ffn_output": (24, 8)}, ["ffn"], "ffn_output"),
        ({"Wi": (8, 48), "Wo": (24, 8)}, ["Wi"], "Wo"),
        ({"gate_up_proj": (8, 48), "down_proj": (24, 8)}, ["gate_up_proj"], "down_proj"),
        ({"w1": (8, 24), "w2": (8, 24), "w3": (24, 8)}, ["w1", "w2"], "w3"),
        ({"w1": (8, 24), "w2": (24, 8), "w3": (8, 24)}, ["w1", "w3"], "w2"),
    ],
)
def test_layers_by_their_names(layers: dict[str, tuple[int, int]], firsts: list[str], last: str) -> None:
    module = holder(**layers)
    assert find_mlp(module) == (tuple(getattr(module, name) for name in firsts), getattr(module, last))


class GatedFeedForward(nn.Module):
    """Names that nobody else would give: it is known by its own, and by widths."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        for i, (wide, out) in enumerate(sizes):
            self.add_module(f"part{i}", nn.Linear(wide, out))


class Adapter(GatedFeedForward): ...


@pytest.mark.parametrize(
    ("sizes", "firsts", "last"),
    [
        ([(8, 24), (24, 8)], [0], 1),
        ([(8, 48), (24, 8)], [0], 1),
        ([(8, 24), (8, 24), (24, 8)], [0, 1], 2),
        ([(8, 24), (24, 8), (8, 24)], [0, 2], 1),
    ],
)
def test_own_modules_by_their_name_and_widths(sizes: list[tuple[int, int]], firsts: list[int], last: int) -> None:
    module = GatedFeedForward(*sizes)
    parts = list(module.children())
    assert find_mlp(module) == (tuple(parts[i] for i in firsts), parts[last])
    assert find_mlp(Adapter(*sizes)) is None


@pytest.mark.parametrize(
    "sizes", [[(8, 4), (4, 8)], [(8, 24), (24, 10)], [(8, 24)], [(8, 24), (24, 24), (24, 8)], [(8, 8), (8, 8)], []]
)
def test_widths_that_are_not_those_of_an_mlp(sizes: list[tuple[int, int]]) -> None:
    assert find_mlp(GatedFeedForward(*sizes)) is None


class ConvolutionalFeedForward(nn.Module):
    """Norms, a depthwise convolution and dropout between 1 × 1 convolutions."""

    def __init__(self, *, inside: bool = False) -> None:
        super().__init__()
        wide = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.net = nn.Sequential(nn.Conv2d(8, 24, 1), nn.Sequential(wide, nn.Hardswish()), nn.Conv2d(24, 8, 1))
        if inside:
            self.more = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def test_layers_that_are_nested_are_found_and_those_of_an_mlp_inside_are_its_own() -> None:
    module = ConvolutionalFeedForward()
    assert find_mlp(module) == ((module.net[0],), module.net[2])
    nested = ConvolutionalFeedForward(inside=True)
    assert find_mlp(nested) is None
    assert find_mlp(nested.more) == ((nested.more[0],), nested.more[2])


def test_what_is_no_mlp() -> None:
    assert find_mlp(holder(Wqkv=(8, 24), Wo=(8, 8))) is None
    assert find_mlp(holder(w1=(8, 24), w2=(24, 12), w3=(12, 8))) is None  # three layers behind each other
    assert find_mlp(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))) is None


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (Wav2Vec2Config(**SMALL, **AUDIO), {"input_values": torch.linspace(-1, 1, 400).view(2, 200)}),
        (GPTNeoXConfig(**SMALL), WORDS),
        (ModernBertConfig(**SMALL), WORDS),
        (Phi3Config(**SMALL), WORDS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_whose_mlps_have_other_names(config: PretrainedConfig, inputs: dict[str, torch.Tensor]) -> None:
    model = AutoModel.from_config(config)
    tempered = attemper.apply(model, "explicit(ff=0.1)")
    model.train()(**inputs)
    wanted = [(block, component) for block in range(2) for component in ("ff1", "ff2")]
    assert [(row.block, row.component) for row in tempered.penalties()] == wanted
    assert all(row.value > 0 for row in tempered.penalties())
