"""Any folder of images: one subfolder per class, or classes in the names of the files."""

import dataclasses
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.broken import Broken, reason_of, settle, shown
from attemper.lab.tasks.fingerprint import of_parts, of_tensors
from attemper.lab.tasks.holding_out import check_no_class_is_lost, copies_of, divide_files, groups_of
from attemper.lab.tasks.image_files import IMAGES, Examined, examine
from attemper.lab.tasks.listing import Listing, list_folder
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.scan_files import look_through
from attemper.lab.tasks.source import LazySource, MemorySource, Source, found_under


def open_folder(
    name: str,
    path: str,
    root: Path,
    *,
    size: int = 64,
    label: str | None = None,
    broken: Broken = "refuse",
    train: int | None = None,
    test: int | None = None,
) -> ImageTask:
    """The images of a folder, cut to their middle square and resized.

    path: the folder, relative to the data root or to where the program runs. Either it has class folders, and a
        fixed fifth of their images becomes the test set; or it has 'train' and 'test' (or 'val') with class folders.
    size: side of the images in pixels.
    label: how the names of the files tell their class, such as '{label}_*.jpg', where there are no class folders.
    broken: what becomes of files that cannot be decoded: refuse, or skip.
    """
    listing = list_folder(found_under(root, path), IMAGES, label, broken)
    return open_listing(name, listing, root, size=size, broken=broken, train=train, test=test)


def open_listing(
    name: str, listing: Listing, root: Path, *, size: int, broken: Broken, train: int | None, test: int | None
) -> ImageTask:
    """The images of a list of files, cut to their middle square and resized."""
    images = FolderImages(listing, size, examine(list(map(listing.path, range(len(listing.items)))), root))
    problems = {listing.items[index].name: reason for index, reason in images.examined.problems.items()}
    notes = (
        *listing.notes,
        *settle(problems, len(listing.items), f"images in '{listing.folder}'", broken),
        *images.notes,
    )
    check_no_class_is_lost(listing, images.examined.problems)
    for each in notes:
        note(each)
    return ImageTask(
        name=name,
        shape=InputShape(channels=3, height=size, width=size, classes=len(listing.classes)),
        fingerprint=images.fingerprint,
        pool=lambda: images.source(images.training),
        held_out=lambda: images.source(images.test),
        classes=listing.classes,
        train=train,
        test_images=test,
        notes=notes,
    )


@dataclasses.dataclass
class FolderImages:
    """The images of a listing that can be decoded, resized to a square.

    The test set is chosen from all files, whether or not they can be decoded: if one breaks, the others stay where they
    were.
    """

    listing: Listing
    size: int
    examined: Examined

    @cached_property
    def groups(self) -> Tensor | None:
        return groups_of(self.listing, self.examined.equal)

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor, list[str]]:
        kept, held, notes = divide_files(self.listing, self.groups, IMAGES)
        good = torch.ones(len(self.listing.items), dtype=torch.bool)
        good[list(self.examined.problems)] = False
        return kept[good[kept]], held[good[held]], notes

    @property
    def training(self) -> Tensor:
        return self._split[0]

    @property
    def test(self) -> Tensor:
        return self._split[1]

    @property
    def notes(self) -> list[str]:
        """What a user should know, in sentences."""
        turned = self.examined.turned
        found = [f"Images that are turned upright, as their EXIF data say: {turned:,}."] if turned else []
        return [*found, *copies_of(self.listing, self.examined.equal), *self._split[2]]

    @property
    def targets(self) -> Tensor:
        return torch.tensor([item.target for item in self.listing.items])

    @property
    def fits(self) -> bool:
        return len(self.listing.items) * 3 * self.size**2 <= source.MEMORY_LIMIT

    @cached_property
    def fingerprint(self) -> str:
        """Of names and contents where the images are held in memory; of names and sizes where that would take long.

        Of files that are skipped, of the name. Of groups, if there are any.
        """
        parts = [self._fingerprint_of(held) for held in sorted({item.held for item in self.listing.items}, key=bool)]
        whole = parts[0] if len(parts) == 1 else of_parts(*parts)
        more = [f"skipped {self.listing.items[index].name}" for index in sorted(self.examined.problems)]
        more += ["upright"] * bool(self.examined.turned)
        if self.groups is not None:
            more.append(of_tensors(self.groups))
        return of_parts(whole, str(self.size), *more)

    def _fingerprint_of(self, held: bool | None) -> str:
        parts: list[str | bytes] = []
        for index, item in enumerate(self.listing.items):
            if item.held is not held or index in self.examined.problems:
                continue
            file = self.listing.path(index)
            name = item.name if held is None else item.name.partition("/")[2]
            try:
                contents = file.read_bytes() if self.fits else str(file.stat().st_size)
            except OSError as error:
                raise _unreadable(file, error) from None
            parts += [f"{item.target} {name}", contents]
        return of_parts(*parts)

    def source(self, indices: Tensor) -> Source:
        """Some of the files, by their places in the listing."""
        targets, groups = self.targets[indices], source.chosen(self.groups, indices)
        load = Loader([self.listing.path(index) for index in indices.tolist()], self.size)
        if not self.fits:
            return LazySource(load, targets, groups=groups)
        pixels = look_through("decoding images", range(len(load.files)), load)
        empty = torch.empty(0, 3, self.size, self.size, dtype=torch.uint8)
        return MemorySource(torch.stack(pixels) if pixels else empty, targets, groups=groups)


@dataclasses.dataclass
class Loader:
    """Number of a file → its image, uint8 (3, size, size). Goes to worker processes, so it can be pickled."""

    files: list[Path]
    size: int

    def __call__(self, index: int) -> Tensor:
        file = self.files[index]
        try:
            return source.decode(file, self.size, turn=True)
        except Exception as error:  # it was whole when it was examined; what Pillow raises depends on the format
            raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"'{shown(str(file))}' is not an image that can be read: {reason_of(error, file)}.")
