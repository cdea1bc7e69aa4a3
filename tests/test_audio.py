"""Audio tasks: files of any kind become tokens once; copies never straddle a split; bad files are named."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from attemper.errors import ParameterError
from attemper.tasks import DataError, SequenceShape, open_task, prepare, verify
from attemper.tasks.audio import preparing
from attemper.tasks.audio.cache import FOLDER
from attemper.tasks.split import divide
from attemper.tasks.telling import DataWarning, listening
from sounds import esc50, genres, tone, write

SHORT = "seconds=1, bands=16"


class Heard:
    """Remembers what tasks tell."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.notes: list[str] = []

    def progress(self, what: str, done: int, total: int) -> None:
        self.steps.append((what, done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


def opened(text: str, root: Path) -> tuple[Any, Heard]:
    heard = Heard()
    with listening(heard):
        return open_task(text, root), heard


def parts(task: Any, seed: int = 0) -> list[Any]:
    return [*task.split(seed, 0.3), task.test()]


def clips(source: Any) -> list[bytes]:
    return [clip.numpy().tobytes() for clip in source.mel]


# -------------------------------------------------------------------------------------------------------------- shapes
def test_a_clip_of_30_seconds_has_120_tokens_of_8_frames(tmp_path: Path) -> None:
    genres(tmp_path / "genres", each=3)
    task = open_task("audio:genres", tmp_path)
    assert task.shape == SequenceShape(tokens=120, features=8 * 64, classes=2)
    stored = task.test().mel
    assert stored.shape[1:] == (960, 64)
    assert task.to_input(stored).shape == (len(stored), 120, 512)


def test_tokens_are_neighbouring_frames_with_every_band_normalised(tmp_path: Path) -> None:
    genres(tmp_path / "genres")
    task = open_task(f"audio:genres({SHORT}, tokens=8)", tmp_path)
    mel = torch.cat([part.mel for part in task.split(0, 0.3)])
    inputs = task.to_input(mel).reshape(len(mel), 32, 16)
    mean, deviation = mel.float().mean((0, 1)), mel.float().std((0, 1), correction=0)
    torch.testing.assert_close(inputs, (mel.float() - mean) / deviation, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(task.to_input(mel)[:, 1], inputs[:, 4:8].flatten(1))


def test_tokens_that_do_not_divide_the_frames_are_refused_with_those_that_do(tmp_path: Path) -> None:
    genres(tmp_path / "genres")
    with pytest.raises(DataError, match=r"32 frames cannot be cut into 7 equal tokens; say tokens= one of .*8"):
        open_task(f"audio:genres({SHORT}, tokens=7)", tmp_path)


@pytest.mark.parametrize(("ending", "rate", "channels"), [("wav", 44_100, 2), ("flac", 11_025, 1), ("au", 22_051, 3)])
def test_formats_rates_and_channels_give_the_same_spectrogram(
    tmp_path: Path, ending: str, rate: int, channels: int
) -> None:
    for name, hertz in (("low", 400), ("high", 1500)):
        for take in range(3):
            write(tmp_path / "plain" / name / f"{take}.wav", tone(hertz + 50 * take, seed=take))
            samples = tone(hertz + 50 * take, rate=rate, channels=channels, seed=take)
            write(tmp_path / "odd" / name / f"{take}.{ending}", samples, rate)
    plain, odd = (open_task(f"audio:{name}({SHORT})", tmp_path).test().mel.int() for name in ("plain", "odd"))
    loud = plain > 200  # the tone; the noise differs
    assert loud.any()
    assert float((plain - odd)[loud].abs().float().mean()) < 3


# -------------------------------------------------------------------------------------------------------------- splits
def test_copies_are_never_on_two_sides_of_a_split(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres", each=8)
    for copy, original in (("blues/copy1", "blues/blues.00000"), ("jazz/copy2", "blues/blues.00001")):
        (folder / f"{copy}.wav").write_bytes((folder / f"{original}.wav").read_bytes())
    samples, rate = soundfile.read(folder / "jazz" / "jazz.00003.wav", dtype="int16")
    write(folder / "jazz" / "again.flac", samples, rate)  # the same sound in another container
    task = open_task(f"audio:genres({SHORT})", tmp_path)
    for seed in range(8):
        held = [clips(part) for part in parts(task, seed)]
        assert sum(map(len, held)) == 19
        assert len(set().union(*held)) == 16
        for one in range(3):
            for other in range(one):
                assert not set(held[one]) & set(held[other])


@pytest.mark.parametrize("seed", range(5))
def test_groups_stay_together_and_classes_keep_their_proportions(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    targets = torch.arange(200) % 4
    groups = torch.arange(200)
    groups[150:] = torch.randint(0, 150, (50,), generator=draw)
    kept, held = divide(targets, 60, seed, groups)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(200))
    assert not set(groups[kept].tolist()) & set(groups[held].tolist())
    assert abs(len(held) - 60) <= 8
    assert all(abs(count - 15) <= 6 for count in torch.bincount(targets[held]).tolist())
    assert torch.equal(divide(targets, 60, seed, groups)[1], held)


def test_samples_that_are_alone_are_split_as_without_groups() -> None:
    targets = torch.arange(50) % 3
    for plain, grouped in zip(divide(targets, 13, 4), divide(targets, 13, 4, torch.arange(50)), strict=True):
        assert torch.equal(plain, grouped)


def test_a_class_of_large_groups_has_one_in_either_part() -> None:
    targets, groups = torch.zeros(12, dtype=torch.long), torch.arange(12) // 4
    kept, held = divide(targets, 2, 0, groups)
    assert (len(kept), len(held)) == (8, 4)


def test_a_folder_with_train_and_test_keeps_them_and_leaves_out_copies_of_test_clips(tmp_path: Path) -> None:
    genres(tmp_path / "set" / "train", each=5)
    genres(tmp_path / "set" / "test", each=1)  # the first of every class again
    write(tmp_path / "set" / "test" / "jazz" / "new.wav", tone(3000))
    task, heard = opened(f"audio:set({SHORT})", tmp_path)
    assert [len(part) for part in parts(task)] == [6, 2, 3]
    assert heard.notes == [f"Left out, since the test set of '{tmp_path / 'set'}' holds copies: 2 training clips."]


def test_the_named_fold_of_esc50_is_the_test_set_and_recordings_stay_whole(tmp_path: Path) -> None:
    folder = esc50(tmp_path / "ESC-50-master")
    task = open_task("esc50:ESC-50-master(fold=2, seconds=1, bands=16)", tmp_path)
    assert task.classes == ("kind0", "kind1", "kind2")
    expected = {soundfile.read(file)[0].tobytes() for file in (folder / "audio").glob("2-*")}
    assert len(task.test()) == len(expected) == 12
    train, validation, _ = parts(task)
    assert len(train) + len(validation) == 48
    assert not set(train.groups.tolist()) & set(validation.groups.tolist())
    assert len(set(train.groups.tolist())) * 2 == len(train), "the two cuts of a recording are one group"
    other = open_task("esc50:ESC-50-master(fold=3, seconds=1, bands=16)", tmp_path)
    assert other.fingerprint != task.fingerprint
    assert not set(clips(task.test())) & set(clips(other.test()))


# --------------------------------------------------------------------------------------------------------------- cache
def test_files_are_decoded_once_and_the_second_start_opens_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genres(tmp_path / "genres")
    first, heard = opened(f"audio:genres({SHORT})", tmp_path)
    assert [step for step in heard.steps if step[0] == "computing spectrograms"] == [
        ("computing spectrograms", done, 12) for done in range(13)
    ]
    monkeypatch.setattr(preparing, "read", None)
    monkeypatch.setattr(preparing.hashlib, "file_digest", None)
    second, heard = opened(f"audio:genres({SHORT})", tmp_path)
    assert heard.steps == []
    assert second.fingerprint == first.fingerprint
    assert torch.equal(second.test().mel, first.test().mel)


def test_touched_files_are_hashed_again_and_changed_ones_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = genres(tmp_path / "genres")
    first = open_task(f"audio:genres({SHORT})", tmp_path)
    os.utime(folder / "jazz" / "jazz.00000.wav", (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "read", None)
        touched, heard = opened(f"audio:genres({SHORT})", tmp_path)
    assert {what for what, _, _ in heard.steps} == {"reading files"}
    assert touched.fingerprint == first.fingerprint
    write(folder / "jazz" / "jazz.00000.wav", tone(3000))
    changed, heard = opened(f"audio:genres({SHORT})", tmp_path)
    assert {what for what, _, _ in heard.steps} == {"reading files", "computing spectrograms"}
    assert changed.fingerprint != first.fingerprint
    longer = open_task("audio:genres(seconds=2, bands=16)", tmp_path)
    assert longer.fingerprint != changed.fingerprint


def test_memory_holds_a_few_clips_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genres(tmp_path / "genres", each=20, rate=16_000)
    started: list[int] = []
    ahead: list[int] = []

    class Watching(Heard):
        def progress(self, what: str, done: int, total: int) -> None:
            if what == "computing spectrograms":
                ahead.append(len(started) - done)

    real = preparing.read
    monkeypatch.setattr(preparing, "read", lambda file, seconds: (started.append(1), real(file, seconds))[1])
    with listening(Watching()):
        open_task(f"audio:genres({SHORT})", tmp_path)
    assert len(started) == 40
    assert max(ahead) <= 2 * preparing.WORKERS + 1


@pytest.mark.parametrize("harm", ["bytes", "truncated", "description", "missing"])
def test_a_damaged_cache_is_set_aside_and_made_again(tmp_path: Path, harm: str) -> None:
    genres(tmp_path / "genres")
    before = open_task(f"audio:genres({SHORT})", tmp_path).test().mel
    [mel], [meta] = ((tmp_path / FOLDER).glob(f"*.{kind}") for kind in ("mel", "json"))
    if harm == "bytes":
        mel.write_bytes(mel.read_bytes()[:-1] + b"\x07")
    elif harm == "truncated":
        mel.write_bytes(mel.read_bytes()[:1000])
    elif harm == "missing":
        mel.unlink()
    else:
        meta.write_text("{")
    task, heard = opened(f"audio:genres({SHORT})", tmp_path)
    assert torch.equal(task.test().mel, before)
    assert "is damaged" in heard.notes[0]
    assert list((tmp_path / FOLDER).glob("*.json.corrupt-1"))
    assert opened(f"audio:genres({SHORT})", tmp_path)[1].notes == []


def test_an_interrupted_preparation_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genres(tmp_path / "genres")

    def stopped(file: Path, seconds: int) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "read", stopped)
        with pytest.raises(KeyboardInterrupt):
            open_task(f"audio:genres({SHORT})", tmp_path)
    assert {each.suffix for each in (tmp_path / FOLDER).iterdir()} == {".stamp"}
    task, heard = opened(f"audio:genres({SHORT})", tmp_path)
    assert len(task.test()) == 2
    assert heard.notes == []


def test_a_data_root_that_cannot_be_written_is_refused_with_a_way_out(tmp_path: Path) -> None:
    genres(tmp_path / "genres")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"spectrograms are kept, cannot be written: .* Name another data root"):
        open_task(f"audio:{tmp_path / 'genres'}({SHORT})", tmp_path / "file")


# ----------------------------------------------------------------------------------------------------------- bad files
def test_files_that_cannot_be_read_are_named_skipped_and_counted(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres")
    (folder / "jazz" / "jazz.00054.wav").write_bytes(b"this is no sound")
    (folder / "jazz" / "nothing.wav").write_bytes(b"")
    write(folder / "blues" / "short.wav", np.zeros(0, np.float32))
    write(folder / "blues" / "nan.wav", np.full(100, np.nan, np.float32))
    soundfile.write(folder / "blues" / "nan.wav", np.full(100, np.nan, np.float32), 16_000, subtype="FLOAT")
    (folder / "blues" / "song.m4a").write_bytes(b"not for soundfile")
    task, heard = opened(f"audio:genres({SHORT})", tmp_path)
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
    again, heard = opened(f"audio:genres({SHORT})", tmp_path)
    assert heard.notes == [note], "told at every start, not only at the first"
    assert again.fingerprint == task.fingerprint


def test_without_a_listener_what_was_skipped_is_a_warning(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres")
    (folder / "jazz" / "jazz.00054.wav").write_bytes(b"")
    with pytest.warns(
        DataWarning, match=r"1 of 13 audio files .* is skipped: 'jazz/jazz.00054.wav' \(the file is empty"
    ):
        open_task(f"audio:genres({SHORT})", tmp_path)


def test_a_class_that_loses_all_of_its_files_is_an_error_that_names_one(tmp_path: Path) -> None:
    folder = genres(tmp_path / "genres")
    for file in (folder / "jazz").iterdir():
        file.write_bytes(b"")
    with pytest.raises(
        DataError, match=r"None of the files of class 'jazz' can be read, .*jazz.00000.wav': the file is"
    ):
        open_task(f"audio:genres({SHORT})", tmp_path)


def test_a_clip_shorter_than_a_token_is_filled_up_with_silence(tmp_path: Path) -> None:
    for name, hertz in (("low", 300), ("high", 900)):
        for take in range(3):
            write(tmp_path / "blips" / name / f"{take}.wav", tone(hertz + take, seconds=0.05, seed=take))
    mel = open_task(f"audio:blips({SHORT})", tmp_path).test().mel
    assert mel.shape[1:] == (32, 16)
    assert int(mel[:, :2].max()) == 255
    assert int(mel[:, 5:].max()) == 0


def test_a_long_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    from attemper.tasks.audio.reading import read

    samples, rate = read(write(tmp_path / "long.wav", tone(300, seconds=20, rate=8_000), 8_000), 1)
    assert (len(samples), rate) == (2 * 8_000, 8_000)


def test_an_unknown_class_is_named_with_a_file_of_it(tmp_path: Path) -> None:
    genres(tmp_path / "set" / "train")
    genres(tmp_path / "set" / "test", ("blues", "polka"))
    with pytest.raises(DataError, match=r"polka.00000.wav' is of class 'polka', which '.*train' does not have"):
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
        f"Left out, since they lie in no class folder: 1 audio files, '{folder / 'loose.wav'}' first."
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("kind1", "other", 1), "class 1 'kind1' in .*, and class 1 was 'other' before"),
        (lambda text: text.replace("filename", "file"), "It needs filename, fold, target, category and src_file"),
        (lambda text: text.replace(",2,", ",7,"), "counted from 0 without a gap"),
        (lambda text: text.replace(",1,2,", ",1,two,"), "cannot be read"),
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
    task, heard = opened("esc50:esc(seconds=1, bands=16)", tmp_path)
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


# -------------------------------------------------------------------------------------------------------- augmentation
def test_specaugment_hides_stretches_of_time_and_bands_and_nothing_else() -> None:
    task = open_task("tones")
    augmentation = task.augmentation("spec(time=0.2, freq=0.3, masks=1)")
    stored, targets = task.test().mel[:64], task.test().targets[:64]
    inputs, same = augmentation(stored, targets, classes=6, to_input=task.to_input, seed=1)
    assert torch.equal(same, targets)
    plain = task.to_input(stored).reshape(64, 64, 32)
    mel = inputs.reshape(64, 64, 32)
    hidden = mel == 0
    assert torch.equal(mel[~hidden], plain[~hidden])
    rows, columns = hidden.all(2), hidden.all(1)
    assert torch.equal(hidden, rows[:, :, None] | columns[:, None, :])
    for masks, longest in ((rows, 0.2 * 64), (columns, 0.3 * 32)):
        assert int(masks.sum(1).max()) <= longest
        assert float(masks.float().sum(1).mean()) == pytest.approx(longest / 2, rel=0.25)
        edges = masks.int().diff(dim=1).abs().sum(1)
        assert int(edges.max()) <= 2, "one stretch"
    again, _ = augmentation(stored, targets, classes=6, to_input=task.to_input, seed=1)
    assert torch.equal(again, inputs)


def test_an_augmentation_of_images_is_refused_on_sound() -> None:
    task = open_task("tones")
    with pytest.raises(ParameterError, match=r"There is no augmentation 'crop-flip' .* There are: none, spec, mixup"):
        task.augmentation("crop-flip")
    with pytest.raises(ParameterError, match="spec: time is 2; it must be a number, from 0 to 1"):
        task.augmentation("spec(2)")
    assert str(task.augmentation("spec(0.3) + mixup(0.2)")) == "spec(time=0.3)+mixup(alpha=0.2)"


def test_mixup_blends_tokens_and_classes() -> None:
    task = open_task("tones")
    stored, targets = task.test().mel[:8], task.test().targets[:8]
    inputs, mixed = task.augmentation("mixup")(stored, targets, classes=6, to_input=task.to_input, seed=0)
    assert inputs.shape == (8, 16, 128)
    torch.testing.assert_close(mixed.sum(1), torch.ones(8))


# --------------------------------------------------------------------------------------------------------------- tones
def test_tones_are_the_same_for_everybody_and_need_no_files(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = open_task("tones", tmp_path / "nowhere")
    assert task.shape == SequenceShape(tokens=16, features=128, classes=6)
    assert [len(part) for part in parts(task)] == [403, 173, 144]
    assert torch.bincount(task.test().targets).tolist() == [24] * 6
    assert prepare("tones(train=60, test=12)") == [
        "tones(test=12, train=60): 60 training samples and 12 test samples of 16 tokens × 128 features and of 6 classes"
    ]
    with pytest.raises(DataError, match="asks for 5000 training clips, and there are 576"):
        open_task("tones(train=5000)").split(0, 0.3)
