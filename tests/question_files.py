"""A small data set in the layout of VQAv2, for several files of tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torchvision.io import write_jpeg

__all__ = ["annotations_of", "questions_of", "write_v2"]

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220)}
NAMES = {"train2014": 12, "val2014": 6}


def write_v2(folder: Path, **kept: Any) -> Path:
    """Images of one colour each, two questions about each of them, answered by ten people.

    kept: `train2014=…` and `val2014=…`, how many images there are.
    """
    for part, images in {**NAMES, **kept}.items():
        (folder / part).mkdir(parents=True)
        questions, annotations = [], []
        for image in range(1, images + 1):
            colour = list(COLOURS)[image % 3]
            pixels = torch.tensor(COLOURS[colour], dtype=torch.uint8)[:, None, None].expand(3, 20, 30).contiguous()
            write_jpeg(pixels, str(folder / part / f"COCO_{part}_{image:012d}.jpg"))
            said = [[colour] * 7 + ["a " + colour, "black", "black"], ["yes" if colour == "red" else "no"] * 10]
            for at, (text, kind) in enumerate((("What color is it?", "what color"), ("Is it red?", "is it"))):
                number = 10 * image + at
                questions.append({"image_id": image, "question": text, "question_id": number})
                annotations.append(
                    {
                        "question_id": number,
                        "image_id": image,
                        "question_type": kind,
                        "answer_type": "other",
                        "multiple_choice_answer": said[at][0],
                        "answers": [
                            {"answer": answer, "answer_confidence": "yes", "answer_id": place + 1}
                            for place, answer in enumerate(said[at])
                        ],
                    }
                )
        about = {"info": {}, "license": {}, "data_subtype": part, "data_type": "mscoco"}
        questions_of(folder, part).write_text(json.dumps({**about, "questions": questions}))
        annotations_of(folder, part).write_text(json.dumps({**about, "annotations": annotations}))
    return folder


def questions_of(folder: Path, part: str = "train2014") -> Path:
    return folder / f"v2_OpenEnded_mscoco_{part}_questions.json"


def annotations_of(folder: Path, part: str = "train2014") -> Path:
    return folder / f"v2_mscoco_{part}_annotations.json"
