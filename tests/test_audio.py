"""Audio tasks: files of any kind become tokens once; copies never straddle a split; bad files are named."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from attemper.errors import ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks.audio import preparing
from attemper.lab.tasks.audio.cache import FOLDER
from attemper.lab.tasks.base import SequenceShape
from attemper.lab.tasks.notifications import listening
from attemper.lab.tasks.registry import open_task, prepare
from attemper.lab.tasks.split import divide
from sounds import SHORT, Heard, clips, esc50, genres, opened, parts, tone, write


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
    assert heard.notes == [
        f"Left out, since the test set of '{tmp_path / 'set'}' holds copies or others of their group: 2 audio files "
        "for training."
    ]


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
