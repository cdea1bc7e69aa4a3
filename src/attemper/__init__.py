"""Attemper regularises attention in any PyTorch transformer, and shows whether it helped."""

from attemper import errors, methods
from attemper.methods.registry import list_methods
from attemper.ops import attention, implementations, keep_mask
from attemper.probes import diagnose
from attemper.recipe import parse, render
from attemper.tempering import Tempered, apply

__version__ = "0.1.0"

__all__ = [
    "Tempered",
    "apply",
    "attention",
    "diagnose",
    "errors",
    "implementations",
    "keep_mask",
    "list_methods",
    "methods",
    "parse",
    "render",
]
