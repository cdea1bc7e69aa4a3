"""Every script in examples/ runs as it is, on some of its data."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "digits")
pytestmark = [
    pytest.mark.filterwarnings("ignore"), pytest.mark.long,
]  # fmt: skip


@pytest.fixture
def example(request, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module(request.param)
    sys.modules.pop(request.param)


def default_recipe(module):
    return re.search(r'"--recipe", default="(.*)"', Path(module.__file__).read_text()).group(1)


@pytest.mark.parametrize("example", NAMES, indirect=True)
def test_every_example_trains_with_its_recipe(example, capfd):
    accuracy = example.main(default_recipe(example), epochs=1, samples=140)
    assert 0 <= accuracy <= 1


@pytest.mark.slow
@pytest.mark.parametrize("example", NAMES, indirect=True)
def test_every_example_learns_digits(example, capfd):
    assert example.main(default_recipe(example), epochs=20) > 0.8


def test_the_list_of_examples_is_whole():
    listed = re.findall(r"\]\((\w+)\.py\)", (FOLDER / "README.md").read_text())
    assert sorted(listed) == sorted([*NAMES, "digits"])
