"""Sizes that nobody means, and things in the place of others: each is one line that names the limit or the thing."""

from __future__ import annotations

import re
import struct
import tomllib
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from attemper.errors import ParameterError, UnreadableError, pointed_at, quoted, shown
from attemper.files import MOST_BYTES, read_bytes, read_json, read_text
from attemper.lab.cli.complaints import EXTRAS, MOST_IN_A_LINE, MOST_LINES, complain
from attemper.lab.models import limits
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.sample_files import open_image
from attemper.lab.tracking.registry import INSTALL
from attemper.lab.training.devices import usable_device
from damage import told
from shards import picture

ROOT = Path(__file__).resolve().parents[1]


def one_line(words: list[str], *parts: str) -> None:
    code, _, err = told(words)
    assert code == 2, err
    assert err.count("\n") == 1, err
    assert all(part in err for part in parts), err


# -------------------------------------------------------------------------------------------------------------- images
def png(side: int) -> bytes:
    """The beginning of an image that would have so many pixels on each side."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for at in range(6):
            picture(at, label, (12, 10)).save(tmp_path / "photos" / name / f"{at}.png")
    return tmp_path / "photos"


VERIFY = ["data", "verify", "folder:photos(size=8)"]


def test_an_image_of_900_million_pixels_is_refused_before_it_is_decoded(photos: Path) -> None:
    (photos / "cat" / "3.png").write_bytes(png(30_000))
    one_line(VERIFY, "cat/3.png", "more than 178,956,970 pixels")
    with pytest.raises(UnreadableError, match="more than 178,956,970 pixels"):
        open_image(png(30_000))
    code, out, _ = told(["diagnose", "vit-digits", "--images", "photos", "--size", "8", "--probes", "entropy"])
    assert code == 0
    assert "1 image could not be decoded and was skipped: cat/3.png" in out


def test_a_folder_that_is_called_like_an_image_is_none(photos: Path) -> None:
    before = told(VERIFY)
    (photos / "cat" / "x.png").mkdir()
    assert told(VERIFY) == before
    assert before[0] == 0


@pytest.mark.parametrize("target", ["x.png", "nowhere.png"])
def test_a_link_in_the_place_of_an_image_that_leads_nowhere_is_named(photos: Path, target: str) -> None:
    (photos / "cat" / "x.png").symlink_to(target)
    one_line(VERIFY, "cat/x.png")


def test_a_class_folder_that_is_a_link_to_itself_is_named(photos: Path) -> None:
    (photos / "fox").symlink_to("fox")
    one_line(VERIFY, "photos/fox' is a link that leads nowhere, or to itself")


# ------------------------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("compare --seeds 1000000000", ["seeds is 1000000000; a plan has at most 1,000 seeds"]),
        ("compare --workers 99999", ["workers is 99999", "at most 1,024"]),
        ("compare --batch-size 99999999", ["batch_size is 99999999; it must be at most 1,000,000"]),
        ("plan check --lr 0.1 --seeds 1001", ["at most 1,000 seeds"]),
        ("plan estimate --gpus 1,99999999", ["from 1 to 1,000,000"]),
        ("plan estimate --gpus ²", ["from 1 to 1,000,000"]),
        ("plan estimate --steps 99999999", ["--steps is 99999999; it must be from 1 to 1,000,000"]),
        ("plan estimate --images 99999999999", ["train is 99999999999; it must be at most 100,000,000"]),
        ("train --seed 9999999999999999999", ["--seed is 9999999999999999999; it must be from 0"]),
        ("train --device cuda:99", ["device is 'cuda:99', and torch can use cpu"]),
        ("train --device nowhere", ["device is 'nowhere', and torch can use cpu"]),
        ("diagnose vit-digits --images . --size 99999", ["--size is 99999; it must be at most 8,192"]),
        ("diagnose vit-digits --images . --query 99999999,1", ["row and column of a patch"]),
        ("experiment skips --seeds 99999999", ["seeds is 99999999; it must be from 1 to 1,000"]),
        ("bench ops --threads 99999", ["threads must be at most 1,024"]),
        ("bench ops --shapes 1x1x99999999x8", ["unknown shape '1x1x99999999x8'"]),
        ("data verify wds:x-{0..99999999999}.tar", ["stands for 100,000,000,000 shards; at most 100,000"]),
        ("data verify audio:.(seconds=99999999)", ["seconds is 99999999; it must be at most 36,000"]),
        ("evaluate . --device cuda:99", ["device is 'cuda:99'"]),
        ("study work . --device cuda:99", ["device is 'cuda:99'"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_number_that_nobody_means_is_refused_with_the_limit(
    words: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    one_line(words.split(), *parts)
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_this_machine_has_is_taken() -> None:
    assert usable_device("cpu") == torch.device("cpu")
    with pytest.raises(ParameterError, match="nothing is computed on meta"):
        usable_device("meta")


SHAPE = InputShape(channels=1, height=8, width=8, classes=10)


def test_a_model_that_is_too_large_is_refused_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(each.numel() for each in build_model("vit-digits", SHAPE).parameters()) < limits.most_weights()
    monkeypatch.setattr(limits, "MOST_WEIGHTS", 20_000)
    with pytest.raises(ParameterError, match="'vit-digits' has more than 20,000 weights"):
        build_model("vit-digits", SHAPE)
    with pytest.raises(ParameterError, match="more than 20,000 weights"):
        build_model("timm:vit_tiny_patch16_224(patch_size=4)", SHAPE)
    monkeypatch.setattr(limits, "MOST_TENSORS", 2)
    with pytest.raises(ParameterError, match="'encoder' has more than 2 tensors of weights"), limits.limited("encoder"):
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.Linear(200, 200)  # outside, nobody counts


# --------------------------------------------------------------------------------------------------------------- files
def test_a_file_that_is_larger_than_its_kind_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # takes no room on the disk
    for read in (read_bytes, read_text, read_json):
        with pytest.raises(UnreadableError, match=r"large\.json' has more than 268,435,456 bytes"):
            read(tmp_path / "large.json")
    with pytest.raises(UnreadableError, match="it is no file"):
        read_bytes(Path("/dev/zero"))


# ------------------------------------------------------------------------------------------------------------- messages
def test_errors_show_a_part_of_a_long_text_and_the_place_in_it() -> None:
    text = "a" * 300 + "!" + "b" * 300
    column, line, mark = pointed_at(text, 300).split("\n")
    assert column == "(column 301)"
    assert line[mark.index("^")] == "!"
    assert len(line) < 130
    assert pointed_at("a\nb", 2) == "(column 3)\n  a�b\n    ^"
    assert quoted("x\x1b[31m") == "'x�[31m'"
    assert len(shown(list(range(1000)))) == len(shown("y" * 999)) == 120
    assert shown(10**5000) == "a int that is too large to be shown"


def test_a_complaint_is_cut_and_obeys_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    complain("x" * 9000 + "\n" + "\x1b[31m\n" + "\n".join(map(str, range(500))))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == MOST_LINES + 1
    assert len(said[0]) == MOST_IN_A_LINE + len("attemper: ")
    assert said[1] == r"\x1b[31m"
    assert said[-1] == "… and 442 more lines"


def test_without_memory_or_with_an_unread_error_of_a_file_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: BaseException) -> None:
        monkeypatch.setattr("attemper.lab.tasks.registry.verify", lambda *_: (_ for _ in ()).throw(error))

    raises(MemoryError("could not get 3 TB"))
    one_line(["data", "verify", "digits"], "not enough memory for this: could not get 3 TB")
    raises(PermissionError(13, "Permission denied", "photos/1.png"))
    one_line(["data", "verify", "digits"], "Permission denied: 'photos/1.png'")


# --------------------------------------------------------------------------------------------------------------- extras
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DISTRIBUTIONS = {"yaml": "pyyaml", "sklearn": "scikit-learn", "easy_vqa": "easy-vqa"}


def test_every_extra_that_is_named_anywhere_exists() -> None:
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = [page.read_text("utf-8") for page in pages]
    groups = [group for text in texts for group in re.findall(r"attemper\[([a-z0-9, ]+)\]", text)]
    named = {extra for group in groups for extra in re.split(", *", group)}
    assert {"study", "audio", "ray", "fa4"} <= named
    assert named <= set(PYPROJECT)
    assert set(EXTRAS.values()) <= set(PYPROJECT)


def test_every_extra_brings_the_package_that_it_is_named_for() -> None:
    for module, extra in EXTRAS.items():
        wanted = DISTRIBUTIONS.get(module, module)
        assert any(re.split("[>=<]", line)[0] == wanted for line in PYPROJECT[extra]), (module, extra)
    for install in INSTALL.values():
        assert not install.startswith("'attemper[") or install[len("'attemper[") : -2] in PYPROJECT


def test_a_package_that_no_extra_brings_is_named_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError(name="somebody.elses")
    monkeypatch.setattr("attemper.lab.tasks.registry.verify", lambda *_: (_ for _ in ()).throw(missing))
    one_line(["data", "verify", "digits"], "this needs 'somebody.elses', which is not installed: pip install somebody")
