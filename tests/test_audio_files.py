"""Audio that is not as it should be: files that cannot be read, wrong tables, wrong arrays. All of it is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from attemper.errors import UnreadableError
from attemper.lab.errors import DataError
from attemper.lab.tasks.audio import preparing
from attemper.lab.tasks.audio.reading import read
from attemper.lab.tasks.audio.signal import log_mel, resample
from attemper.lab.tasks.base import SequenceShape
from attemper.lab.tasks.notifications import DataWarning
from attemper.lab.tasks.registry import open_task, verify
from sounds import SHORT, clips, esc50, genres, opened, parts, tone, write


# ----------------------------------------------------------------------------------------------------------- bad files
def test_files_that_cannot_be_read_are_named_skipped_and_counted(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres")
    (folder / "jazz" / "jazz.00054.wav").write_bytes(b"this is no sound")
    (folder / "jazz" / "nothing.wav").write_bytes(b"")
    write(folder / "blues" / "short.wav", np.zeros(0, np.float32))
    write(folder / "blues" / "nan.wav", np.full(100, np.nan, np.float32))
    soundfile.write(folder / "blues" / "nan.wav", np.full(100, np.nan, np.float32), 16_000, subtype="FLOAT")
    (folder / "blues" / "song.m4a").write_bytes(b"not for soundfile")
    with pytest.raises(
        DataError, match=r"5 of 17 audio files in .* cannot be read: .*nan.wav.*nothing.wav.*broken=skip"
    ):
        open_task(f"audio:genres({SHORT})", tmp_path)
    task, heard = opened(f"audio:genres({SHORT}, broken=skip)", tmp_path)
    assert sum(map(len, parts(task))) == 12
    [note] = heard.notes
    assert note.startswith(f"5 of 17 audio files in '{folder}' cannot be read and are skipped: ")
    for said in (
        "'blues/nan.wav' (some of its samples are not finite numbers)",
        "'blues/short.wav' (it has no samples)",
        "'blues/song.m4a' (",
        "'jazz/jazz.00054.wav' (",
        "'jazz/nothing.wav' (the file is empty)",
    ):
        assert said in note
    again, heard = opened(f"audio:genres({SHORT}, broken=skip)", tmp_path)
    assert heard.notes == [note], "told at every start, not only at the first"
    assert again.fingerprint == task.fingerprint


def test_a_sound_that_breaks_moves_no_other_and_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres", each=10)
    whole = open_task(f"audio:genres({SHORT}, broken=skip)", tmp_path)
    before = [clips(part) for part in (whole.test(), *whole.split(0, 0.3))]
    held = next(file for file in sorted(folder.rglob("*.wav")) if clip_of(file) in before[0])
    held.write_bytes(b"")
    after, _ = opened(f"audio:genres({SHORT}, broken=skip)", tmp_path)
    assert clips(after.test()) == [clip for clip in before[0] if clip in set(clips(after.test()))]
    assert (len(after.test()), len(before[0])) == (3, 4)
    train, validation = after.split(0, 0.3)
    assert sorted(clips(train) + clips(validation)) == sorted(before[1] + before[2])
    assert after.fingerprint != whole.fingerprint


def test_what_one_machine_cannot_read_is_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an MP3 can be read depends on the libsndfile of a machine, and two of them may work on one study."""
    folder = genres(tmp_path / "genres")
    text = f"audio:{folder}({SHORT}, broken=skip)"
    here, _ = opened(text, tmp_path / "here")

    def poorer(file: Path, seconds: int) -> Any:
        if file.name == "jazz.00002.wav":
            raise UnreadableError("unknown format")
        return read(file, seconds)

    monkeypatch.setattr(preparing, "read", poorer)
    there, heard = opened(text, tmp_path / "there")
    assert "'jazz/jazz.00002.wav' (unknown format)" in heard.notes[0]
    assert there.fingerprint != here.fingerprint


