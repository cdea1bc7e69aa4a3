"""Transformers' DETR, from a configuration: no weights are downloaded. Carion et al., 2020,
https://arxiv.org/abs/2005.12872."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError, first_line, suggestion
from attemper.lab.models.vision_parts import check_heads
from attemper.lab.tasks.boxes.shape import BoxShape


class Detr(nn.Module):
    """Images (B, 4, S, S) → a dict: "logits" (B, queries, classes + 1), "boxes" (B, queries, 4), centres and sides.

    In training, "layers" (B, layers, queries, classes + 1 + 4) has the answers of all layers of the decoder.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.detr = model
        self.cross_attention = f"detr.model.decoder.layers.{model.config.decoder_layers - 1}.encoder_attn"
        """Where queries look at the image."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        mask = images[:, 3]
        states = self.detr.model(images[:, :3] * mask[:, None], pixel_mask=mask)
        if not self.training:
            return self.answer(states.last_hidden_state)
        every = [self.answer(each) for each in states.intermediate_hidden_states]
        packed = torch.stack([torch.cat([each["logits"], each["boxes"]], -1) for each in every], 1)
        return {**every[-1], "layers": packed}

    def answer(self, states: Tensor) -> dict[str, Tensor]:
        """Scores and boxes of the queries in one layer."""
        scores = self.detr.class_labels_classifier(states).float()
        return {"logits": scores, "boxes": self.detr.bbox_predictor(states).float().sigmoid()}


def detr(
    shape: BoxShape,
    *,
    backbone: str = "resnet18",
    width: int = 256,
    depth: int = 6,
    heads: int = 8,
    mlp: int = 2048,
    queries: int = 100,
    dropout: float = 0.0,
    frozen: bool = False,
) -> nn.Module:
    """DETR with any backbone.

    backbone: the name of a model of timm that gives feature maps, such as resnet50.
    depth: layers of the encoder, and of the decoder. mlp: width of the MLP's hidden layer.
    dropout: of DETR's own, on the branches; 0.1 as published.
    frozen: batch norms with fixed statistics and a first stage that is not trained, as published. That is for trained
        backbones, whose weights the budget's `init` brings; from nothing, all of it is trained.
    """
    from transformers import DetrConfig, DetrForObjectDetection

    check_heads(width, heads)
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ParameterError(f"dropout is {dropout!r}; it must be a number, from 0 to below 1.")
    options: dict[str, Any] = {"num_labels": shape.classes}  # which Transformers sets on every configuration
    config = DetrConfig(
        backbone_config=_backbone(backbone),
        **options,
        num_queries=queries,
        d_model=width,
        encoder_layers=depth,
        decoder_layers=depth,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=mlp,
        decoder_ffn_dim=mlp,
        dropout=float(dropout),
        auxiliary_loss=True,
    )
    try:
        model = Detr(DetrForObjectDetection(config))
    except Exception as error:  # what a backbone makes of its options
        raise ParameterError(f"Transformers could not build DETR with {backbone}: {first_line(error)}") from error
    if frozen:
        refuse_frozen_activations(backbone)
        freeze_stem(model)
    else:
        unfreeze(model)
    return model


def _backbone(name: str) -> Any:
    """The configuration of a backbone of timm, whose last stage becomes the keys."""
    import timm
    from transformers import TimmBackboneConfig

    if not timm.is_model(name):
        raise ParameterError(f"backbone is {name!r}, and timm has no such model.{suggestion(name, timm.list_models())}")
    options: dict[str, Any] = {"use_pretrained_backbone": False, "out_indices": [-1]}
    return TimmBackboneConfig(backbone=name, **options)


def unfreeze(model: Detr) -> None:
    """Give a model a backbone that is trained as a whole: Transformers freezes batch norms and first stages, which only
    trained weights can bear."""
    from transformers.backbone_utils import load_backbone

    fresh = load_backbone(model.detr.config)
    encoder = model.detr.model.backbone
    encoder.model = getattr(fresh, "_backbone", fresh)  # a model of timm inside of Transformers' own, as DETR has it


def freeze_stem(model: Detr) -> None:
    """Keep what a ResNet has before its second stage as it is, as published; other backbones are trained as a whole."""
    named = list(model.detr.model.backbone.model.named_parameters())
    if any(name.startswith("layer2.") for name, _ in named):
        for name, parameter in named:
            parameter.requires_grad_(name.startswith(("layer2.", "layer3.", "layer4.")))


def refuse_frozen_activations(backbone: str) -> None:
    """Raise where a batch norm has an activation in it, which Transformers' frozen ones do not have."""
    import timm
    from timm.layers.norm_act import BatchNormAct2d

    if any(isinstance(m, BatchNormAct2d) for m in timm.create_model(backbone).modules()):
        raise ParameterError(
            f"frozen is true, and timm's {backbone} has activations in its batch norms, which would be lost; leave "
            "frozen out, or take a ResNet."
        )
