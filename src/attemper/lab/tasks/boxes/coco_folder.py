"""Which files of a folder are annotations in COCO's JSON, of which part, and where their images are.

Known are COCO's own layout (annotations/instances_train2017.json, train2017/), that of Roboflow
(train/_annotations.coco.json beside its images), that of CVAT (annotations/instances_default.json, images/default/),
and one JSON file alone with images beside it or in images/.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Literal

from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import listed, shown

Part = Literal["train", "validation", "test"]
WORDS: dict[str, Part] = {
    **dict.fromkeys(("train", "training", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "minival", "dev"), "validation"),
    "test": "test",
    "testing": "test",
}
OTHERS = ("captions_", "person_keypoints_", "panoptic_", "stuff_", "image_info_", "lvis_")
"""COCO's files about something else than objects with boxes."""
DEPTH = 3
"""So deep below the folder annotations are looked for."""
TRIED = 20
"""Images by which the folder of all of them is found."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A file of annotations, the part that it is of, and the folder of the whole set."""

    path: Path
    part: Part
    folder: Path

    @property
    def name(self) -> str:
        """Relative to the set's folder."""
        return str(self.path.relative_to(self.folder)) if self.path.is_relative_to(self.folder) else self.path.name


def find_annotations(given: Path) -> tuple[list[Found], list[str]]:
    """The files of annotations in a folder, at most one for each part; or the file itself, which is for training.

    And sentences about files that are not used, though they are called as others that are.
    """
    if given.is_file():
        return [Found(given, "train", given.parent)], []
    files = [each for each in _json_files(given) if not each.name.lower().startswith(OTHERS)]
    named = [each for each in files if each.name.lower().startswith("instances")]
    roboflow = [each for each in files if each.name.lower() == "_annotations.coco.json"]
    chosen = named or roboflow or files
    if not chosen:
        raise DataError(
            f"'{given}' has no annotations in COCO's JSON: neither annotations/instances_train.json or the like, nor "
            "train/_annotations.coco.json, nor one .json file."
        )
    parts: dict[Part, list[Path]] = {}
    notes = []
    for each in chosen:
        part = part_of(each, given)
        if part is None and len(chosen) > 1:
            name = shown(str(each.relative_to(given)))
            notes.append(f"'{name}' is not used: its name does not say that it is for training, validation or test.")
            continue
        parts.setdefault(part or "train", []).append(each)
    twice = {part: paths for part, paths in parts.items() if len(paths) > 1}
    if twice or not parts:
        names = listed(f"'{shown(str(each.relative_to(given)))}'" for each in chosen)
        why = f"more than one of them is for {' and '.join(twice)}" if twice else "which is for training is not said"
        raise DataError(
            f"'{given}' has several files of annotations, and {why}: {names}. Leave one for each part, with train, val "
            "or test in its name, or give the path of one file."
        )
    if "train" not in parts:
        raise DataError(
            f"'{given}' has annotations for {' and '.join(parts)}, and none for training (with train in its name)."
        )
    return [Found(parts[part][0], part, given) for part in ("train", "validation", "test") if part in parts], notes


def _json_files(folder: Path) -> list[Path]:
    """Down to some depth."""
    found = [
        each for where in (folder, *_folders_below(folder, DEPTH - 1)) for each in where.glob("*.[jJ][sS][oO][nN]")
    ]
    return sorted(each for each in found if not each.name.startswith(".") and each.is_file())


def _folders_below(folder: Path, depth: int) -> list[Path]:
    """Folders down to some depth, in order. No file is asked what it is: there may be a million of them."""
    if not depth:
        return []
    with os.scandir(folder) as inside:
        here = sorted(Path(each.path) for each in inside if not each.name.startswith(".") and each.is_dir())
    return [each for where in here for each in (where, *_folders_below(where, depth - 1))]


def part_of(path: Path, folder: Path) -> Part | None:
    """Which part a file is of, by the words of its name, else by those of its folder."""
    places = [path.stem, *reversed(path.relative_to(folder).parts[:-1])]
    for place in places:
        for word in re.split(r"[^a-z]+", place.lower()):
            if word in WORDS:
                return WORDS[word]
    return None


def image_folder(found: Found, names: list[str]) -> Path | None:
    """Where the images of a file of annotations are: the folder that has most of the first ones.

    The usual places come first, then all folders of the set. None: no folder has any of them.
    """
    for places in (candidates(found), _folders_below(found.folder, DEPTH)):
        counts = {folder: sum((folder / name).is_file() for name in names[:TRIED]) for folder in places}
        best = max(counts, key=lambda folder: counts[folder], default=None)
        if best is not None and counts[best]:
            return best
    return None


def candidates(found: Found) -> list[Path]:
    """The folders in which images may lie."""
    stem = re.sub(r"^(instances|annotations?|coco)[_-]?", "", found.path.stem, flags=re.IGNORECASE)
    words = [word for word, part in WORDS.items() if part == found.part]
    above = [found.path.parent]
    if found.path.parent != found.folder or found.path.parent.name.lower().startswith("annotation"):
        above.append(found.path.parent.parent)
    places: list[Path] = []
    for base in dict.fromkeys([*above, found.folder]):
        for middle in (base, base / "images", base / "data"):
            places += [middle / name for name in (stem, *words) if name] + [middle]
    return [each for each in dict.fromkeys(places) if each.is_dir()]