def clip_of(file: Path) -> bytes:
    """The spectrogram of a file, as a task stores it."""
    samples, rate = read(file, 1)
    return log_mel(resample(samples, rate), 32, 16).numpy().tobytes()


def test_without_a_listener_what_was_skipped_is_a_warning(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres")
    (folder / "jazz" / "jazz.00054.wav").write_bytes(b"")
    with pytest.warns(
        DataWarning, match=r"1 of 13 audio files .* is skipped: 'jazz/jazz.00054.wav' \(the file is empty"
    ):
        open_task(f"audio:genres({SHORT}, broken=skip)", tmp_path)


def test_a_class_that_loses_all_of_its_files_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres")
    for file in (folder / "jazz").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match=r"none of the files can be read of 1 classes: 'jazz'"):
        open_task(f"audio:genres({SHORT}, broken=skip)", tmp_path)


def test_a_clip_shorter_than_a_token_is_filled_up_with_silence(tmp_path: Path) -> None:
    for name, hertz in (("low", 300), ("high", 900)):
        for take in range(3):
            write(tmp_path / "blips" / name / f"{take}.wav", tone(hertz + take, seconds=0.05, seed=take))
    mel = open_task(f"audio:blips({SHORT})", tmp_path).test().mel
    assert mel.shape[1:] == (32, 16)
    assert int(mel[:, :2].max()) == 255
    assert int(mel[:, 5:].max()) == 0


def test_a_long_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    samples, rate = read(write(tmp_path / "long.wav", tone(300, seconds=20, rate=8_000), 8_000), 1)
    assert (len(samples), rate) == (2 * 8_000, 8_000)


def test_classes_of_one_part_alone_are_all_named(tmp_path: Path) -> None:
    genres(tmp_path / "set" / "train", each=1)
    genres(tmp_path / "set" / "test", ("blues", "polka"), each=1)
    with pytest.raises(DataError, match="only 'train' has 'jazz'; only 'test' has 'polka'"):
        open_task(f"audio:set({SHORT})", tmp_path)


def test_classes_with_too_few_different_clips_are_refused(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres", each=6)
    for file in sorted((folder / "jazz").iterdir())[1:]:
        file.write_bytes((folder / "jazz" / "jazz.00000.wav").read_bytes())
    with pytest.raises(DataError, match=r"class 'jazz' has . of them; it needs at least 2"):
        open_task(f"audio:genres({SHORT})", tmp_path).split(0, 0.3)


def test_files_outside_of_class_folders_are_told(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres")
    write(folder / "loose.wav", tone(300))
    (folder / "bextract_single.mf").write_text("GTZAN has such lists")
    _, heard = opened(f"audio:genres({SHORT})", tmp_path)
    assert heard.notes == [
        f"Left out, since they lie in no class folder: 1 audio file, '{folder / 'loose.wav'}' first."
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace("kind1", "other", 1),
            r"4 of 15 rows .*: 'line 6' \(class 1 is 'kind1' here, and was",
        ),
        (lambda text: text.replace("filename", "file"), "it needs filename, fold, target, category, src_file"),
        (lambda text: text.replace(",2,", ",7,"), "counted from 0 without a gap"),
        (lambda text: text.replace(",1,2,", ",1,two,"), r"rows of .* cannot be read: .*its target is 'two'"),
    ],
)
def test_a_wrong_esc50_table_is_refused_with_the_row(tmp_path: Path, change: Any, message: str) -> None:
    table = esc50(tmp_path / "esc", recordings=1, takes=1) / "meta" / "esc50.csv"
    table.write_text(change(table.read_text()))
    with pytest.raises(DataError, match=message):
        open_task("esc50:esc(seconds=1)", tmp_path)


