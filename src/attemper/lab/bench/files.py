"""Files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place, then put it there: who reads it never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.part")
    half.write_text(text, encoding="utf-8")
    os.replace(half, path)
