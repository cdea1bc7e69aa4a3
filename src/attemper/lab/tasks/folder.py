"""Any folder of images with one subfolder per class."""

import dataclasses
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.source import LazySource, MemorySource, Source, found_under
from attemper.lab.tasks.split import FIXED, divide

TEST_FOLDERS = ("test", "val", "validation")
TEST_SHARE = 0.2
"""How much of a folder without a test part is held out as one, always the same images."""


def open_folder(
    name: str, path: str, root: Path, *, size: int = 64, train: int | None = None, test: int | None = None
) -> ImageTask:
    """The images of a folder, cut to their middle square and resized.

    path: the folder, relative to the data root or to where the program runs. Either it has class folders, and a
        fixed fifth of their images becomes the test set; or it has 'train' and 'test' (or 'val') with class folders.
    size: side of the images in pixels.
    """
    folder = found_under(root, path)
    part = next((each for each in TEST_FOLDERS if (folder / each).is_dir()), None)
    if (folder / "train").is_dir() and part is not None:
        training, held = ImageFolder(folder / "train", size), ImageFolder(folder / part, size)
        if training.classes != held.classes:
            odd = sorted(set(training.classes) ^ set(held.classes))
            raise DataError(f"'train' and '{part}' of '{folder}' have different classes; only one has {odd[0]!r}.")
        pool, rest = (lambda: training.source), (lambda: held.source)
        fingerprint = of_parts(training.fingerprint, held.fingerprint)
    else:
        training = ImageFolder(folder, size)
        kept, out = divide(training.targets, round(len(training.targets) * TEST_SHARE), FIXED)
        pool, rest = (lambda: training.source.take(kept)), (lambda: training.source.take(out))
        fingerprint = training.fingerprint
    return ImageTask(
        name=name,
        shape=InputShape(channels=3, height=size, width=size, classes=len(training.classes)),
        fingerprint=of_parts(fingerprint, str(size)),
        pool=pool,
        held_out=rest,
        classes=tuple(training.classes),
        train=train,
        test_images=test,
    )


@dataclasses.dataclass
class ImageFolder:
    """A folder with one subfolder of image files per class, at any depth inside of it."""

    folder: Path
    size: int

    @cached_property
    def classes(self) -> list[str]:
        names = sorted(each.name for each in self.folder.iterdir() if each.is_dir() and not each.name.startswith("."))
        if len(names) < 2:
            raise DataError(f"'{self.folder}' has {len(names)} class folders; there must be at least 2, one per class.")
        return names

    @cached_property
    def files(self) -> list[tuple[Path, int]]:
        from torchvision.datasets.folder import IMG_EXTENSIONS

        found = []
        for index, name in enumerate(self.classes):
            inside = sorted(each for each in (self.folder / name).rglob("*") if each.suffix.lower() in IMG_EXTENSIONS)
            if not inside:
                endings = ", ".join(IMG_EXTENSIONS)
                raise DataError(f"The class folder '{self.folder / name}' has no image in it (looked for {endings}).")
            found += [(file, index) for file in inside]
        return found

    @property
    def targets(self) -> Tensor:
        return torch.tensor([target for _, target in self.files])

    @property
    def fits(self) -> bool:
        return len(self.files) * 3 * self.size**2 <= source.MEMORY_LIMIT

    @cached_property
    def fingerprint(self) -> str:
        """Of names and contents where the images are held in memory; of names and sizes where that would take long."""
        parts: list[str | bytes] = []
        for file, target in self.files:
            contents = file.read_bytes() if self.fits else str(file.stat().st_size)
            parts += [f"{target} {file.relative_to(self.folder).as_posix()}", contents]
        return of_parts(*parts)

    @cached_property
    def source(self) -> Source:
        if not self.fits:
            return LazySource(self.load, self.targets)
        images = torch.stack([self.load(index) for index in range(len(self.files))])
        return MemorySource(images, self.targets)

    def load(self, index: int) -> Tensor:
        file = self.files[index][0]
        try:
            return source.decode(file, self.size)
        except OSError as error:
            raise DataError(f"'{file}' is not an image that can be read: {error}") from None
