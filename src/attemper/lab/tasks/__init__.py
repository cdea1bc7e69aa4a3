"""Tasks: data, split once and for all, with the test set behind one method."""

from attemper.lab.errors import DataError
from attemper.lab.tasks.augment import Augmentation, list_augmentations, parse_augmentation
from attemper.lab.tasks.base import ImageTask, InputShape, SequenceShape, Shape, Task
from attemper.lab.tasks.classification import Classification, Metrics
from attemper.lab.tasks.registry import data_root, list_tasks, open_task, prepare, verify
from attemper.lab.tasks.source import LazySource, MemorySource, Source
from attemper.lab.tasks.text import TextShape, TextSource

__all__ = [
    "Augmentation", "Classification", "DataError", "ImageTask", "InputShape", "LazySource", "MemorySource", "Metrics",
    "SequenceShape", "Shape", "Source", "Task", "TextShape", "TextSource", "data_root", "list_augmentations",
    "list_tasks", "open_task", "parse_augmentation", "prepare", "verify",
]  # fmt: skip
