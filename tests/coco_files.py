"""Folders of images with annotations in COCO's JSON, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]


def annotation(number: int, image: int, category: int, box: Sequence[float], **more: Any) -> dict[str, Any]:
    area = box[2] * box[3]
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": list(box),
        "area": area,
        "iscrowd": 0,
        **more,
    }


def contents(names: Sequence[str], size: tuple[int, int] = (40, 30)) -> dict[str, Any]:
    """One or two boxes in every image but every fifth, of both categories."""
    images = [{"id": at, "file_name": name, "width": size[0], "height": size[1]} for at, name in enumerate(names, 1)]
    annotations: list[dict[str, Any]] = []
    for image in images:
        at = int(image["id"])  # type: ignore[call-overload]
        if at % 5 == 0:
            continue
        annotations.append(annotation(len(annotations) + 1, at, 3 if at % 2 else 7, (2, 3, 10 + at % 7, 12)))
        if at % 3 == 0:
            annotations.append(annotation(len(annotations) + 1, at, 7, (20, 10, 15, 15)))
    return {"images": images, "annotations": annotations, "categories": [dict(each) for each in CATEGORIES]}


def write_images(folder: Path, names: Sequence[str], size: tuple[int, int] = (40, 30), seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)


def write_json(path: Path, held: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(held))
    return path


def names_of(count: int, prefix: str = "photo") -> list[str]:
    return [f"{prefix}{at:02}.png" for at in range(1, count + 1)]


def coco_set(folder: Path, train: int = 12, val: int = 6, test: int = 0) -> Path:
    """COCO's own layout."""
    for part, count in (("train", train), ("val", val), ("test", test)):
        if count:
            names = names_of(count, part)
            write_images(folder / f"{part}2017", names, seed=len(part) + count)
            write_json(folder / "annotations" / f"instances_{part}2017.json", contents(names))
    return folder
