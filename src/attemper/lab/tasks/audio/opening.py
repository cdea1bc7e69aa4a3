"""Tasks out of audio files and ready spectrograms."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.audio.listing import SOUNDS, list_esc50
from attemper.lab.tasks.audio.preparing import Prepared, Settings, prepare
from attemper.lab.tasks.audio.task import AudioTask, MelSource, token_shape
from attemper.lab.tasks.broken import Broken, settle
from attemper.lab.tasks.fingerprint import of_parts, of_tensors
from attemper.lab.tasks.holding_out import check_no_class_is_lost, divide_files, groups_of
from attemper.lab.tasks.listing import Listing, list_folder
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.source import found_under
from attemper.lab.tasks.split import hold_out, joined

BANDS = 64


def open_audio(
    name: str,
    path: str,
    root: Path,
    *,
    seconds: int = 30,
    tokens: int | None = None,
    bands: int = BANDS,
    label: str | None = None,
    broken: Broken = "refuse",
    train: int | None = None,
    test: int | None = None,
) -> AudioTask:
    """The clips of a folder with one subfolder per class, such as GTZAN's 'genres'.

    path: the folder, relative to the data root or to where the program runs. A fixed fifth of its clips becomes the
        test set, unless it has 'train' and 'test' (or 'val') with class folders.
    seconds: of every clip; what is longer is cut, what is shorter is filled up with silence.
    tokens: per clip; none: four a second.
    bands: of the spectrogram.
    label: how the names of the files tell their class, such as '{label}_{group}_*.wav', where there are no class
        folders.
    broken: what becomes of files that cannot be read: refuse, or skip.
    """
    listing = list_folder(found_under(root, path), SOUNDS, label, broken)
    return _open_files(name, listing, Settings(seconds, bands), tokens, root, broken, train, test)


def open_esc50(
    name: str,
    path: str,
    root: Path,
    *,
    fold: int = 1,
    seconds: int = 5,
    tokens: int | None = None,
    bands: int = BANDS,
    broken: Broken = "refuse",
    train: int | None = None,
    test: int | None = None,
) -> AudioTask:
    """ESC-50: 2,000 clips of 5 s, 50 classes. One of its five folds is the test set.

    path: its folder, with 'audio' and 'meta/esc50.csv' inside.
    broken: what becomes of files and rows that cannot be read: refuse, or skip.
    """
    listing = list_esc50(found_under(root, path), fold, broken)
    return _open_files(name, listing, Settings(seconds, bands), tokens, root, broken, train, test)


def open_mel(
    name: str, path: str, root: Path, *, tokens: int | None = None, train: int | None = None, test: int | None = None
) -> AudioTask:
    """Ready spectrograms in an .npz file.

    path: with 'mel', uint8 (N, frames, bands); 'labels', (N); 'classes', their names; and perhaps 'same_as', (N), which
        gives for each clip the first one that it is a copy of. A fixed fifth of the clips becomes the test set.
    """
    file = found_under(root, path, Path.is_file, "a file")
    arrays = _read_npz(file)
    mel, labels = torch.from_numpy(arrays["mel"]), torch.from_numpy(arrays["labels"].astype(np.int64))
    classes = tuple(_text(each) for each in arrays["classes"])
    copies = arrays.get("same_as", np.arange(len(labels))).tolist()
    whole = MelSource(mel, labels, joined(len(labels), copies, (clip.tobytes() for clip in arrays["mel"])))
    kept, held = hold_out(whole.targets, whole.groups)
    return AudioTask(
        name=name,
        shape=token_shape(name, mel.shape[1], mel.shape[2], tokens, len(classes)),
        fingerprint=of_tensors(mel, labels, whole.groups, held),
        pool=lambda: whole.take(kept),
        held_out=lambda: whole.take(held),
        classes=classes,
        train=train,
        test_images=test,
        bands=mel.shape[2],
    )


# --------------------------------------------------------------------------------------------------------------- files
def _open_files(
    name: str,
    listing: Listing,
    settings: Settings,
    tokens: int | None,
    root: Path,
    broken: Broken,
    train: int | None,
    test: int | None,
) -> AudioTask:
    shape = token_shape(name, settings.frames, settings.bands, tokens, len(listing.classes))
    prepared = prepare(listing, settings, root)
    problems = {listing.items[index].name: reason for index, reason in prepared.problems.items()}
    skipped = settle(problems, len(listing.items), f"audio files in '{listing.folder}'", broken)
    check_no_class_is_lost(listing, prepared.problems)
    row_of = torch.full((len(listing.items),), -1)
    row_of[prepared.rows] = torch.arange(len(prepared.rows))
    targets = torch.tensor([item.target for item in listing.items])
    groups = _groups(listing, prepared)
    kept, held, copies = divide_files(listing, groups, SOUNDS)
    kept, held = kept[row_of[kept] >= 0], held[row_of[held] >= 0]  # after the split: a broken file moves no other
    notes = (*listing.notes, *skipped, *copies)
    for each in notes:
        note(each)

    def source(indices: Tensor) -> MelSource:
        mel = torch.from_numpy(prepared.mel[row_of[indices].numpy()])  # a copy: only these pages are read
        return MelSource(mel, targets[indices], groups[indices])

    return AudioTask(
        name=name,
        shape=shape,
        fingerprint=of_parts(
            prepared.contents, of_tensors(targets, groups, held), *(f"skipped {each}" for each in problems)
        ),
        pool=lambda: source(kept),
        held_out=lambda: source(held),
        classes=listing.classes,
        train=train,
        test_images=test,
        bands=settings.bands,
        notes=notes,
    )


def _groups(listing: Listing, prepared: Prepared) -> Tensor:
    """Copies and cuts of one recording have the same number, int64 (files)."""
    equal = list(range(len(listing.items)))
    for row, first in zip(prepared.rows, prepared.equal, strict=True):
        equal[row] = prepared.rows[first]
    groups = groups_of(listing, equal)
    return torch.arange(len(equal)) if groups is None else groups


# --------------------------------------------------------------------------------------------------- ready spectrograms
def _read_npz(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with np.load(file, allow_pickle=False) as held:
            arrays = {key: held[key] for key in ("mel", "labels", "classes", "same_as", "names") if key in held}
    except Exception as error:  # zipfile, zlib and numpy have many ways to say that a file is no archive of arrays
        raise DataError(f"'{file}' is not an .npz file of arrays: {error}") from None
    for key in ("mel", "labels", "classes"):
        if key not in arrays:
            raise DataError(f"'{file}' has no array '{key}'; it needs mel, labels and classes.")
    mel, labels = arrays["mel"], arrays["labels"]
    if mel.dtype != np.uint8 or mel.ndim != 3 or not mel.size:
        raise DataError(f"'mel' of '{file}' is {mel.dtype} {mel.shape}; it must be uint8 (clips, frames, bands).")
    if labels.shape != (len(mel),) or labels.dtype.kind not in "iu":
        raise DataError(f"'labels' of '{file}' is {labels.dtype} {labels.shape}; it must be {len(mel)} whole numbers.")
    if len(arrays["classes"]) < 2:
        raise DataError(f"'classes' of '{file}' has {len(arrays['classes'])} names; there must be at least 2.")
    wrong = np.flatnonzero((labels < 0) | (labels >= len(arrays["classes"])))
    if len(wrong):
        known = _text(arrays["names"][wrong[0]]) if len(arrays.get("names", ())) == len(mel) else f"clip {wrong[0]}"
        raise DataError(
            f"'{known}' of '{file}' has the label {labels[wrong[0]]}, and there are {len(arrays['classes'])} classes."
        )
    same = arrays.get("same_as", np.arange(len(mel)))
    if same.shape != (len(mel),) or ((same < 0) | (same > np.arange(len(mel)))).any():
        raise DataError(f"'same_as' of '{file}' must give for every clip its own number or that of an earlier one.")
    return arrays


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
