"""Evaluation: how accurate, how well calibrated and how robust a model is."""
