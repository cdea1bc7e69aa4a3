"""The feature files of a folder's videos."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.arrays import FeatureFiles
from attemper.lab.tasks.broken import listed, shown

ENDINGS = (".npy", ".npz")


class Inputs:
    """Finds the features of each video, and sees that all have the same width.

    folder: of the data set.
    named: the folders of features inside of it, joined by '+'; None: the only one that there is, or the only pair of
        RGB and flow.
    beside: folders that hold arrays which are no features.
    """

    def __init__(self, folder: Path, named: str | None, beside: Sequence[str] = (), skip_missing: bool = False) -> None:
        self.folders = self._named(folder, named) if named is not None else self._found(folder, beside)
        self.skip_missing = skip_missing
        self.missing: list[str] = []
        self.looked = 0
        self.width: int | None = None
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self._first: Path | None = None

    def of(self, video: str) -> tuple[FeatureFiles, int] | None:
        """The features of a video and the number of its steps; None: there are none."""
        files = [self._file(folder, video) for folder in self.folders]
        self.looked += 1
        if None in files:
            self.missing.append(video)
            return None
        found = FeatureFiles(tuple(file for file in files if file is not None))
        steps, width, dtype = found.check()
        if self.width is None:
            self.width, self._first = width, found.files[0]
            self.dtype = dtype
        if width != self.width:
            raise DataError(
                f"'{found.files[0]}' has features of width {width}, and '{self._first}' of width {self.width}; all "
                "videos must have the same."
            )
        self.dtype = np.result_type(self.dtype, dtype)
        return found, steps

    def settle(self) -> tuple[str, ...]:
        """What was left out, in words; raise if videos lack features, unless that was allowed."""
        if not self.missing:
            return ()
        named = listed(f"'{shown(video)}'" for video in self.missing)
        about = f"{len(self.missing):,} of {self.looked:,} videos have no features"
        if self.skip_missing:
            return (f"{about} and are left out: {named}.",)
        folders = " or ".join(f"'{folder}'" for folder in self.folders)
        raise DataError(
            f"{about} in {folders} (looked for {' and '.join(ENDINGS)}): {named}. With skip_missing=true, they are "
            "left out."
        )

    @staticmethod
    def _file(folder: Path, video: str) -> Path | None:
        return next((file for ending in ENDINGS if os.path.isfile(file := folder / f"{video}{ending}")), None)

    @staticmethod
    def _named(folder: Path, named: str) -> list[Path]:
        folders = [folder / name.strip() for name in named.split("+")]
        for each in folders:
            if not each.is_dir():
                raise DataError(f"'{each}' is not a folder; features= must name one, or several joined by '+'.")
        return folders

    @staticmethod
    def _found(folder: Path, beside: Sequence[str]) -> list[Path]:
        inside = sorted(each for each in folder.iterdir() if each.is_dir() and each.name not in beside)
        inside = [each for each in inside if any(next(each.glob(f"*{ending}"), None) for ending in ENDINGS)]
        if len(inside) == 1:
            return inside
        pair = [[each for each in inside if each.name.startswith(kind)] for kind in ("rgb", "flow")]
        if len(inside) == 2 and all(len(kind) == 1 for kind in pair):
            return [kind[0] for kind in pair]
        listed = f": {', '.join(each.name for each in inside)}" if inside else ""
        raise DataError(
            f"'{folder}' has {len(inside)} folders of .npy or .npz files{listed}. features= must name the one with the "
            "features, or several joined by '+', such as features='rgb+flow'."
        )
