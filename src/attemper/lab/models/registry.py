"""From the text that names a model to the model."""

import functools
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from attemper.errors import ParameterError, suggestion
from attemper.lab.call_syntax import check_options, is_own, parse_call
from attemper.lab.entry_points import added, find_added
from attemper.lab.models.anchor_detr import anchor_detr
from attemper.lab.models.ceit import ceit
from attemper.lab.models.convmixer import convmixer
from attemper.lab.models.detr import detr
from attemper.lab.models.encoder import encoder
from attemper.lab.models.libraries import from_timm, from_transformers
from attemper.lab.models.limits import limited
from attemper.lab.models.localvit import localvit
from attemper.lab.models.naming import is_pretrained
from attemper.lab.models.own import build_own
from attemper.lab.models.resnet import resnet
from attemper.lab.models.segmentation import (
    SEGFORMERS,
    segformer,
    segmenter_from_timm,
    segmenter_from_transformers,
    segvit,
)
from attemper.lab.models.starting import start_from
from attemper.lab.models.t2t_vit import t2t_vit
from attemper.lab.models.trained import library_weights
from attemper.lab.models.translation import seq2seq
from attemper.lab.models.two_stream import two_stream
from attemper.lab.models.vilt import vilt
from attemper.lab.models.vit import vit, vit_digits
from attemper.lab.models.vit_mae import vit_mae
from attemper.lab.tasks.base import InputShape, SequenceShape, Shape
from attemper.lab.tasks.boxes.shape import BoxShape
from attemper.lab.tasks.mae.shape import MaskedShape
from attemper.lab.tasks.segmentation.task import MaskShape
from attemper.lab.tasks.text import TextShape
from attemper.lab.tasks.vqa.shape import QuestionShape

Fitting = TypeVar("Fitting")
GROUP = "attemper.models"
"""The entry point of other packages' models: functions of the task's shape."""


def _vit(width: int, depth: int, heads: int, mlp: int) -> Callable[..., nn.Module]:
    return functools.partial(vit, width=width, depth=depth, heads=heads, mlp=mlp)


def _t2t_vit(depth: int, width: int, heads: int, mlp: int) -> tuple[Callable[..., nn.Module], type, str]:
    builder = functools.partial(t2t_vit, width=width, depth=depth, heads=heads, mlp=mlp)
    return builder, InputShape, f"T2T-ViT-{depth}: width {width}, {heads} heads, MLP {mlp}"


VIT_CIFAR = "7 blocks, width 384, 12 heads, MLP 384: for CIFAR, most likely as explicit dropout has it"
Shapes = type | tuple[type, ...]
OWN: dict[str, tuple[Callable[..., nn.Module], Shapes, str]] = {
    "vit-digits": (
        vit_digits,
        InputShape,
        "4 blocks, width 32, 4 heads, 2 × 2 patches: learns 8 × 8 digits in seconds",
    ),
    "vit-cifar": (_vit(384, 7, 12, 384), InputShape, VIT_CIFAR),
    "vit-tiny": (_vit(192, 12, 3, 768), InputShape, "ViT-Ti for small images: 12 blocks, width 192, 3 heads"),
    "vit-small": (_vit(384, 12, 6, 1536), InputShape, "ViT-S for small images: 12 blocks, width 384, 6 heads"),
    "vit-base": (_vit(768, 12, 12, 3072), InputShape, "ViT-B for small images: 12 blocks, width 768, 12 heads"),
    "t2t-vit": (t2t_vit, InputShape, "overlapping patches of tokens become tokens; T2T-ViT-7 without options"),
    "t2t-vit-7": _t2t_vit(7, 256, 4, 512),
    "t2t-vit-10": _t2t_vit(10, 256, 4, 512),
    "t2t-vit-12": _t2t_vit(12, 256, 4, 512),
    "t2t-vit-14": _t2t_vit(14, 384, 6, 1152),
    "t2t-vit-19": _t2t_vit(19, 448, 7, 1344),
    "t2t-vit-24": _t2t_vit(24, 512, 8, 1536),
    "ceit": (ceit, InputShape, "a convolutional stem, and convolutions in the MLPs; CeiT-T without options"),
    "ceit-tiny": (functools.partial(ceit, width=192, heads=3), InputShape, "CeiT-T: 12 blocks, width 192, 3 heads"),
    "ceit-small": (functools.partial(ceit, width=384, heads=6), InputShape, "CeiT-S: 12 blocks, width 384, 6 heads"),
    "localvit": (localvit, InputShape, "convolutions in the MLPs, of the patches alone; LocalViT-T without options"),
    "localvit-tiny": (
        functools.partial(localvit, width=192, heads=4),
        InputShape,
        "LocalViT-T: 12 blocks, width 192, 4 heads",
    ),
    "localvit-small": (
        functools.partial(localvit, width=384, heads=8),
        InputShape,
        "LocalViT-S: 12 blocks, width 384, 8 heads",
    ),
    "convmixer": (convmixer, InputShape, "no attention at all; its two kinds of skip connection can be left out"),
    "resnet": (resnet, InputShape, "the CIFAR ResNet: 20 layers, width 16; its skip connections can be left out"),
    "encoder": (
        encoder,
        SequenceShape,
        "for sequences of features: 2 blocks, width 256, 8 heads, class token first or last",
    ),
    "encoder-thumos": (
        functools.partial(encoder, width=1024, token="last"),
        SequenceShape,
        "2 blocks, width 1024, 8 heads, class token last: for THUMOS14, most likely as explicit dropout has it",
    ),
    "anchor-detr": (
        anchor_detr,
        BoxShape,
        "small, for boxes and little data: 3 + 3 layers, width 128, every place of the image is a query",
    ),
    "detr": (detr, BoxShape, "Transformers' DETR for boxes: ResNet-18 or any backbone, 6 + 6 layers, width 256"),
    "segvit-shapes": (
        functools.partial(segvit, width=48, depth=4, heads=4, mlp=96, patch=4),
        MaskShape,
        "a class for every pixel: 4 blocks, width 48, 4 × 4 patches: learns made-up shapes in seconds",
    ),
    "segvit": (segvit, MaskShape, "a class for every pixel: a ViT with a linear head, or head=upernet; ViT-Ti's size"),
    **{
        f"segformer-{kind}": (
            functools.partial(segformer, kind=kind),
            MaskShape,
            f"Transformers' SegFormer-{kind.upper()}",
        )
        for kind in SEGFORMERS
    },
    "seq2seq": (seq2seq, TextShape, "encoder and decoder for translation: 6 layers each, width 512, 8 heads"),
    "vit-mae": (
        vit_mae,
        (MaskedShape, InputShape),
        "Transformers' ViT-MAE for masked pre-training, and a classifier of its encoder: 12 blocks, width 192, 3 heads",
    ),
    "two-stream": (two_stream, QuestionShape, "for questions about images: the question looks at patches; width 64"),
    "vilt": (vilt, QuestionShape, "Transformers' ViLT for questions about images: 12 blocks, width 768, 12 heads"),
}

