"""torch.nn and torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from architectures.base import Architecture, image, noise

LAYER: dict[str, Any] = {"d_model": 48, "nhead": 4, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True}


class SelfAttention(nn.Module):
    """nn.MultiheadAttention, with or without its weights returned."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, **self.options)[0]
        return out


def encoder(**options: Any) -> nn.Module:
    """nn.TransformerEncoder of two layers."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**{**LAYER, **options}), 2, enable_nested_tensor=False)


def torch_architectures() -> list[Architecture]:
    """Those of torch.nn."""
    sizes: dict[str, Any] = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    models: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
        "TransformerEncoder": (encoder, ((2, 10, 48),)),
        "TransformerEncoder, norm first": (lambda: encoder(norm_first=True), ((2, 10, 48),)),
        "TransformerEncoder, sequence first": (lambda: encoder(batch_first=False), ((10, 2, 48),)),
        "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(**LAYER), ((2, 10, 48),)),
        "TransformerDecoder": (
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER), 2),
            ((2, 7, 48), (2, 10, 48)),
        ),
        "Transformer": (lambda: nn.Transformer(**LAYER, **sizes), ((2, 10, 48), (2, 7, 48))),
        "MultiheadAttention": (SelfAttention, ((2, 10, 48),)),
        "MultiheadAttention, no weights": (lambda: SelfAttention(need_weights=False), ((2, 10, 48),)),
    }
    return [Architecture("torch", name, make, noise(*shapes)) for name, (make, shapes) in models.items()]


def build_vit() -> nn.Module:
    """torchvision's ViT."""
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=64, num_classes=5
    )
    return model


def build_swin(version: int) -> nn.Module:
    """torchvision's Swin, first or second version."""
    from torchvision.models import swin_transformer as swin

    options: dict[str, Any] = {"patch_size": [2, 2], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
    if version == 2:
        options |= {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    model: nn.Module = swin.SwinTransformer(**options, window_size=[4, 4], stochastic_depth_prob=0.0, num_classes=5)
    return model


def build_maxvit() -> nn.Module:
    """torchvision's MaxViT."""
    from torchvision.models import MaxVit

    model: nn.Module = MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=5,
    )
    return model


def build_video() -> nn.Module:
    """torchvision's MViT for videos."""
    from torchvision.models.video import swin_transformer as video

    model: nn.Module = video.SwinTransformer3d(
        patch_size=[2, 4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[2, 2, 2],
        stochastic_depth_prob=0.0,
        num_classes=5,
    )
    return model


def torchvision_architectures() -> list[Architecture]:
    """Those of torchvision."""
    return [
        Architecture("torchvision", "ViT", build_vit, image(32)),
        Architecture("torchvision", "Swin", lambda: build_swin(1), image(32)),
        Architecture("torchvision", "Swin, version 2", lambda: build_swin(2), image(32)),
        Architecture("torchvision", "MaxViT", build_maxvit, image(64)),
        Architecture("torchvision", "Swin for videos", build_video, noise((2, 3, 4, 32, 32))),
    ]
