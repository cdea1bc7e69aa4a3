"""Tasks: data, split once and for all, with the test set behind one door."""

from attemper.tasks.augment import Augmentation, list_augmentations, parse_augmentation
from attemper.tasks.base import ImageTask, InputShape, SequenceShape, Shape, Task
from attemper.tasks.classification import Classification, Metrics
from attemper.tasks.errors import DataError
from attemper.tasks.opening import data_root, list_tasks, open_task, prepare, verify
from attemper.tasks.source import LazySource, MemorySource, Source
from attemper.tasks.text import TextShape, TextSource

__all__ = [
    "Augmentation",
    "Classification",
    "DataError",
    "ImageTask",
    "InputShape",
    "LazySource",
    "MemorySource",
    "Metrics",
    "SequenceShape",
    "Shape",
    "Source",
    "Task",
    "TextShape",
    "TextSource",
    "data_root",
    "list_augmentations",
    "list_tasks",
    "open_task",
    "parse_augmentation",
    "prepare",
    "verify",
]