LIBRARIES = {
    "timm:NAME": "any model of timm, such as timm:vit_tiny_patch16_224(patch_size=4)",
    "hf:TYPE": "an image classifier of Transformers by model type, such as hf:vit(patch_size=4, num_hidden_layers=6)",
    "MODULE:FUNCTION": "what a function of your own returns, in an installed module or one of the current directory",
    "hf:OWNER/NAME": "a trained image classifier of the Hugging Face hub, or of a folder with its files",
}


def list_models() -> dict[str, str]:
    """Every model's name, with a line about it."""
    return {name: line for name, (_, _, line) in OWN.items()} | LIBRARIES | added(GROUP)


def build_model(text: str, shape: Shape, *, trained: bool = True) -> nn.Module:
    """A new model for inputs of a shape; its weights come from torch's generator, and from a library where asked for.

    text: a name of `list_models()`, with options in call form.
    trained: load the weights that `pretrained=true` or `hf:OWNER/NAME` ask for; without, only the model is built.

    >>> shape = InputShape(channels=1, height=8, width=8, classes=10)
    >>> model = build_model("vit-digits(depth=2)", shape)
    >>> len(model.blocks)
    2
    """
    with limited(text):
        model = _build(text, shape)
    if trained and is_pretrained(text):
        start_from(model, library_weights(text), source=f"the trained weights of '{text}'", classes=shape.classes)
    return model


def _build(text: str, shape: Shape) -> nn.Module:
    name, options = parse_call(text)
    if make := find_added(GROUP, name, own=(*OWN, *LIBRARIES), takes=("shape",), gives=nn.Module):
        check_options(text, functools.partial(make, shape), options)
        return make(shape, **options)
    library, _, rest = name.partition(":")
    if library in ("timm", "hf") and not isinstance(options.pop("pretrained", True), bool):
        raise ParameterError(f"'{text}': pretrained must be true or false.")
    if isinstance(shape, MaskShape) and library == "timm" and rest:
        return segmenter_from_timm(rest, shape, options)
    if isinstance(shape, MaskShape) and library == "hf" and rest:
        return segmenter_from_transformers(rest, shape, options)
    if library == "timm" and rest:
        return from_timm(rest, _fitting(text, shape, InputShape), options)
    if library == "hf" and rest:
        return from_transformers(rest, _fitting(text, shape, InputShape), options)
    if is_own(text):
        return build_own(text, shape)
    if name not in OWN:
        known = list_models()
        raise ParameterError(f"There is no model '{name}'.{suggestion(name, known)} There are: {', '.join(known)}.")
    builder, takes, _ = OWN[name]
    check_options(text, builder, options, given=("shape",))
    return builder(_fitting(text, shape, takes), **options)


def _fitting(model: str, shape: Shape, takes: type[Fitting] | tuple[type[Fitting], ...]) -> Fitting:
    """The shape, if the model takes such inputs."""
    if isinstance(shape, takes):
        return shape
    others = [name for name, (_, kind, _) in OWN.items() if isinstance(shape, kind)]
    raise ParameterError(
        f"'{model}' does not take inputs of {shape}. These models do: {', '.join(others) or 'none yet'}."
    )
