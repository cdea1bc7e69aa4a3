"""Tasks out of audio files and ready spectrograms."""

from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.audio.listing import Listing, list_esc50, list_folder
from attemper.lab.tasks.audio.preparing import Prepared, Settings, prepare
from attemper.lab.tasks.audio.task import AudioTask, MelSource, hold_out, token_shape
from attemper.lab.tasks.fingerprint import of_parts, of_tensors
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.source import found_under

BANDS = 64
NAMED = 5
"""Of the files that are skipped, so many are named."""


def open_audio(
    name: str,
    path: str,
    root: Path,
    *,
    seconds: int = 30,
    tokens: int | None = None,
    bands: int = BANDS,
    train: int | None = None,
    test: int | None = None,
) -> AudioTask:
    """The clips of a folder with one subfolder per class, such as GTZAN's 'genres'.

    path: the folder, relative to the data root or to where the program runs. A fixed fifth of its clips becomes the
        test set, unless it has 'train' and 'test' (or 'val') with class folders.
    seconds: of every clip; what is longer is cut, what is shorter is filled up with silence.
    tokens: per clip; none: four a second.
    bands: of the spectrogram.
    """
    listing = list_folder(found_under(root, path))
    return _open_files(name, listing, Settings(seconds, bands), tokens, root, train, test)


def open_esc50(
    name: str,
    path: str,
    root: Path,
    *,
    fold: int = 1,
    seconds: int = 5,
    tokens: int | None = None,
    bands: int = BANDS,
    train: int | None = None,
    test: int | None = None,
) -> AudioTask:
    """ESC-50: 2,000 clips of 5 s, 50 classes. One of its five folds is the test set.

    path: its folder, with 'audio' and 'meta/esc50.csv' inside.
    """
    listing = list_esc50(found_under(root, path), fold)
    return _open_files(name, listing, Settings(seconds, bands), tokens, root, train, test)


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
    name: str, listing: Listing, settings: Settings, tokens: int | None, root: Path, train: int | None, test: int | None
) -> AudioTask:
    shape = token_shape(name, settings.frames, settings.bands, tokens, len(listing.classes))
    prepared = prepare(listing, settings, root)
    clips = [listing.clips[row] for row in prepared.rows]
    targets = torch.tensor([clip.target for clip in clips])
    recordings = [index if clip.recording is None else clip.recording for index, clip in enumerate(clips)]
    groups = joined(len(clips), prepared.equal, recordings)
    kept, held, copies = _parts(listing, [clip.held for clip in clips], targets, groups)
    notes = (*listing.notes, *_problems(listing, prepared), *copies)
    for each in notes:
        note(each)

    def source(indices: Tensor) -> MelSource:
        mel = torch.from_numpy(prepared.mel[indices.numpy()])  # a copy: only these pages are read
        return MelSource(mel, targets[indices], groups[indices])

    return AudioTask(
        name=name,
        shape=shape,
        fingerprint=of_parts(prepared.contents, of_tensors(targets, groups, held)),
        pool=lambda: source(kept),
        held_out=lambda: source(held),
        classes=listing.classes,
        train=train,
        test_images=test,
        bands=settings.bands,
        notes=notes,
    )


def _problems(listing: Listing, prepared: Prepared) -> list[str]:
    """A line that names what was skipped; raise if nothing is left of a class."""
    problems = {listing.clips[index].name: reason for index, reason in prepared.problems.items()}
    left = {(listing.clips[row].target, listing.clips[row].held) for row in prepared.rows}
    for index, reason in prepared.problems.items():
        clip = listing.clips[index]
        if (clip.target, clip.held) not in left:
            part = {None: "", False: " for training", True: " for test"}[clip.held]
            raise DataError(
                f"None of the files of class '{listing.classes[clip.target]}'{part} can be read, such as "
                f"'{listing.folder / clip.name}': {reason}."
            )
    if not problems:
        return []
    named = "; ".join(f"'{name}' ({reason})" for name, reason in list(problems.items())[:NAMED])
    more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
    return [
        f"{len(problems)} of {len(listing.clips)} audio files in '{listing.folder}' cannot be read and "
        f"{'is' if len(problems) == 1 else 'are'} skipped: {named}{more}."
    ]


def _parts(
    listing: Listing, held: list[bool | None], targets: Tensor, groups: Tensor
) -> tuple[Tensor, Tensor, list[str]]:
    """Indices for training and for test, and a line about copies of test clips, which are not trained on."""
    if None in held:
        return *hold_out(targets, groups), []
    test = torch.tensor(held)
    copied = ~test & torch.isin(groups, groups[test])
    notes = []
    if copied.any():
        notes = [
            f"Left out, since the test set of '{listing.folder}' holds copies: {int(copied.sum())} training clips."
        ]
    return (~test & ~copied).nonzero().flatten(), test.nonzero().flatten(), notes


def joined(count: int, *marks: Iterable[Hashable]) -> Tensor:
    """Numbers of groups, int64 (N): samples with an equal mark of any kind are in one group."""
    leader = list(range(count))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    for kind in marks:
        first: dict[Hashable, int] = {}
        for index, mark in enumerate(kind):
            one, other = find(first.setdefault(mark, index)), find(index)
            leader[max(one, other)] = min(one, other)
    return torch.tensor([find(index) for index in range(count)])


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
