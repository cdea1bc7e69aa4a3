"""Data sets of a million images and more: WebDataset shards and Hugging Face data sets, read while training runs."""

from attemper.lab.tasks.streaming.hf import open_hf
from attemper.lab.tasks.streaming.source import StreamSource
from attemper.lab.tasks.streaming.task import StreamTask
from attemper.lab.tasks.streaming.wds import open_wds

__all__ = ["StreamSource", "StreamTask", "open_hf", "open_wds"]
