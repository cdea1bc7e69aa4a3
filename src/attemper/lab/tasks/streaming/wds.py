"""`wds:PATH`: tar files in WebDataset's layout, found and described by timm's reader of them."""

import contextlib
import dataclasses
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attemper.errors import UnreadableError, first_line, quoted, shown
from attemper.files import read_json_object
from attemper.lab.errors import DataError, NoShardError
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.streaming.tars import Members, TarStore, index_shards
from attemper.lab.tasks.streaming.task import StreamTask, need, open_parts

MOST_SHARDS = 100_000
"""Behind one pattern."""
INFO = ("_info.json", "info.json")
"""What describes the parts of a folder may be called so."""
TEST_PARTS = ("test", "val", "validation")
IMAGES = "jpg;jpeg;png;webp"


def open_wds(
    name: str,
    path: str,
    root: Path,
    *,
    size: int = 224,
    crop: float = 0.875,
    classes: int | None = None,
    training: str = "train",
    held_out: str | None = None,
    images: str = IMAGES,
    label: str = "cls",
    train: int | None = None,
    test: int | None = None,
) -> StreamTask:
    """The samples of local tar files.

    path: a folder, or a pattern of the training shards such as 'imagenet/train-{0000..1023}.tar'; relative to the data
        root or to where the program runs. Of a folder, `_info.json` says which shards a part has; without it they lie
        in a subfolder of that name, or have it in theirs.
    size: side of the images in pixels. crop: share of the shorter side that the middle square keeps in evaluation.
    classes: how many there are; none: what `_info.json` says, else up to the largest that occurs.
    training, held_out: what the two parts are called; held_out may be a pattern. None: test, val or validation.
    images, label: endings of the files of a sample.
    """
    need("Shards", "webdataset")
    where = _locate(path, root)
    parts = where.part(training), where.test(held_out)
    if both := set(parts[0].shards) & set(parts[1].shards):
        raise DataError(
            f"{len(both)} shards are in the training and in the test part of '{name}', such as '{min(both)}'."
        )
    members = Members(tuple(images.lower().split(";")), label.lower())
    stores = [_open(shards, members, root) for shards in parts]
    given = classes or next((part.classes for part in parts if part.classes is not None), None)
    count = _check_classes(stores, given)
    return open_parts(
        name,
        (stores[0], stores[0].selection),
        (stores[1], stores[1].selection),
        size=size,
        crop=crop,
        classes=tuple(map(str, range(count))),
        fingerprint=of_parts("wds", *(store.fingerprint for store in stores)),
        train=train,
        test=test,
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """The shards of one part of a data set, with what is known of them without looking."""

    shards: tuple[Path, ...]
    lengths: tuple[int, ...] = ()
    """Samples of every shard; empty: not known."""
    classes: int | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder with shards, and the pattern of those to train on, if one was given."""

    folder: Path
    bases: tuple[Path, ...]
    """Where other patterns may begin."""
    pattern: str | None = None

    def part(self, name: str) -> Part:
        """The training shards: of the pattern, or the part of that name."""
        return describe(self.folder, self.pattern) if self.pattern is not None else self.named(name)

    def test(self, name: str | None) -> Part:
        """The test shards, by their name or pattern."""
        if name is not None and is_pattern(name):
            return describe(*_folder_of(name, (self.folder, *self.bases)))
        if name is None and self.pattern is not None:
            raise DataError(
                f"'{self.pattern}' are the shards to train on; name those of the test set too, such as "
                "held_out='val-{00..63}.tar'."
            )
        if name is not None:
            return self.named(name)
        for each in TEST_PARTS:
            with contextlib.suppress(NoShardError):
                return self.named(each)
        raise DataError(
            f"'{self.folder}' has no shards for {', '.join(TEST_PARTS[:-1])} or {TEST_PARTS[-1]}; name the test part "
            f"with held_out.{_parts_of(self.folder)}"
        )

    def named(self, name: str) -> Part:
        """A part of the folder: as `_info.json` has it, else its subfolder, else the shards with its name in theirs."""
        if _info_file(self.folder) is not None:
            return describe(self.folder, name)
        if (self.folder / name).is_dir():
            found = sorted((self.folder / name).glob("*.tar"))
        else:
            found = sorted(each for each in self.folder.glob("*.tar") if name in re.split(r"[-_.]", each.stem))
        if not found:
            raise NoShardError(
                f"'{self.folder}' has no shards for '{name}': neither _info.json, nor a folder '{name}' with .tar "
                f"files, nor .tar files with '{name}' in their names, such as {name}-0000.tar."
            )
        return Part(tuple(found))


def is_pattern(text: str) -> bool:
    """Whether a text names tar files, and not the folder that they are in."""
    return text.endswith(".tar") or "{" in text


def _locate(path: str, root: Path) -> Place:
    if re.match(r"[a-z0-9]+://|pipe:", path):
        raise DataError(
            f"'{path}' is not on this machine, and shards are read in an order that needs any part of them at any time."
            " Copy them to a disk, or stream the data set with hf:NAME."
        )
    bases = root, Path()
    if is_pattern(path):
        folder, pattern = _folder_of(path, bases)
        return Place(folder, bases, pattern)
    found = next((base / path for base in bases if (base / path).is_dir()), None)
    if found is None:
        raise DataError(
            f"'{path}' is not a folder with shards, neither under the data root '{root}' nor from here. A pattern such "
            f"as {path}/train-{{0000..1023}}.tar names shards, too."
        )
    return Place(found, bases)


def _folder_of(pattern: str, bases: tuple[Path, ...]) -> tuple[Path, str]:
    """The folder that a pattern begins with, as far as nothing in it varies, and the rest."""
    head, slash, _ = pattern.split("{")[0].rpartition("/")
    folder = next((base / head for base in bases if (base / head).is_dir()), None)
    if folder is None:
        raise NoShardError(
            f"'{pattern}' names no shards: there is no folder '{head}', neither under the data root nor from here."
        )
    return folder, pattern[len(head + slash) :]


def describe(folder: Path, split: str) -> Part:
    """What timm's reader finds: the shards of a pattern or of a part of `_info.json`, and what that says of them."""
    from timm.data.dataset_factory import create_dataset

    _refuse_many(split)
    known = _parts_of(folder)
    try:
        with _quiet():
            reader: Any = create_dataset("wds/", root=str(folder), split=split, is_training=False).reader
    except (RuntimeError, KeyError, ValueError) as error:
        raise NoShardError(f"'{folder}' has no part '{split}' ({first_line(error)}).{known}") from None
    except Exception as error:  # what timm makes of a part that is described in another way than it knows
        raise DataError(
            f"What '{_info_file(folder) or folder}' says of '{split}' cannot be used: {type(error).__name__}: "
            f"{first_line(error)}."
        ) from None
    found = reader.split_info
    if (
        not found.filenames
        or not all(isinstance(name, str) for name in found.filenames)
        or not all(isinstance(length, int) for length in found.shard_lengths)
    ):
        raise DataError(
            f"'{_info_file(folder)}' is damaged: '{split}' needs texts as filenames and numbers as lengths."
        )
    if found.alt_label:
        raise DataError(
            f"The part '{split}' of '{folder}' has its classes in .json files ({found.alt_label}); they must be in a "
            "file of their own, such as .cls."
        )
    shards = tuple(folder / each for each in found.filenames)
    absent = [shard for shard in shards if not shard.exists()]
    if absent:
        info = None if is_pattern(split) else _info_file(folder)
        named = "" if info is None else f" that '{info.name}' names"
        raise DataError(
            f"{len(absent)} of the {len(shards)} shards of '{split}'{named} are not in '{folder}', the first of them "
            f"'{absent[0].name}'."
        )
    return Part(shards, tuple(found.shard_lengths), _classes_in(folder, reader.info.get("num_classes")))


def _classes_in(folder: Path, count: Any) -> int | None:
    """How many classes `_info.json` says that there are; None: it says nothing."""
    if count is None or (isinstance(count, int) and 2 <= count <= 10**6):
        return count
    raise DataError(f"'{_info_file(folder)}' is damaged: num_classes is {shown(count)}; it must be a number from 2 on.")


def _refuse_many(pattern: str) -> None:
    """Raise if a pattern stands for more shards than anybody has: all of their names would be made."""
    ranges = [(int(low[-18:]), int(high[-18:])) for low, high in re.findall(r"\{([0-9]+)\.\.([0-9]+)", pattern)]
    count = math.prod(abs(high - low) + 1 for low, high in ranges)
    if count > MOST_SHARDS:
        raise DataError(f"{quoted(pattern)} stands for {count:,} shards; at most {MOST_SHARDS:,} are read.")


def _info_file(folder: Path) -> Path | None:
    """The file that describes the parts of a folder, be it right or damaged."""
    return next((folder / each for each in INFO if os.path.lexists(folder / each)), None)


def _parts_of(folder: Path) -> str:
    """The parts that `_info.json` names, in a sentence. One that cannot be read is an error: timm passes it over."""
    file = _info_file(folder)
    if file is None:
        return ""
    try:
        known = read_json_object(file).get("splits", {})
    except UnreadableError as error:
        raise DataError(str(error)) from None
    if not isinstance(known, dict):
        raise DataError(f"'{file}' is damaged: its splits are no object with one entry per part.")
    return f" '{file.name}' has: {', '.join(known) or 'nothing'}."


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: inside it, timm does not warn that there is no `_info.json`, which is optional."""
    logger = logging.getLogger("timm.data.readers.reader_wds")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _open(part: Part, members: Members, root: Path) -> TarStore:
    store = TarStore(part.shards, index_shards(part.shards, members, root))
    counts = np.bincount(store.index["shard"], minlength=len(part.shards)).tolist()
    for shard, promised, found in zip(part.shards, part.lengths, counts, strict=False):
        if promised != found:
            raise DataError(
                f"'{shard}' has {found:,} samples, and _info.json promises {promised:,}. Copy the shard again, or "
                "correct the file."
            )
    return store


def _check_classes(stores: list[TarStore], given: int | None) -> int:
    """How many classes there are; a sample of another one is named."""
    largest = max(int(store.index["label"].max()) for store in stores)
    count = largest + 1 if given is None else given
    for store in stores:
        wrong = np.flatnonzero(store.index["label"] >= count)
        if len(wrong):
            item = tuple(store.index[wrong[0]].tolist())
            raise DataError(
                f"{store.where(item)} has class {item[2]}, and there are {count}, from 0 to {count - 1}. {len(wrong):,}"
                " samples are like that; give the right number with the option classes."
            )
    if count < 2:
        raise DataError("All samples have class 0; there must be at least 2 classes.")
    return count
