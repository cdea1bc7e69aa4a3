"""Tasks and models of other packages: found by their entry points, used like Attemper's own, and refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attemper.errors import AttemperError, ParameterError
from attemper.lab import entry_points
from attemper.lab.cli import main
from attemper.lab.models.registry import build_model, list_models
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.registry import list_tasks, open_task

CODE = """
import torch
from torch import nn
from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.source import MemorySource
from attemper.lab.tasks.fingerprint import of_parts

def stripes(name, text, root, *, size: int = 8, train: int | None = None, loud: bool = False):
    def make(count):
        targets = torch.arange(count) % 2
        images = torch.zeros(count, 1, size, size, dtype=torch.uint8)
        images[targets == 0, :, ::2] = 200
        images[targets == 1, :, :, ::2] = 200
        return MemorySource(images, targets)
    return ImageTask(
        name=name, shape=InputShape(1, size, size, 2), fingerprint=of_parts(text, str(size), str(root)),
        pool=lambda: make(40), held_out=lambda: make(10), classes=("rows", "columns"), train=train,
    )

class Flat(nn.Module):
    def __init__(self, shape, width: int = 8):
        super().__init__()
        self.shape = shape
        self.embed = nn.Linear(shape.width, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, shape.classes)

    def forward(self, x):
        return self.head(self.layer(self.embed(x.flatten(1, 2))).mean(1))

def too_few(name): ...
def nothing(*given): ...
NUMBER = 3
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes a package `outside` with these entry points, as text of an entry_points.txt."""
    (tmp_path / "outside.py").write_text(CODE)
    (tmp_path / "outside_broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)

    def make(tasks: str = "", models: str = "", package: str = "outside") -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[attemper.tasks]\n{tasks}\n[attemper.models]\n{models}\n")
        entry_points._entries.cache_clear()

    yield make
    entry_points._entries.cache_clear()
    for name in ("outside", "outside_broken"):
        sys.modules.pop(name, None)


SHAPE = InputShape(1, 8, 8, 2)


def test_a_task_and_a_model_from_outside_train_like_our_own(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("stripes = outside:stripes", "flat = outside:Flat")
    words = ["train", "--task", "stripes:wide(size=6)", "--model", "flat(width=4)", "--recipe", "dropkey(0.1)"]
    assert main([*words, "--epochs", "1", "--data", str(tmp_path), "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["spec"]["task"], result["spec"]["model"]) == ("stripes:wide(size=6)", "flat(width=4)")
    assert 0 <= result["test"]["accuracy"] <= 1
    assert main(["data", "verify", "stripes"]) == 0
    assert "stripes: 40 training samples and 10 test samples of 1 × 8 × 8 and of 2 classes" in capsys.readouterr().out


def test_they_are_listed_and_suggested_and_their_options_are_checked(install: Install) -> None:
    install("stripes = outside:stripes", "flat = outside:Flat")
    assert list_tasks()["stripes"] == "from outside:stripes, package outside 1.0"
    assert list_models()["flat"] == "from outside:Flat, package outside 1.0"
    assert "outside" not in sys.modules, "to be listed, nothing is imported"
    with pytest.raises(ParameterError, match=r"Did you mean 'stripes'\? There are: digits, .*, stripes"):
        open_task("stirpes")
    with pytest.raises(ParameterError, match=r"Did you mean 'flat'\? There are: vit-digits, .*, flat"):
        build_model("flot", SHAPE)
    with pytest.raises(ParameterError, match=r"no option 'sise'. Did you mean 'size'\? Options: size, train, loud."):
        open_task("stripes(sise=4)")
    with pytest.raises(ParameterError, match=r"loud is 1; it must be true or false"):
        open_task("stripes(loud=1)")
    with pytest.raises(ParameterError, match=r"no option 'depth'.* Options: width."):
        build_model("flat(depth=2)", SHAPE)


def test_without_the_package_they_are_unknown() -> None:
    with pytest.raises(ParameterError, match="There is no task 'stripes'"):
        open_task("stripes")
    with pytest.raises(ParameterError, match="There is no model 'flat'"):
        build_model("flat", SHAPE)


def test_a_name_of_our_own_is_refused_and_other_names_go_on(install: Install) -> None:
    install("digits = outside:stripes\nfolder = outside:stripes", "vit-digits = outside:Flat\ntimm = outside:Flat")
    for name in ("digits", "folder:flowers"):
        kind = name.partition(":")[0]
        text = rf"Entry point '{kind}' of attemper.tasks \(package outside 1.0\) has a name that is Attemper's own"
        with pytest.raises(AttemperError, match=text):
            open_task(name)
    for name in ("vit-digits", "timm"):
        with pytest.raises(AttemperError, match=r"attemper.models \(package outside 1.0\) has a name that is Attemper"):
            build_model(name, SHAPE)
    assert open_task("noise(size=8, train=20, test=20)").name.startswith("noise")
    build_model("convmixer(width=4, depth=1)", SHAPE)


def test_a_name_that_two_packages_add_is_refused(install: Install) -> None:
    install("stripes = outside:stripes")
    install("stripes = outside:stripes", package="another")
    with pytest.raises(AttemperError, match=r"\(package .* 1.0, package .* 1.0\) is there 2 times; remove"):
        open_task("stripes")


@pytest.mark.parametrize("thing", ["NUMBER", "too_few", "nothing"])
def test_what_is_no_task_and_no_model_is_refused_with_what_would_be_right(thing: str, install: Install) -> None:
    install(f"odd = outside:{thing}", f"odd = outside:{thing if thing != 'too_few' else 'stripes'}")
    right = "it must be a function of {} and of options with defaults that gives a {}"
    for use, group, takes in (
        (lambda: open_task("odd"), "tasks", right.format("name, text, root", "Task")),
        (lambda: build_model("odd", SHAPE), "models", right.format("shape", "Module")),
    ):
        with pytest.raises(AttemperError) as caught:
            use()
        assert str(caught.value).startswith(f"Entry point 'odd' of attemper.{group} (package outside 1.0) ")
        assert takes in str(caught.value)


def test_a_package_that_cannot_be_imported_fails_only_where_it_is_used(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("stripes = outside_broken:stripes", "flat = outside:Flot")
    assert main(["data", "verify", "noise(size=8, classes=2, train=20, test=20)"]) == 0
    assert "stripes" in list_tasks()
    build_model("vit-digits(depth=1)", SHAPE)
    assert main(["data", "verify", "stripes"]) == 2
    said = capsys.readouterr().err
    assert "Entry point 'stripes' of attemper.tasks (package outside 1.0) cannot be loaded: " in said
    assert "ModuleNotFoundError: No module named 'no_such_package'" in said
    with pytest.raises(AttemperError, match=r"'flat' of attemper.models .* AttributeError: .*'Flot'"):
        build_model("flat", SHAPE)
