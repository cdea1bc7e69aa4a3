"""Curves while runs go on: TensorBoard, trackio, Weights & Biases, and whatever other packages add."""

from attemper.lab.tracking.base import TrackedRun, Tracker
from attemper.lab.tracking.registry import check_trackers, list_trackers, make_tracker

__all__ = ["TrackedRun", "Tracker", "check_trackers", "list_trackers", "make_tracker"]
