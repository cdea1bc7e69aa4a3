"""Actions in videos: sequences of features, one vector per step, with annotated segments."""

from attemper.tasks.actions.opening import open_actions
from attemper.tasks.actions.planted import open_planted
from attemper.tasks.actions.task import ActionTask

__all__ = ["ActionTask", "open_actions", "open_planted"]
