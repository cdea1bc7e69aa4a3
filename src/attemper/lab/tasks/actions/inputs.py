"""The feature files of a folder's videos."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.arrays import FeatureFiles

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
        self.width: int | None = None
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self._first: Path | None = None

    def of(self, video: str) -> tuple[FeatureFiles, int] | None:
        """The features of a video and the number of its steps; None: there are none, and that is allowed."""
        files = [self._file(folder, video) for folder in self.folders]
        if None in files:
            self.missing.append(video)
            if self.skip_missing:
                return None
            lacking = self.folders[files.index(None)]
            raise DataError(
                f"'{lacking}' has no features of video '{video}' (looked for {' and '.join(ENDINGS)}). With "
                "skip_missing=true, videos without features are left out."
            )
        found = FeatureFiles(tuple(file for file in files if file is not None))
        steps, width, dtype = found.check()
        if self.width is None:
            self.width, self.dtype, self._first = width, dtype, found.files[0]
        self.dtype = np.result_type(self.dtype, dtype)
        if width != self.width:
            raise DataError(
                f"'{found.files[0]}' has features of width {width}, and '{self._first}' of width {self.width}; all "
                "videos must have the same."
            )
        return found, steps

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, in words."""
        if not self.missing:
            return ()
        return (f"{len(self.missing):,} videos have no features and are left out, '{self.missing[0]}' for one.",)

    @staticmethod
    def _file(folder: Path, video: str) -> Path | None:
        return next((file for ending in ENDINGS if (file := folder / f"{video}{ending}").is_file()), None)

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
