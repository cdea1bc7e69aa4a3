"""One small random model of every family that Attemper promises to work on, with an input that it takes.

Nothing is downloaded. Every model has its own dropout switched off, so that whatever differs between two training
passes is Attemper's doing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    blocks: int
    """How many blocks the network has: L of the schedules."""
    attentions: int
    """How many attention sites."""
    grids: tuple[tuple[int, int] | None, ...]
    """The key grids of the attention sites, without repeats, in order."""
    prefix: int = 0
    """How many keys stand before the patches."""
    prefixes: tuple[int, ...] | None = None
    """The same per site, where sites differ."""
    targets: tuple[str, ...] | None = None
    fullgraph: bool = True
    """False where the untempered model itself cannot be compiled into one graph."""


def build(family: Family) -> nn.Module:
    """The family's model with nothing left at zero: some start with a zero head or norm, which hides attention."""
    torch.manual_seed(0)
    model = family.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's main output as one tensor, whatever it returns."""
    out = model(*inputs.get("args", ()), **{k: v for k, v in inputs.items() if k != "args"})
    if isinstance(out, Tensor):
        return out
    if isinstance(out, tuple):
        return next(part for part in out if isinstance(part, Tensor))
    return next(value for value in out.values() if isinstance(value, Tensor))


def image(size: int = 32, batch: int = 2) -> Callable[[], Inputs]:
    def make() -> Inputs:
        generator = torch.Generator().manual_seed(1)
        return {"args": (torch.randn(batch, 3, size, size, generator=generator),)}

    return make


def pixels(size: int = 32, **more: Any) -> Callable[[], Inputs]:
    def make() -> Inputs:
        return {"pixel_values": image(size)()["args"][0], **more}

    return make


def noise(*shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    def make() -> Inputs:
        generator = torch.Generator().manual_seed(1)
        return {"args": tuple(torch.randn(*shape, generator=generator) for shape in shapes)}

    return make


# ------------------------------------------------------------------------------------------------------------- timm
def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=5, **options)
        return model

    return build


def build_volo() -> nn.Module:
    from timm.models.volo import VOLO

    return VOLO(
        (1, 1, 1),
        img_size=64,
        embed_dims=(24, 48, 48),
        num_heads=(2, 4, 4),
        stem_hidden_dim=16,
        num_classes=5,
        downsamples=(True, False, False),
        outlook_attention=(True, False, False),
        qkv_bias=True,
    )


def build_mvitv2() -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    config = MultiScaleVitCfg(depths=(1, 1), embed_dim=24, num_heads=1, stride_q=((1, 1), (2, 2)))
    return MultiScaleVit(config, img_size=(32, 32), num_classes=5)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}

TIMM = [
    Family("timm-vit", timm_model("vit_tiny_patch16_224", **VIT), image(), 3, 3, ((4, 4),), prefix=1),
    Family("timm-deit", timm_model("deit_tiny_distilled_patch16_224", **VIT), image(), 3, 3, ((4, 4),), prefix=2),
    Family(
        "timm-vit-registers",
        timm_model("vit_tiny_patch16_224", **VIT, class_token=False, reg_tokens=4, global_pool="avg"),
        image(),
        3,
        3,
        ((4, 4),),
        prefix=4,
    ),
    Family(
        "timm-swin",
        timm_model(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            patch_size=2,
            window_size=4,
            embed_dim=24,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
        ),
        image(),
        4,
        4,
        ((4, 4),),
    ),
    Family(
        "timm-swinv2",
        timm_model(
            "swinv2_tiny_window8_256",
            img_size=32,
            patch_size=2,
            window_size=4,
            embed_dim=24,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
        ),
        image(),
        4,
        4,
        ((4, 4),),
    ),
    Family(
        "timm-pvtv2",
        timm_model(
            "pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(16, 24, 32, 48), num_heads=(1, 2, 2, 3), drop_path_rate=0.0
        ),
        image(64),
        4,
        4,
        (None,),
    ),
    Family(
        "timm-cait",
        timm_model("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, depth_token_only=2),
        image(),
        4,
        4,
        ((4, 4),),
        prefixes=(0, 0, 1, 1),
    ),
    Family("timm-volo", build_volo, image(64), 5, 4, ((4, 4),), prefixes=(0, 0, 1, 1)),
    Family("timm-beit", timm_model("beit_base_patch16_224", **VIT), image(), 3, 3, ((4, 4),), prefix=1),
    Family("timm-eva02", timm_model("eva02_tiny_patch14_224", **VIT), image(), 3, 3, ((4, 4),), prefix=1),
    Family("timm-mvitv2", build_mvitv2, image(), 2, 2, (None,)),
]


# ----------------------------------------------------------------------------------------------------- Transformers
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


# ------------------------------------------------------------------------------------------- torchvision and torch.nn
def build_torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=3, hidden_dim=48, mlp_dim=64, num_classes=5
    )


def build_torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        patch_size=[2, 2],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
        num_classes=5,
    )


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(48, 3, 64, dropout=0.0, batch_first=True)


class HandWritten(nn.Module):
    """A block as people write it themselves: nothing but a call of scaled_dot_product_attention gives it away."""

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.to_qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


class HandWrittenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([HandWritten() for _ in range(3)])
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stack:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class SelfAttention(nn.Module):
    """nn.MultiheadAttention with its defaults: it returns its weights, so it is computed by matmul and softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


OTHERS = [
    Family("torchvision-vit", build_torchvision_vit, image(), 3, 3, ((4, 4),), prefix=1),
    Family("torchvision-swin", build_torchvision_swin, image(), 4, 4, ((4, 4),)),
    Family("nn-encoder", lambda: nn.TransformerEncoder(encoder_layer(), 3), noise((2, 10, 48)), 3, 3, (None,)),
    Family(
        "nn-decoder",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(48, 3, 64, dropout=0.0, batch_first=True), 3),
        lambda: {
            **noise((2, 7, 48), (2, 10, 48))(),
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(7),
            "tgt_is_causal": True,
        },
        3,
        6,
        (None,),
    ),
    Family("nn-mha", SelfAttention, noise((2, 10, 48)), 1, 1, (None,)),
    Family("hand-written", HandWrittenModel, noise((2, 10, 48)), 3, 3, (None,), targets=("stack.*",)),
]

FAMILIES = [*TIMM, *TRANSFORMERS, *OTHERS]
