"""A Hugging Face data set that is prepared on disk as a store: timm's reader of them finds any sample by its number."""

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.fingerprint import of_parts, of_tensors
from attemper.lab.tasks.streaming.order import Selection
from attemper.lab.tasks.streaming.rowgroups import no_class
from attemper.lab.tasks.streaming.tars import UNIT


@dataclasses.dataclass
class ArrowStore:
    """One split of a data set in the cache of Hugging Face's library, mapped into memory."""

    name: str
    split: str
    image: str
    label: str

    @cached_property
    def reader(self) -> Any:
        from timm.data.readers.reader_hfds import ReaderHfds

        try:  # the class itself: timm's factory turns names, and so paths, into lower case
            return ReaderHfds(self.name, split=self.split, input_key=self.image, target_key=self.label)
        except Exception as error:  # many kinds, of files, of names and of networks
            raise DataError(
                f"timm's reader of Hugging Face data sets cannot open the split '{self.split}' of '{self.name}' with "
                f"the columns '{self.image}' and '{self.label}': {type(error).__name__}: {error}"
            ) from error

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """As the data set has them; none: it has numbers only."""
        names = getattr(self.reader.dataset.features[self.label], "names", None)
        return None if names is None else tuple(names)

    @property
    def fingerprint(self) -> str:
        """Of the number of bytes, and of all classes in their order."""
        return of_parts(self.split, str(self.reader.split_info.num_bytes), of_tensors(self.labels()))

    @property
    def selection(self) -> Selection:
        starts = np.arange(0, len(self.reader), UNIT)
        return Selection(starts, np.diff(starts, append=len(self.reader)))

    def hand_out(self, samples: Tensor) -> list[Any]:
        return samples.tolist()

    def fetch(self, item: int) -> tuple[bytes, int]:
        try:
            opened, label = self.reader[item]
            with opened:
                data: bytes = opened.read()
        except (OSError, AssertionError) as error:  # the latter where there is neither an image nor the name of a file
            raise DataError(f"{self.where(item)} has no image that can be read in '{self.image}': {error}") from None
        return data, int(label)

    def check_classes(self, classes: int) -> None:
        """Raise if a sample has none of so many classes."""
        labels = self.labels()
        wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten()
        if len(wrong):
            raise no_class(self.where(int(wrong[0])), int(labels[wrong[0]]), self.label, classes)

    def where(self, item: int) -> str:
        return f"Sample {item} of the split '{self.split}' of '{self.name}'"

    def labels(self) -> Tensor:
        column = self.reader.dataset.select_columns([self.label]).with_format("arrow")[:][self.label]
        return torch.from_numpy(column.fill_null(-1).to_numpy().astype(np.int64))
