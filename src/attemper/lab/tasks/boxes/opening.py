"""From a folder with COCO's JSON to a task."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks.boxes.coco_set import CocoSet, read_set
from attemper.lab.tasks.boxes.metrics import require_packages
from attemper.lab.tasks.boxes.shape import BoxShape
from attemper.lab.tasks.boxes.task import BoxTask
from attemper.lab.tasks.broken import Broken, listed, shown
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.source import found_under
from attemper.lab.tasks.split import hold_out


def open_coco(
    name: str,
    path: str,
    root: Path,
    *,
    size: int = 128,
    broken: Broken = "refuse",
    train: int | None = None,
    test: int | None = None,
) -> BoxTask:
    """Images with boxes, annotated in COCO's JSON (see `find_annotations` for the layouts).

    path: a folder, or a file of annotations, relative to the data root or to where the program runs. Annotations for
        training, validation and test are used as such; of two, the second is the test set and a part of the training
        images is for validation, by the seed; of one, a fixed fifth becomes the test set.
    size: side of the canvas on which every image is put whole, in pixels.
    broken: what becomes of images and boxes that cannot be used: refuse, or skip.
    train, test: keep only so many images, always the same ones.
    """
    require_packages()  # so that a missing package is an error now, not after the first epoch
    found = read_set(found_under(root, path, Path.exists, "there"), size, broken, root)
    training, validation, held, notes = divided(found)
    for each in (*found.notes, *notes):
        note(each)
    check_parts(name, found, {"training": training, "test": held, "validation": validation})
    return BoxTask(
        name=name,
        shape=BoxShape(size=size, classes=len(found.classes), boxes=max(1, found.most_boxes)),
        fingerprint=found.fingerprint,
        pool=lambda: found.source(training),
        held_out=lambda: found.source(held),
        classes=found.classes,
        apart=None if validation is None else lambda: found.source(validation),
        train=train,
        test_images=test,
        notes=(*found.notes, *notes),
        described=found.described,
    )


def divided(found: CocoSet) -> tuple[Tensor, Tensor | None, Tensor, list[str]]:
    """Samples for training, validation (None: a part of training) and test, and what is to be said about it.

    Copies of an image that is held out are not trained on.
    """
    training, validation, held = (found.indices(part) for part in ("train", "validation", "test"))
    if not len(held) and len(validation):
        validation, held = held, validation
    if not len(held):
        kept, out = hold_out(first_classes(found)[training], None if found.groups is None else found.groups[training])
        return training[kept], None, training[out], []
    apart = torch.cat([validation, held])
    notes = []
    if found.groups is not None:
        copied = torch.isin(found.groups[training], found.groups[apart])
        if copied.any():
            copies = counted(int(copied.sum()), "image")
            notes = [f"Left out, since copies of them are held out: {copies} for training."]
        training = training[~copied]
    return training, validation if len(validation) else None, held, notes


def first_classes(found: CocoSet) -> Tensor:
    """By which images are stratified: the class of their first box, −1 without any; int64 (N)."""
    return torch.tensor([found.number[each.boxes[0].category] if each.boxes else -1 for each in found.samples])


def check_parts(name: str, found: CocoSet, parts: Mapping[str, Tensor | None]) -> None:
    """Raise unless there is something to train on and something to test on; tell of classes that are never trained."""
    for part, indices in parts.items():
        if indices is None:
            continue
        least = 2 if part == "training" else 1
        if len(indices) < least:
            raise DataError(
                f"'{name}' has {counted(len(indices), f'{part} image')} to use, and needs at least {least}."
            )
        if not any(not box.crowd for index in indices.tolist() for box in found.samples[index].boxes):
            raise DataError(f"'{name}' has no box in any of its {counted(len(indices), f'{part} image')}.")
    training = parts["training"]
    assert training is not None
    known = {box.category for index in training.tolist() for box in found.samples[index].boxes}
    never = [shown(each) for each in found.classes if each not in known]
    if never:
        classes = f"{len(never)} of its {counted(len(found.classes), 'class', 'classes')}"
        note(f"No training image of '{name}' has a box of {classes}: {listed(never)}.")
