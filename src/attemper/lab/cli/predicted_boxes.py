"""What `attemper predict` does with a model that finds objects: boxes in COCO's JSON, and pictures of them."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import ParameterError, UnreadableError
from attemper.lab.cli.predicted_masks import SHOWN, check_pictures
from attemper.lab.cli.printing import console, print_json, say
from attemper.lab.counting import counted

if TYPE_CHECKING:
    from PIL.Image import Image

    from attemper.lab.evaluation.trained import TrainedFinder

FILE = "boxes.json"
LONGEST = 1280
"""Pixels of the longer side of a picture: names of classes can be read on it."""


@dataclass(frozen=True)
class Found:
    """What is found in an image, the surest first. boxes: left, top, width and height in pixels of the file."""

    name: str
    size: tuple[int, int]
    boxes: tuple[tuple[float, float, float, float], ...]
    labels: tuple[int, ...]
    scores: tuple[float, ...]

    def sure(self) -> range:
        """The places of those that are shown to people."""
        from attemper.lab.tasks.boxes.drawing import SURE

        return range(sum(score >= SURE for score in self.scores))


def write_boxes(
    finder: TrainedFinder, folder: Path, files: Sequence[Path], out: Path | None, batch_size: int, *, json: bool
) -> int:
    """Find objects in every image, write what was found to `out`, and say how many there are of which class."""
    from rich.progress import Progress

    alone = out is not None and out.suffix.lower() == ".json"
    if not alone:
        check_pictures(folder, files, out, "pictures")
    elif out is not None and out.is_dir():
        raise ParameterError(f"--out is '{out}', a folder; a name that ends with .json is for a file.")
    where, every = console(json=json), []
    skipped: list[str] = []
    with Progress(console=where, transient=True, disable=not where.is_terminal) as bar:
        line = bar.add_task("finding", total=len(files))
        for found, image, bad in predictions(finder, folder, files, batch_size):
            bar.advance(line)
            if found is None:
                skipped.append(bad)
                continue
            every.append(found)
            if out is not None and not alone:
                _write_picture(out / Path(found.name).with_suffix(".png"), found, image, finder.inputs.classes)
    if not every:
        raise UnreadableError(f"Of {counted(len(skipped), 'image')} in '{folder}', none can be decoded.")
    _show(where, every, finder.inputs.classes)
    if skipped:
        more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        say(where, f"note: skipped, since they cannot be decoded ({len(skipped)}): {', '.join(skipped[:5])}{more}")
    held = coco_json(every, finder.inputs.classes)
    if out is None:
        say(where, "--out FOLDER writes boxes and pictures, --out FILE.json boxes alone")
    else:
        file = out if alone else out / FILE
        _write(file, json_module.dumps(held) + "\n")
        pictures = "" if alone else f", and {counted(len(every), 'picture')} beside it"
        say(where, f"Written: {file} ({counted(len(held['annotations']), 'box', 'boxes')} with their scores){pictures}")
    if json:
        about = {"run": str(finder.path.parent), "recipe": finder.spec.recipe, "skipped": skipped}
        print_json({**about, **held})
    return 0


def predictions(
    finder: TrainedFinder, folder: Path, files: Sequence[Path], batch_size: int
) -> Iterator[tuple[Found | None, Any, str]]:
    """Of every file what is found and the upright image; or None, None and the name of one that cannot be decoded."""
    from attemper.lab.tasks.image_files import as_rgb, upright
    from attemper.lab.tasks.sample_files import open_image

    for start in range(0, len(files), batch_size):
        names, images = [], []
        for file in files[start : start + batch_size]:
            name = file.relative_to(folder).as_posix()
            try:
                images.append(open_image(file, lambda opened: as_rgb(upright(opened))))
                names.append(name)
            except UnreadableError:
                yield None, None, name
        for found, image in zip(_found(finder, names, images), images, strict=True):
            yield found, image, found.name


def _found(finder: TrainedFinder, names: Sequence[str], images: Sequence[Image]) -> list[Found]:
    import torch

    from attemper.lab.tasks.boxes.canvas import on_canvas
    from attemper.lab.tasks.boxes.metrics import found_boxes
    from attemper.lab.tasks.boxes.task import last_layer, to_input

    if not images:
        return []
    device = next(finder.model.parameters()).device
    stored = torch.stack([on_canvas(image, finder.inputs.size) for image in images])
    sizes = torch.tensor([image.size for image in images])
    with torch.no_grad():
        packed = last_layer(finder.model(to_input(stored.to(device))))
    found = []
    for name, image, each in zip(names, images, found_boxes(packed, sizes), strict=True):
        corners = each["boxes"].double()
        corners = torch.minimum(corners, torch.tensor([*image.size, *image.size], dtype=torch.float64))
        sides = corners[:, 2:] - corners[:, :2]
        inside = (sides > 0).all(1)  # others lie in the padding
        boxes = torch.cat([corners[:, :2], sides], 1)[inside].tolist()
        labels, scores = each["labels"][inside].tolist(), each["scores"][inside].tolist()
        found.append(Found(name, image.size, tuple(map(tuple, boxes)), tuple(labels), tuple(scores)))
    return found


def coco_json(every: Sequence[Found], classes: Sequence[str]) -> dict[str, Any]:
    """COCO's JSON, whose annotations have scores: they are COCO's results, in the order of the images."""
    annotations: list[dict[str, Any]] = []
    for image, found in enumerate(every, 1):
        for box, label, score in zip(found.boxes, found.labels, found.scores, strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": label + 1,
                    "bbox": [round(each, 3) for each in box],
                    "area": round(box[2] * box[3], 3),
                    "iscrowd": 0,
                    "score": round(score, 6),
                }
            )
    images = [
        {"id": at, "file_name": found.name, "width": found.size[0], "height": found.size[1]}
        for at, found in enumerate(every, 1)
    ]
    categories = [{"id": at, "name": name} for at, name in enumerate(classes, 1)]
    return {"images": images, "categories": categories, "annotations": annotations}


def _write_picture(path: Path, found: Found, image: Image, classes: Sequence[str]) -> None:
    """The image, no larger than can be read, with the boxes that are surest, in the colours of their classes."""
    import io

    from attemper.lab.tasks.boxes.drawing import MOST_DRAWN
    from attemper.lab.tasks.pictures import colour_of, draw_boxes, fitted

    width, height = found.size
    chosen = list(found.sure())[:MOST_DRAWN]
    shares = [
        (left / width, top / height, (left + across) / width, (top + down) / height)
        for left, top, across, down in (found.boxes[at] for at in chosen)
    ]
    names = [f"{classes[found.labels[at]]} {100 * found.scores[at]:.0f} %" for at in chosen]
    drawn = draw_boxes(fitted(image, LONGEST), shares, names, [colour_of(found.labels[at]) for at in chosen])
    data = io.BytesIO()
    drawn.save(data, format="PNG")
    _write(path, data.getvalue())


def _write(path: Path, data: str | bytes) -> None:
    from attemper.files import atomic_write
    from attemper.lab.folders import folder_errors

    with folder_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)


def _show(where: Any, every: Sequence[Found], classes: Sequence[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from attemper.lab.tasks.boxes.drawing import SURE

    table = Table("image", f"found with at least {100 * SURE:.0f} %", box=None, pad_edge=False)
    for found in every[:SHOWN]:
        counts = Counter(classes[found.labels[at]] for at in found.sure())
        table.add_row(escape(found.name), escape(", ".join(f"{n} × {name}" for name, n in counts.most_common())) or "–")
    where.print(table)
    if len(every) > SHOWN:
        say(where, f"… and {len(every) - SHOWN:,} more")
