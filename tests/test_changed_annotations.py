"""Annotations of boxes and questions with anything changed in them: a task that can be trained on, or one error."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.errors import AttemperError
from attemper.lab.errors import DataError
from attemper.lab.tasks.notifications import Silent, listening
from attemper.lab.tasks.registry import open_task, verify
from attemper.lab.training.weights import notes_of
from coco_files import coco_set, contents, names_of, write_images, write_json
from question_files import questions_of, write_v2

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**70, math.inf, math.nan, -3.5, 7.0, "7", "", "dog", "val01.png", "../x", "\ud800"),
    *([], [1, 2], {}, {"id": 1}, [[]], [None] * 4, [0, 0, 5, 5], [1e-320, 0, 1, 1]),
)
"""What a changed value may be."""
CHANGES = 60
"""Sets of files that are tried for each layout."""


def changed(draw: random.Random, held: Any) -> Any:
    """The same with one thing changed somewhere inside."""
    if isinstance(held, dict) and held:
        key = draw.choice(list(held))
        kind = draw.random()
        if kind < 0.1:
            del held[key]
        else:
            held[key] = draw.choice(VALUES) if kind < 0.35 else changed(draw, held[key])
        return held
    if isinstance(held, list) and len(held) > 3:
        at, kind = draw.randrange(len(held)), draw.random()
        if kind < 0.05:
            held.append(held[at])
        elif kind < 0.1:
            del held[at]
        else:
            held[at] = draw.choice(VALUES) if kind < 0.2 else changed(draw, held[at])
        return held
    return draw.choice(VALUES)


def opened(text: str, root: Path) -> None:
    """Everything that a run does with a task before and after training."""
    verify(text, root)
    task = open_task(text, root)
    notes_of(task)
    for part in (*task.split(1, 0.3), task.test()):
        stored, _ = next(part.batches(torch.arange(len(part)), 4))
        assert torch.isfinite(task.to_input(stored)).all()


@pytest.mark.parametrize("kind", ["coco", "vqa"])
def test_whatever_is_changed_in_annotations_is_a_task_or_one_error(kind: str, tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set", 8, 5, 4) if kind == "coco" else write_v2(tmp_path / "set", train2014=5)
    before = {file: file.read_text() for file in sorted(folder.rglob("*.json"))}
    refused: list[str] = []
    for seed in range(CHANGES):
        draw = random.Random(seed)
        for file, text in before.items():
            file.write_text(text)
        for file in draw.sample(list(before), draw.randint(1, len(before))):
            held = json.loads(before[file])
            for _ in range(draw.randint(1, 6)):
                held = changed(draw, held)
            file.write_text(json.dumps(held))
        skip = draw.choice(("", ", broken=skip"))
        with listening(Silent()):
            try:
                opened(f"{kind}:{folder}(size=8{skip})", tmp_path)
            except AttemperError as error:
                refused.append(str(error))
    assert 0 < len(refused) < CHANGES
    assert max(map(len, refused)) < 20_000


def test_half_a_character_is_told_before_anything_is_written(tmp_path: Path) -> None:
    names = names_of(6)
    write_images(tmp_path / "own", names)
    held = contents(names)
    held["categories"][0]["name"] = "c\ud800t"
    write_json(tmp_path / "own" / "all.json", held)
    with pytest.raises(DataError, match=r"'category 3' \(its name is 'c\\ud800t', and must be a text\)"):
        open_task(f"coco:{tmp_path / 'own'}", tmp_path)
    folder = write_v2(tmp_path / "v2")
    asked = json.loads(questions_of(folder).read_text())
    asked["questions"][0]["question"] = "Is it \ud800?"
    questions_of(folder).write_text(json.dumps(asked))
    with pytest.raises(DataError, match="1 question has no text"):
        open_task(f"vqa:{folder}", tmp_path)