def test_esc50_names_what_is_missing(tmp_path: Path) -> None:
    folder = esc50(tmp_path / "esc", takes=1)
    (folder / "audio" / "3-3000-A-0.wav").unlink()
    table = folder / "meta" / "esc50.csv"
    table.write_text(table.read_text() + "odd.wav,x,0,kind0,False,1,A\nodd.wav,1,,kind0,False,1,A\n")
    with pytest.raises(DataError, match=r"2 of 32 rows .*'line 32' \(its fold is 'x'.*'line 33' \(it has no target"):
        open_task("esc50:esc(seconds=1, bands=16)", tmp_path)
    task, heard = opened("esc50:esc(seconds=1, bands=16, broken=skip)", tmp_path)
    assert "2 of 32 rows" in heard.notes.pop(0)
    assert "'audio/3-3000-A-0.wav' (there is no such file)" in heard.notes[0]
    assert len(task.test()) == 6
    with pytest.raises(DataError, match="fold is 6; ESC-50 has 5"):
        open_task("esc50:esc(fold=6)", tmp_path)
    with pytest.raises(DataError, match=r"esc50.csv' cannot be read"):
        open_task("esc50:.", tmp_path)
    with pytest.raises(DataError, match="'nowhere' is not a folder, neither under the data root"):
        open_task("audio:nowhere", tmp_path)


def test_a_missing_soundfile_is_answered_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genres(tmp_path / "genres")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"pip install 'attemper\[audio\]'"):
        open_task(f"audio:genres({SHORT})", tmp_path)
    assert open_task("tones").shape.classes == 6


# --------------------------------------------------------------------------------------------------- ready spectrograms
def mel_file(file: Path, **changes: Any) -> Path:
    draw = np.random.default_rng(0)
    arrays = {
        "mel": draw.integers(0, 256, (40, 16, 8), dtype=np.uint8),
        "labels": (np.arange(40) % 4).astype(np.uint8),
        "classes": np.array([b"a", b"b", b"c", b"d"]),
        "names": np.array([f"{at}.au".encode() for at in range(40)]),
        "same_as": np.where(np.arange(40) == 9, 5, np.arange(40)),
    }
    arrays.update(changes)
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return file


def test_a_ready_mel_file_is_a_task(tmp_path: Path) -> None:
    mel_file(tmp_path / "some.npz")
    task = open_task("mel:some.npz", tmp_path)
    assert task.shape == SequenceShape(tokens=2, features=64, classes=4)
    assert open_task("mel:some.npz(tokens=16)", tmp_path).shape.features == 8
    assert task.classes == ("a", "b", "c", "d")
    for seed in range(10):
        held = [set(part.groups.tolist()) for part in parts(task, seed)]
        assert sum(map(len, held)) == 39, "a clip and its copy have become separated"
    assert len(task.test()) == 8
    assert task.fingerprint != open_task(f"mel:{mel_file(tmp_path / 'o.npz', same_as=None)}", tmp_path).fingerprint
    assert verify("mel:some.npz", tmp_path) == [
        "mel:some.npz: 32 training samples and 8 test samples of 2 tokens × 64 features and of 4 classes"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mel": None}, "has no array 'mel'; it needs mel, labels and classes"),
        ({"mel": np.zeros((40, 16, 8))}, r"is float64 \(40, 16, 8\); it must be uint8"),
        ({"labels": np.zeros(39, int)}, "must be 40 whole numbers"),
        ({"labels": np.full(40, 4)}, "'0.au' of .* has the label 4, and there are 4 classes"),
        ({"same_as": np.full(40, -1)}, "its own number or that of an earlier one"),
        ({"classes": np.array(["a"])}, "must be at least 2"),
    ],
)
def test_a_wrong_mel_file_is_refused_with_what_is_wrong(tmp_path: Path, changes: Any, message: str) -> None:
    mel_file(tmp_path / "some.npz", **changes)
    with pytest.raises(DataError, match=message):
        open_task("mel:some.npz", tmp_path)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.npz").write_bytes(b"PK nonsense")
    with pytest.raises(DataError, match=r"is not an .npz file of arrays"):
        open_task("mel:some.npz", tmp_path)
    with pytest.raises(DataError, match=r"'none.npz' is not a file"):
        open_task("mel:none.npz", tmp_path)
