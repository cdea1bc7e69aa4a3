"""Curves while runs go on: TensorBoard, trackio, Weights & Biases, and whatever other packages add."""

from attemper.lab.tracking.base import TrackedRun, Tracker
from attemper.lab.tracking.following import Follower, follow
from attemper.lab.tracking.registry import check_trackers, list_trackers, make_tracker

__all__ = ["Follower", "TrackedRun", "Tracker", "check_trackers", "follow", "list_trackers", "make_tracker"]
