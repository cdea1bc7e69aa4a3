"""Models: the small ones of the papers, and those of timm and Transformers, by name."""

from attemper.lab.models.registry import build_model, list_models

__all__ = ["build_model", "list_models"]
