"""Tempering: methods meet the sites of a model, act there, and are taken off again."""

from attemper.tempering.applying import apply
from attemper.tempering.handle import PenaltyRow, Row, Tempered
from attemper.tempering.loading import load

__all__ = ["PenaltyRow", "Row", "Tempered", "apply", "load"]
