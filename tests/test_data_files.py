"""Folders as people have them: broken files are all named, odd ones are read or refused, and none changes a split."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.tasks import image_files
from attemper.lab.tasks import source as memory
from attemper.lab.tasks.listing import files_in
from attemper.lab.tasks.registry import open_task, verify
from attemper.lab.tasks.source import decode
from pictures import picture, pictures
from sounds import opened


def rows(source: Any) -> list[bytes]:
    return [image.numpy().tobytes() for image in source.images]


# --------------------------------------------------------------------------------------------------------- broken files
def broken_pictures(folder: Path) -> dict[str, str]:
    """Files that are no images, and what is said of each."""
    whole = (folder / "cat" / "0.png").read_bytes()
    picture(0, 64, 64).save(folder / "dog" / "whole.jpg")
    jpeg = (folder / "dog" / "whole.jpg").read_bytes()
    contents = {
        "cat/empty.png": (b"", "the file is empty"),
        "cat/half.png": (whole[: len(whole) // 2], "truncated"),
        "cat/text.png": (b"no picture", "it is no image that Pillow knows"),
        "dog/half.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "dog/pointer.png": (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
        "dog/two\nlines.png": (b"x", "no image"),
    }
    for name, (data, _) in contents.items():
        (folder / name).write_bytes(data)
    os.symlink("gone.png", folder / "dog" / "link.png")
    os.symlink("loop.png", folder / "dog" / "loop.png")
    said = {name: reason for name, (_, reason) in contents.items()}
    return {**said, "dog/link.png": "No such file", "dog/loop.png": "Too many levels of symbolic links"}


def test_every_broken_image_is_named_at_once_with_its_reason(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "set")
    wrong = broken_pictures(folder)
    with pytest.raises(DataError) as caught:
        open_task("folder:set(size=8)", tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{len(wrong)} of {len(wrong) + 21} images in '{folder}' cannot be read: ")
    assert message.endswith("Repair or remove them, or say broken=skip to leave them out.")
    assert "\n" not in message
    listed = message.split("; ")
    for name, reason in wrong.items():
        shown = name.replace("\n", "\\n")
        assert any(f"'{shown}'" in each and reason in each for each in listed), name
    for index in range(20):
        (folder / "cat" / f"z{index}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"28 of 49 images .*; and 18 more\. Repair"):
        open_task("folder:set(size=8)", tmp_path)


def test_broken_images_are_skipped_on_request_told_and_in_the_fingerprint(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "set")
    clean = open_task("folder:set(size=8, broken=skip)", tmp_path)
    assert clean.fingerprint == open_task("folder:set(size=8)", tmp_path).fingerprint, "nothing was skipped"
    wrong = broken_pictures(folder)
    (folder / "dog" / "whole.jpg").unlink()
    task, heard = opened("folder:set(size=8, broken=skip)", tmp_path)
    assert len(heard.notes) == 1
    assert heard.notes[0].startswith(f"{len(wrong)} of {len(wrong) + 20} images in '{folder}' cannot be read and are ")
    assert task.notes == tuple(heard.notes), "results hold it"
    assert task.fingerprint != clean.fingerprint
    assert sum(map(len, task.split(0, 0.5))) + len(task.test()) == 20
    assert heard.notes[0] in verify("folder:set(size=8, broken=skip)", tmp_path)
    again, heard = opened("folder:set(size=8, broken=skip)", tmp_path)
    assert again.fingerprint == task.fingerprint
    assert len(heard.notes) == 1, "told at every start"
    with pytest.raises(ParameterError, match="broken is 'ship'; it must be 'refuse' or 'skip'"):
        open_task("folder:set(broken=ship)", tmp_path)


@settings(max_examples=8, deadline=None)
@given(broken=st.sets(st.integers(0, 19), min_size=1, max_size=6))
def test_whichever_images_break_the_test_set_keeps_the_others(tmp_path_factory: Any, broken: set[int]) -> None:
    root = tmp_path_factory.mktemp("breaking")
    files = sorted(pictures(root / "set").rglob("*.png"))
    whole = open_task("folder:set(size=8)", root)
    before = rows(whole.test())
    gone = {decode(files[at], 8).numpy().tobytes() for at in broken}
    for at in broken:
        files[at].write_bytes(b"broken")
    with pytest.raises(DataError, match=f"{len(broken)} of 20 images"):
        open_task("folder:set(size=8)", root)
    after = open_task("folder:set(size=8, broken=skip)", root)
    assert rows(after.test()) == [image for image in before if image not in gone]
    assert after.fingerprint != whole.fingerprint


def test_a_class_without_a_single_good_image_is_an_error_even_where_broken_ones_are_skipped(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "set", ("cat", "dog", "eel"))
    for file in (*(folder / "cat").iterdir(), *(folder / "eel").iterdir()):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="none of the files can be read of 2 classes: 'cat'; 'eel'"):
        open_task("folder:set(size=8, broken=skip)", tmp_path)


def test_images_are_examined_once_and_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path / "set")
    (folder / "cat" / "bad.png").write_bytes(b"bad")
    first, heard = opened("folder:set(size=8, broken=skip)", tmp_path)
    assert ("checking images", 21, 21) in heard.steps
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "_look", None)
        second, heard = opened("folder:set(size=8, broken=skip)", tmp_path)
    assert not [step for step in heard.steps if step[0] == "checking images"]
    assert second.fingerprint == first.fingerprint
    (folder / "dog" / "0.png").write_bytes(b"bad")
    assert "2 of 21 images" in opened("folder:set(size=8, broken=skip)", tmp_path)[1].notes[0]
    for cache in (tmp_path / ".attemper-cache").iterdir():
        cache.write_text('{"problems": {"0": 1}, "copies": []}')
    assert "2 of 21 images" in opened("folder:set(size=8, broken=skip)", tmp_path)[1].notes[0], "damaged: made again"
    elsewhere = tmp_path / "nowhere"
    assert "2 of 21 images" in opened(f"folder:{folder}(size=8, broken=skip)", elsewhere)[1].notes[0]
    assert not elsewhere.exists(), "nothing is made where nobody asked for it"


def test_an_image_that_breaks_after_it_was_examined_is_named(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "set")
    task = open_task("folder:set(size=8)", tmp_path)
    for file in folder.rglob("*.png"):
        file.write_bytes(b"bad")
    with pytest.raises(DataError, match=r"\.png' is not an image that can be read"):
        task.split(0, 0.5)


def test_broken_images_are_left_out_where_images_are_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pictures(tmp_path / "set")
    (folder / "cat" / "3.png").write_bytes(b"bad")
    text = "folder:set(size=8, broken=skip)"
    held = [len(part) for part in (*open_task(text, tmp_path).split(0, 0.5), open_task(text, tmp_path).test())]
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 100)
    lazy = open_task(text, tmp_path)
    parts = [*lazy.split(0, 0.5), lazy.test()]
    assert not parts[0].in_memory
    assert [len(part) for part in parts] == held
    for part in parts:
        part.workers = 0
        assert sum(len(targets) for _, targets in part.batches(torch.arange(len(part)), 4)) == len(part)


def test_the_command_line_answers_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pictures(tmp_path / "set")
    with open(os.path.join(os.fsencode(folder), b"cat", b"caf\xe9.png"), "wb") as file:
        file.write(b"bad")
    assert main(["data", "verify", "folder:set(size=8)", "--data", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("attemper: 1 of 21 images")
    assert r"'cat/caf\udce9.png'" in said.err
    assert said.err.count("\n") == 1
    assert main(["data", "verify", "folder:set(size=8, broken=skip)", "--data", str(tmp_path)]) == 0
    assert "1 of 21 images" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- odd images
def sixteen_bits() -> np.ndarray[Any, Any]:
    return np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040  # up to 65,520


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.pgm"])
def test_grey_images_of_16_bits_keep_their_shades(tmp_path: Path, name: str) -> None:
    Image.fromarray(sixteen_bits()).save(tmp_path / name)
    found = decode(tmp_path / name, 8)
    expected = torch.from_numpy((sixteen_bits() / 257).round().astype(np.uint8))
    assert torch.equal(found, expected.expand(3, -1, -1))


@pytest.mark.parametrize(
    ("mode", "name"),
    [("CMYK", "x.jpg"), ("P", "x.png"), ("L", "x.JPG"), ("1", "x.png"), ("LA", "x.png"), ("RGBA", "x.PNG")],
)
def test_other_kinds_of_pixels_are_converted(tmp_path: Path, mode: str, name: str) -> None:
    image = Image.new("RGB", (8, 8), (200, 40, 40)).convert(mode)
    image.save(tmp_path / name)
    expected = np.array(image.convert("RGB")).transpose(2, 0, 1).astype(int)
    found = decode(tmp_path / name, 8).numpy().astype(int)
    assert np.abs(found - expected).max() <= (3 if name.lower().endswith("jpg") else 0)


@pytest.mark.parametrize(("kind", "said"), [(np.float32, "floating-point numbers"), (np.int32, "whole numbers of 32")])
def test_pixels_whose_range_nobody_knows_are_refused(tmp_path: Path, kind: Any, said: str) -> None:
    folder = pictures(tmp_path / "set")
    Image.fromarray(np.ones((8, 8), kind)).save(folder / "cat" / "x.tif")
    with pytest.raises(DataError, match=f"'cat/x.tif' \\(its pixels are {said}.*8 or 16 bits"):
        open_task("folder:set", tmp_path)


def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    for name in ("x.gif", "x.webp", "x.png"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
        assert decode(tmp_path / name, 8).float().mean((1, 2)).tolist() == [255, 0, 0], name


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_the_way_they_are_seen(tmp_path: Path, orientation: int) -> None:
    from PIL import ImageOps

    folder = pictures(tmp_path / "set", each=4)
    photo = picture(7, 8, 8)
    exif = photo.getexif()
    exif[0x0112] = orientation
    photo.save(folder / "cat" / "photo.png", exif=exif)
    seen = ImageOps.exif_transpose(Image.open(folder / "cat" / "photo.png"))
    task, heard = opened("folder:set(size=8)", tmp_path)
    wanted = np.array(seen).transpose(2, 0, 1).tobytes()
    assert wanted in rows(task.test()) + [row for part in task.split(0, 0.5) for row in rows(part)]
    assert heard.notes == ["Images that are turned upright, as their EXIF data say: 1."] * (orientation > 1)


def test_turned_photographs_are_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path / "set", each=4)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(7).save(folder / "cat" / "photo.png", exif=exif)
    turned = open_task("folder:set(size=8)", tmp_path).fingerprint
    monkeypatch.setattr(image_files, "orientation", lambda image: 1)
    monkeypatch.setattr(image_files, "VERSION", -1)  # another cache
    assert open_task("folder:set(size=8)", tmp_path).fingerprint != turned


# ---------------------------------------------------------------------------------------------------------- odd folders
def test_hidden_files_and_folders_of_operating_systems_are_no_data(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "set")
    before = open_task("folder:set(size=8)", tmp_path).fingerprint
    for name in (".DS_Store", "cat/.DS_Store", "cat/Thumbs.db", "cat/._0.png", ".hidden/x.png", "cat/.cache/x.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    for name in ("__MACOSX/cat", "@eaDir", "cat/@eaDir", ".ipynb_checkpoints"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.png").write_bytes(b"x")
    os.symlink("..", folder / "dog" / "up")  # followed, it would lead to the cats
    os.symlink("self", folder / "dog" / "self")
    assert open_task("folder:set(size=8)", tmp_path).fingerprint == before


def test_nested_files_and_folders_that_look_like_files_are_entered(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "set", each=4)
    (folder / "cat" / "x.png" / "deep").mkdir(parents=True)
    picture(99).save(folder / "cat" / "x.png" / "deep" / "in.PNG")
    shutil.move(folder / "dog", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "dog")  # a class may lie somewhere else
    assert len(files_in(folder / "cat", (".png",))) == 5
    assert sum(map(len, open_task("folder:set(size=8)", tmp_path).split(0, 0.5))) == 7


@pytest.mark.parametrize("names", [("train", "valid"), ("Train", "Test"), ("training", "testing"), ("TRAIN", "Val")])
def test_parts_are_known_by_any_of_their_names(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        pictures(tmp_path / "set" / name, each=3)
    task = open_task("folder:set(size=8)", tmp_path)
    assert task.classes == ("cat", "dog")
    assert (sum(map(len, task.split(0, 0.5))), len(task.test())) == (6, 6)


def test_a_part_that_is_not_used_is_told(tmp_path: Path) -> None:
    for name in ("train", "test", "val"):
        pictures(tmp_path / "set" / name, each=3)
    task, heard = opened("folder:set(size=8)", tmp_path)
    assert len(task.test()) == 6
    assert heard.notes == [
        f"'{tmp_path / 'set' / 'val'}' is not used: 'test' is, and validation is split off training."
    ]


def test_accents_may_be_written_in_two_ways(tmp_path: Path) -> None:
    pictures(tmp_path / "set" / "train", ("caf\u00e9", "grüße aus Köln"), each=3)
    pictures(tmp_path / "set" / "test", ("cafe\u0301", "grüße aus Köln"), each=3)
    assert open_task("folder:set(size=8)", tmp_path).classes == ("caf\u00e9", "grüße aus Köln")


def test_a_folder_one_level_too_high_or_without_classes_is_answered_with_a_hint(tmp_path: Path) -> None:
    pictures(tmp_path / "set" / "images")
    with pytest.raises(DataError, match=r"has 1 class folder;.*Its only one, 'images', has 2: name that one instead"):
        open_task("folder:set", tmp_path)
    with pytest.raises(DataError, match=r"has 0 class folders.*It has 10 images itself.*label='\{label\}_\*'"):
        open_task("folder:set/images/cat", tmp_path)


def test_images_outside_of_class_folders_are_told(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "set")
    picture(5).save(folder / "loose.png")
    assert "1 image, " in opened("folder:set(size=8)", tmp_path)[1].notes[0]


def test_copies_are_on_one_side_and_those_in_two_classes_are_named(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "set", each=6)
    for index in range(6):
        shutil.copy(folder / "cat" / f"{index}.png", folder / "cat" / f"copy {index}.png")
    shutil.copy(folder / "cat" / "0.png", folder / "dog" / "same.png")
    task, heard = opened("folder:set(size=8)", tmp_path)
    for seed in range(5):
        parts = [set(rows(part)) for part in (*task.split(seed, 0.4), task.test())]
        assert sum(map(len, parts)) == 12, "an image and its copy have become separated"
    assert heard.notes[0] == "Copies of other files: 7. They are never on both sides of a split."
    assert heard.notes[1] == "The same file in different classes: 'cat/0.png' and 'dog/same.png'."


def test_copies_of_test_images_are_not_trained_on(tmp_path: Path) -> None:
    pictures(tmp_path / "set" / "train", each=4)
    pictures(tmp_path / "set" / "test", each=2)
    shutil.copy(tmp_path / "set/test/cat/0.png", tmp_path / "set/train/cat/again.png")
    task, heard = opened("folder:set(size=8)", tmp_path)
    assert (sum(map(len, task.split(0, 0.5))), len(task.test())) == (8, 4)
    assert heard.notes[-1].endswith("1 image for training.")
