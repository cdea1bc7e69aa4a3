"""What a package index shows and installs: links that lead somewhere, extras that exist, a wheel that is whole."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def absolute():
    """The function of setup.py, without its setup."""
    source = (ROOT / "setup.py").read_text()
    source = source.replace("from setuptools import setup\n", "").partition("\nurls = ")[0]
    space = {"__file__": str(ROOT / "setup.py")}
    exec(source, space)
    return space["absolute"]


def test_every_link_of_the_readme_holds_on_a_package_index():
    home, text = PROJECT["urls"]["Repository"], (ROOT / "README.md").read_text()
    links = LINK.findall(absolute()(text, home))
    assert len(links) == len(LINK.findall(text)) > 20
    for link in links:
        assert link.startswith(("https://", "#")), link
        path = re.match(rf"{re.escape(home)}/(?:blob|tree)/main/([^#]*)", link)
        assert path is None or (ROOT / path[1]).exists(), link


def test_links_that_are_whole_already_and_those_within_the_page_stay():
    given = "[a](https://x.org/y) [b](#there) [c](docs/a.md#b) [d](docs/) `x[0](y)`"
    assert absolute()(given, "https://h.org/p").startswith(
        "[a](https://x.org/y) [b](#there) [c](https://h.org/p/blob/main/docs/a.md#b) [d](https://h.org/p/tree/main/docs/)"
    )


def test_every_url_is_there():
    assert {"Homepage", "Documentation", "Repository", "Changelog", "Issues"} <= set(PROJECT["urls"])


def test_every_extra_that_anything_names_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*")]
    texts = [path.read_text() for path in [*pages, *ROOT.glob("src/**/*.py")] if path.is_file()]
    named = {
        extra.strip()
        for text in texts
        for group in re.findall(r"(?:attemper|-e \"\.)\[([a-z0-9_, ]+)\]", text)
        for extra in group.split(",")
    }
    assert {"study", "lightning", "onnx", "peft"} <= named
    assert named <= set(PROJECT["optional-dependencies"]), named - set(PROJECT["optional-dependencies"])


def test_every_extra_is_installed_for_the_tests_or_needs_hardware():
    extras = PROJECT["optional-dependencies"]
    whole = re.fullmatch(r"attemper\[(.*)\]", extras["test"][0])[1].split(",")
    inside = {name for extra in whole for each in extras[extra] for name in re.findall(r"attemper\[(.*)\]", each)}
    inside = {name for group in inside for name in group.split(",")}
    assert set(extras) - set(whole) - inside == {"test", "fa4"}


@pytest.mark.slow
def test_the_wheel_is_whole(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy / name)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*words, str(copy)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        inside = set(files.namelist())
        about = next(files.read(name).decode() for name in inside if name.endswith("METADATA"))
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").glob("**/*.py")}
    assert sources <= inside
    assert {"attemper/py.typed", "attemper/lab/report/page.css", "attemper/lab/report/page.js"} <= inside
    assert "Project-URL: Repository" in about
    assert "](docs/" not in about
