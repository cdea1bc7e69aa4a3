"""Small files of videos with actions, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from attemper.lab.tasks.actions.task import ActionTask
from attemper.lab.tasks.registry import open_task

STEPS, WIDTH = 20, 6


def features(seed: int, steps: int = STEPS, width: int = WIDTH) -> Any:
    return np.random.default_rng(seed).standard_normal((steps, width)).astype(np.float32)


def opened(folder: Path, options: str = "", name: str = "data") -> ActionTask:
    task = open_task(f"actions:{name}(window=4{', ' if options else ''}{options})", folder)
    assert isinstance(task, ActionTask)
    return task


def npz(folder: Path, **changes: Any) -> Path:
    """Four videos, two classes, steps of half a second."""
    arrays: dict[str, Any] = {
        "features": np.arange(4 * STEPS * WIDTH).reshape(-1, WIDTH).astype(np.int8),
        "scale": np.ones(WIDTH, np.float32),
        "offsets": np.arange(5) * STEPS,
        "names": np.array([b"a", b"b", b"c", b"d"]),
        "split": np.array([b"train", b"train", b"train", b"test"]),
        "seconds_per_step": np.float32(0.5),
        "segments": np.array([[0, 1.0, 3.0, 0], [1, 2.0, 4.0, 1], [2, 0.0, 2.0, 0], [3, 5.0, 7.5, 1]], np.float32),
        "classes": np.array([b"Jump", b"Swim"]),
    }
    arrays.update(changes)
    file = folder / "data.npz"
    np.savez(file, **{name: value for name, value in arrays.items() if value is not None})
    return file


def actionformer(root: Path, database: dict[str, Any] | None = None) -> Path:
    folder = root / "data"
    (folder / "i3d").mkdir(parents=True)
    (folder / "annotations").mkdir()
    for number, name in enumerate("abcd"):
        np.save(folder / "i3d" / f"{name}.npy", features(number))
    (folder / "annotations" / "some.json").write_text(json.dumps({"database": database or entries()}))
    return folder


def entries() -> dict[str, Any]:
    """Steps of half a second: every 15 frames of 30 a second."""

    def entry(subset: str, *annotations: tuple[float, float, str, int]) -> dict[str, Any]:
        listed = [{"segment": [s, e], "label": label, "label_id": number} for s, e, label, number in annotations]
        return {"subset": subset, "duration": 10.0, "fps": 30.0, "annotations": listed}

    return {
        "a": entry("Validation", (1.0, 3.0, "Swim", 1), (6.0, 7.0, "Ambiguous", 9)),
        "b": entry("Validation", (2.0, 4.0, "Jump", 0)),
        "c": entry("validation", (0.0, 2.0, "Swim", 1)),
        "d": entry("Test", (5.0, 7.5, "Jump", 0)),
    }
