"""Classes in the names of files: a small language of patterns, with groups that are never separated."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.tasks.name_pattern import NamePattern
from attemper.lab.tasks.registry import open_task, preview
from pictures import picture, pictures
from sounds import SHORT, opened, tone, write

WORDS = st.text(st.characters(categories=("L", "N"), exclude_characters="_/"), min_size=1, max_size=8)


@given(label=WORDS, group=WORDS, number=st.integers(0, 10**6), rest=WORDS)
def test_a_pattern_gives_back_what_a_name_was_made_of(label: str, group: str, number: int, rest: str) -> None:
    assert NamePattern("{label}_{group}_*.wav").match(f"{label}_{group}_{rest}_{number}.wav") == (label, group)
    assert NamePattern("{group}/{label}_#.*").match(f"{group}/{label}_{number}.{rest}") == (label, group)
    assert NamePattern("*_{label}.png").match(f"_{label}.PNG") == (label, None)
    assert NamePattern("{label}_#.png").match(f"{label}_{group}_{number}.png") == (f"{label}_{group}", None)
    assert NamePattern("{label}_*").match(f"{label}/{group}_") is None


@given(st.text(alphabet="ab{}labegroup*#_/.()[]+?\\^$|", max_size=20), WORDS)
def test_any_text_is_a_pattern_or_refused_as_one(text: str, name: str) -> None:
    with contextlib.suppress(ParameterError):
        found = NamePattern(text).match(name)
        assert found is None or found.label in name


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.wav", "it has no {label}"),
        ("{label}_{lable}.wav", "it has the field {lable}"),
        ("{label}_{label}.wav", "it has {label} twice"),
        ("{label}*.wav", "two parts of any length stand side by side"),
        ("{label}{group}.wav", "two parts of any length stand side by side"),
        ("{label}_}.wav", "it has a '}' alone"),
    ],
)
def test_a_pattern_that_says_nothing_is_refused(tmp_path: Path, pattern: str, message: str) -> None:
    pictures(tmp_path / "set")
    with pytest.raises(ParameterError, match=message):
        open_task(f"folder:set(label='{pattern}')", tmp_path)


def spoken(folder: Path, digits: int = 3, speakers: int = 4, takes: int = 3) -> Path:
    for digit in range(digits):
        for at, speaker in enumerate(("jackson", "nicolas", "theo", "yweweler")[:speakers]):
            for take in range(takes):
                write(
                    folder / f"{digit}_{speaker}_{take}.wav",
                    tone(200 * 2**digit + at, 0.1, seed=100 * digit + 10 * at + take),
                )
    return folder


def test_flat_sounds_have_the_class_of_their_name_and_speakers_stay_together(tmp_path: Path) -> None:
    spoken(tmp_path / "recordings")
    task = open_task(f"audio:recordings({SHORT}, label='{{label}}_{{group}}_*.wav')", tmp_path)
    assert task.classes == ("0", "1", "2")
    for seed in range(4):
        parts = [*task.split(seed, 0.4), task.test()]
        assert [len(part) for part in parts] == [18, 9, 9], "one speaker of four for test, one of three to validate"
        assert all(torch.bincount(part.targets).tolist() == [len(part) // 3] * 3 for part in parts)
        speakers = [set(part.groups.tolist()) for part in parts]
        assert sum(map(len, speakers)) == len(set.union(*speakers)) == 4
    plain = open_task(f"audio:recordings({SHORT}, label='{{label}}_*.wav')", tmp_path)
    assert len(plain.test()) == 7
    assert plain.fingerprint != task.fingerprint


def test_flat_images_have_the_class_of_their_name(tmp_path: Path) -> None:
    (tmp_path / "set" / "test").mkdir(parents=True)
    (tmp_path / "set" / "train").mkdir()
    for part in ("train", "test"):
        for label in (2, 10, "basset_hound"):
            for index in range(3):
                picture(zlib.crc32(f"{part}{label}{index}".encode())).save(
                    tmp_path / "set" / part / f"{label}_{index}.png"
                )
    task = open_task("folder:set(size=8, label='{label}_#.png')", tmp_path)
    assert task.classes == ("2", "10", "basset_hound"), "numbers by their value"
    assert (sum(map(len, task.split(0, 0.5))), len(task.test())) == (9, 9)
    for file in (tmp_path / "set" / "test").glob("2_*"):
        file.unlink()
    with pytest.raises(DataError, match="test' has none of 1 of 3 classes: '2'"):
        open_task("folder:set(size=8, label='{label}_#.png')", tmp_path)


def test_names_that_do_not_fit_are_all_listed_and_skipped_on_request(tmp_path: Path) -> None:
    folder = spoken(tmp_path / "recordings", takes=2)
    for index in range(12):
        write(folder / f"extra{index}.wav", tone(100, 0.1))
    with pytest.raises(
        DataError, match=r"12 of 36 audio files .* do not fit the pattern .*'extra0.wav'.*and 2 more.*Corr"
    ):
        open_task("audio:recordings(label='{label}_*_#.wav')", tmp_path)
    task, heard = opened(f"audio:recordings({SHORT}, label='{{label}}_*_#.wav', broken=skip)", tmp_path)
    assert sum(map(len, task.split(0, 0.5))) + len(task.test()) == 24
    assert "12 of 36 audio files" in heard.notes[0]
    with pytest.raises(DataError, match="are of 0 classes; there must be at least 2"):
        open_task("audio:recordings(label='x{label}', broken=skip)", tmp_path)


def test_a_preview_shows_classes_and_opens_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    for name in ("3_jackson_0.wav", "3_theo_1.wav", "7_theo_0.wav"):
        (folder / name).write_bytes(b"never opened")
    text = "audio:recordings(label='{label}_{group}_*')"
    assert preview(text, tmp_path) == [
        f"{text}: 3 audio files of 2 classes and of 2 groups: jackson; theo",
        "  3: 2, '3_jackson_0.wav' first",
        "  7: 1, '7_theo_0.wav' first",
    ]
    assert main(["data", "preview", text, "--data", str(tmp_path)]) == 0
    assert "7: 1," in capsys.readouterr().out
    assert main(["data", "preview", "digits"]) == 2
    assert "folder:PATH and audio:PATH can" in capsys.readouterr().err
    for index in range(40):
        (folder / f"class{index}_x_0.wav").write_bytes(b"")
    assert preview(text, tmp_path)[-1] == "  and 12 more classes"
