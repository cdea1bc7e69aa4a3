"""One small random model of every family that Attemper promises to work on, with an input that it takes.

Nothing is downloaded. Every model has its own dropout switched off, so that whatever differs between two training
passes is Attemper's doing.
"""

from families.base import Family, Inputs, build, call, image, noise, pixels
from families.lab_models import LAB
from families.outside_models import OUTSIDE
from families.timm_models import TIMM, VIT, timm_model
from families.torch_models import OTHERS, HandWritten, HandWrittenModel, SelfAttention
from families.transformers_models import HF_IMAGE, MET_OTHERWISE, TRANSFORMERS, build_detr, hf

__all__ = [
    "FAMILIES",
    "HF_IMAGE",
    "LAB",
    "MET_OTHERWISE",
    "OTHERS",
    "OUTSIDE",
    "RECOGNISED",
    "TIMM",
    "TRANSFORMERS",
    "VIT",
    "Family",
    "HandWritten",
    "HandWrittenModel",
    "Inputs",
    "SelfAttention",
    "build",
    "build_detr",
    "call",
    "family",
    "hf",
    "image",
    "noise",
    "pixels",
    "timm_model",
]

RECOGNISED = [*TIMM, *TRANSFORMERS, *OTHERS, *LAB[:2], MET_OTHERWISE[0]]
"""Families whose sites are known by their names and their code alone."""
FAMILIES = [*RECOGNISED, *LAB[2:], *MET_OTHERWISE[1:], *OUTSIDE]


def family(name: str) -> Family:
    """The family of this name."""
    return next(family for family in FAMILIES if family.name == name)
