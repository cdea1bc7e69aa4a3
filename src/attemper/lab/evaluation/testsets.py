"""Test sets in folder form with other labels than a plain folder has: ImageNet-V2, -A, -R, and ReaL.

Images are decoded while they are evaluated. Files that cannot be decoded are skipped, counted and named.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.errors import UnreadableError, first_line
from attemper.files import read_json
from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.evaluation.attacks import at_rest
from attemper.lab.evaluation.measure import Network, to_pixels
from attemper.lab.evaluation.metrics import Tally, check_targets
from attemper.lab.evaluation.wordnet import WORDNET
from attemper.lab.tasks.sample_files import files_below, subfolders
from attemper.lab.tasks.source import decode

NAMED = 10
"""At most so many skipped files are named."""
Decode = Callable[[Path], Tensor]
"""An image file → uint8 (C, H, W)."""


@dataclass
class TestSet:
    """Image files, each with the classes that are right for it."""

    __test__ = False  # no test of pytest's

    name: str
    files: list[Path]
    labels: list[tuple[int, ...]]
    """One class each, or with ReaL labels several, any of which is right."""
    decode: Decode
    subset: tuple[int, ...] | None = None
    """The only classes among which the model chooses; none: all."""
    left_out: int = 0
    """Images that the labels leave out."""
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    """Files that could not be decoded, with the reason, after the set was read."""

    @property
    def single(self) -> bool:
        """Whether every image has one right class: only then are probabilities of classes meaningful."""
        return all(len(labels) == 1 for labels in self.labels)

    def batches(self, size: int) -> Iterator[tuple[Tensor, list[tuple[int, ...]]]]:
        """Images uint8 (B, C, H, W) with their classes; what cannot be decoded is noted in `skipped`."""
        self.skipped = []
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for start in range(0, len(self.files), size):
                files = self.files[start : start + size]
                images = list(pool.map(self._read, files))
                kept = [at for at, image in enumerate(images) if isinstance(image, Tensor)]
                self.skipped += [(files[at], image) for at, image in enumerate(images) if isinstance(image, str)]
                if kept:
                    read: list[Any] = [images[at] for at in kept]
                    yield torch.stack(read), [self.labels[start + at] for at in kept]
        if len(self.skipped) == len(self.files):
            file, reason = self.skipped[0]
            every = counted(len(self.files), "image")
            raise DataError(f"Of {every} of {self.name}, none can be decoded; '{file}', for one: {reason}")

    def _read(self, file: Path) -> Tensor | str:
        try:
            return self.decode(file)
        except (UnreadableError, OSError, SyntaxError, ValueError) as error:  # another decoder's, too
            return first_line(error)


def open_imagenet_v2(
    folder: str | Path, *, size: int = 224, classes: int = 1000, decode: Decode | None = None
) -> TestSet:
    """A folder with one subfolder per class, called by its number: 0, 1, …, 999.

    Sorted as words, 10 would come before 2; here the name is the class.
    size: side of the images; their middle square is resized, as for `folder:` tasks. decode: do something else instead.
    classes: how many the model has.
    """
    folder = _existing(folder)
    files: list[Path] = []
    labels: list[tuple[int, ...]] = []
    for part in _subfolders(folder):
        if not part.name.isdigit():
            raise DataError(
                f"'{part}' is not called by a number; ImageNet-V2 has the folders 0 to {classes - 1}, one per class."
            )
        if int(part.name) >= classes:
            raise DataError(f"'{part}' is class {int(part.name)}, and the model has {classes}: 0 to {classes - 1}.")
        found = _images(part)
        files += found
        labels += [(int(part.name),)] * len(found)
    return _test_set("ImageNet-V2", folder, files, labels, size, decode)


def open_imagenet_subset(
    folder: str | Path,
    wordnet: Sequence[str],
    *,
    name: str = "ImageNet subset",
    size: int = 224,
    decode: Decode | None = None,
) -> TestSet:
    """A folder with one subfolder per WordNet id, as ImageNet-A and ImageNet-R have for 200 of the 1000 classes.

    wordnet: the ids of the model's classes, in the order of its outputs; see `wordnet_ids`. The model chooses among the
        classes of the folder only, as is the custom with these sets.
    """
    folder = _existing(folder)
    number = {word: index for index, word in enumerate(wordnet)}
    files: list[Path] = []
    labels: list[tuple[int, ...]] = []
    for part in _subfolders(folder):
        if not WORDNET.fullmatch(part.name):
            raise DataError(f"'{part}' is not called by a WordNet id such as n01440764; {name} has one folder per id.")
        if part.name not in number:
            raise DataError(f"'{part}' is none of the model's {len(number)} classes.")
        found = _images(part)
        files += found
        labels += [(number[part.name],)] * len(found)
    opened = _test_set(name, folder, files, labels, size, decode)
    opened.subset = tuple(sorted({label for right in labels for label in right}))
    return opened


def open_real(
    folder: str | Path, labels: str | Path, *, size: int = 224, classes: int = 1000, decode: Decode | None = None
) -> TestSet:
    """ImageNet's validation images with the labels of Beyer et al., Are we done with ImageNet?, 2020.

    folder: the images, at any depth, in the order of their file names (ILSVRC2012_val_00000001.JPEG, …).
    labels: a JSON file with one list of classes per image. Images with an empty list are left out.
    """
    folder, path = _existing(folder), Path(labels).expanduser()
    files = sorted(_images(folder), key=lambda file: file.name)
    given = _real_labels(path, classes)
    if len(given) != len(files):
        raise DataError(f"'{path}' has labels for {len(given)} images, and '{folder}' has {len(files)}.")
    kept = [at for at, each in enumerate(given) if each]
    if not kept:
        raise DataError(f"'{path}' leaves every image without a label.")
    found = [files[at] for at in kept], [given[at] for at in kept]
    opened = _test_set("ImageNet ReaL", folder, *found, size, decode)
    opened.left_out = len(given) - len(kept)
    return opened


def _real_labels(path: Path, classes: int) -> list[tuple[int, ...]]:
    try:
        given = read_json(path)
    except UnreadableError as error:
        raise DataError(f"The labels cannot be read: {error}") from None
    if not isinstance(given, list):
        raise DataError(f"'{path}' must hold a list with one list of classes per image, such as [[0], [], [3, 7]].")
    for at, each in enumerate(given):
        fine = isinstance(each, list) and all(isinstance(k, int) and 0 <= k < classes for k in each)
        if not fine:
            raise DataError(
                f"'{path}', image {at}: the labels are {each!r}; they must be a list of 0 to {classes - 1}."
            )
    return [tuple(each) for each in given]


def _existing(folder: str | Path) -> Path:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(f"'{path}' is not a folder.")
    return path


def _subfolders(folder: Path) -> list[Path]:
    found = subfolders(folder)
    if not found:
        raise DataError(f"'{folder}' has no subfolders; there must be one per class.")
    return found


def _images(folder: Path) -> list[Path]:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return files_below(folder, IMG_EXTENSIONS)


def _test_set(
    name: str, folder: Path, files: list[Path], labels: list[tuple[int, ...]], size: int, how: Decode | None
) -> TestSet:
    if not files:
        raise DataError(f"'{folder}' has no images in it.")
    return TestSet(name, files, labels, how or partial(decode, size=size))


def evaluate_test_set(
    model: torch.nn.Module,
    test_set: TestSet,
    *,
    normalise: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 256,
) -> dict[str, Any]:
    """Accuracy on a test set, and calibration where every image has one class; as plain data.

    With ReaL labels a prediction is right if it is one of the image's classes.
    normalise: pixels in [0, 1] → what the model takes; none: pixels themselves.
    """
    network, tally, correct, seen = Network(model, normalise), Tally(), 0, 0
    subset = None if test_set.subset is None else torch.tensor(test_set.subset)
    with at_rest(model), torch.no_grad():
        for stored, labels in test_set.batches(batch_size):
            logits = network.logits(to_pixels(stored.to(network.device)))
            check_targets(torch.tensor([each for right in labels for each in right]), logits.shape[1])
            rights = labels
            if subset is not None:
                logits = logits[:, subset.to(logits.device)]
                rights = [tuple(int(torch.searchsorted(subset, each)) for each in right) for right in labels]
            predicted = logits.argmax(1).tolist()
            correct += sum(p in right for p, right in zip(predicted, rights, strict=True))
            seen += len(labels)
            if test_set.single:
                tally.add(logits.double().softmax(-1), torch.tensor([right[0] for right in rights]))
    found: dict[str, Any] = {"name": test_set.name, "images": seen, "accuracy": correct / seen}
    if test_set.single:
        found |= {name: value for name, value in tally.read().items() if name not in ("images", "accuracy")}
    skipped = {"count": len(test_set.skipped), "files": [file.name for file, _ in test_set.skipped[:NAMED]]}
    return {**found, "left_out": test_set.left_out, "skipped": skipped}
