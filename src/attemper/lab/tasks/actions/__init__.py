"""Actions in videos: sequences of features, one vector per step, with annotated segments."""

from attemper.lab.tasks.actions.opening import open_actions
from attemper.lab.tasks.actions.planted import open_planted
from attemper.lab.tasks.actions.task import ActionTask

__all__ = ["ActionTask", "open_actions", "open_planted"]
