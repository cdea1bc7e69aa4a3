"""Image classification on data that is too large to be held in memory, or to be looked through before training."""

import dataclasses
import importlib.util

from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.classification import Classification
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.normalising import NORMALISATIONS, Normalisation
from attemper.lab.tasks.split import FIXED
from attemper.lab.tasks.streaming.order import Selection
from attemper.lab.tasks.streaming.pixels import Preparation
from attemper.lab.tasks.streaming.source import Store, StreamSource


def need(what: str, library: str) -> None:
    """See that what reads large data sets is there. what: a few words for those that `library` reads."""
    for module in (library, "timm"):
        if importlib.util.find_spec(module) is None:
            raise DataError(
                f"{what} are read with {library} and timm, and {module} is not installed: pip install "
                "'attemper[stream]'"
            )


@dataclasses.dataclass
class StreamTask(Classification):
    """Images with one class each, decoded while training runs.

    pool: the training set, out of which training and validation part are split. held_out: the test set.
    """

    name: str
    shape: InputShape
    fingerprint: str
    pool: StreamSource
    held_out: StreamSource
    classes: tuple[str, ...]
    primary: str = "accuracy"
    normalise: Normalisation = NORMALISATIONS["imagenet"]

    def split(self, seed: int, validation: float) -> tuple[StreamSource, StreamSource]:
        """Training and validation part, a function of the seed; see `Selection.divide`."""
        held = round(len(self.pool) * validation)
        if not 0 < held < len(self.pool):
            raise DataError(
                f"'{self.name}' has {len(self.pool)} training samples; a share of {validation:g} for validation leaves "
                "one of the parts empty."
            )
        kept, out = self.pool.selection.divide(held, seed)
        return tuple(dataclasses.replace(self.pool, selection=each) for each in (kept, out))  # type: ignore[return-value]

    def test(self) -> StreamSource:
        return self.held_out

    def to_input(self, stored: Tensor) -> Tensor:
        """uint8 (B, 3, H, W) → float32, with ImageNet's mean and deviation taken out unless others are asked for."""
        return self.normalise(stored)


def open_parts(
    name: str,
    training: tuple[Store, Selection],
    held_out: tuple[Store, Selection],
    *,
    size: int,
    crop: float,
    classes: tuple[str, ...],
    fingerprint: str,
    train: int | None,
    test: int | None,
) -> StreamTask:
    """A task out of two stores. train, test: how many samples to keep, always the same ones."""
    if isinstance(crop, bool) or not isinstance(crop, int | float) or not 0 < crop <= 1:
        raise ParameterError(
            f"'{name}': crop is {crop!r}; it must be a share of the shorter side, above 0 and up to 1."
        )
    preparation = Preparation(size, float(crop))

    def source(part: tuple[Store, Selection], limit: int | None, which: str) -> StreamSource:
        store, selection = part
        if limit is not None and limit > len(selection):
            raise DataError(f"'{name}' asks for {limit} {which} images, and there are {len(selection)}.")
        if limit is not None and limit < len(selection):
            selection = selection.divide(limit, FIXED, exactly=True)[1]
        return StreamSource(store, selection, preparation)

    return StreamTask(
        name=name,
        shape=InputShape(channels=3, height=size, width=size, classes=len(classes)),
        fingerprint=of_parts(fingerprint, repr((size, float(crop), train, test))),
        pool=source(training, train, "training"),
        held_out=source(held_out, test, "test"),
        classes=classes,
    )
