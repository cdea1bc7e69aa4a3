"""Attention under any set of perturbations: one reference, fast implementations beside it, one random stream."""

from attemper.ops.attention import Verdict, attention, implementations
from attemper.ops.perturbation import Perturbation
from attemper.ops.seed import draw_seed
from attemper.ops.stream import Stream, keep_mask

__all__ = ["Perturbation", "Stream", "Verdict", "attention", "draw_seed", "implementations", "keep_mask"]
