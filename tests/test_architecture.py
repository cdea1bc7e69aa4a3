"""The pages about the source tree hold: their paths exist, their picture and their rules are those of the source."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "attemper"
LAB = SOURCE / "lab"
PAGE = ROOT / "docs" / "architecture.md"
PAGES = [PAGE, ROOT / "docs" / "adding.md", ROOT / "CONTRIBUTING.md"]
FILE = r"[\w.-]+(?:/[\w.-]+)*\.(?:py|md|toml|css|js|lock)"
FOLDER = r"(?:[\w.-]+/)+"
WRITTEN = {"__init__", "__main__", "__pycache__", "lab", "py"}
"""Names in `src/attemper` that are no rooms."""


def paths_in(text: str) -> set[str]:
    """The files and folders that a page names in inline code and in listings, placeholders such as <name> left out."""
    text = re.sub(r"^```(?:python|mermaid|toml|sh)\n.*?^```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    listings = re.findall(r"^```text\n(.*?)^```\s*$", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```\s*$", "", text, flags=re.MULTILINE | re.DOTALL))
    spans += [word for listing in listings for word in listing.split()]
    return {span.rstrip(";,:") for span in spans if re.fullmatch(f"{FILE}|{FOLDER}", span.rstrip(";,:"))}


def exists(path: str) -> bool:
    """Whether a path leads somewhere from the root of the repository, from the library or from the laboratory."""
    return any((start / path).exists() for start in (ROOT, SOURCE, LAB))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = paths_in(page.read_text(encoding="utf-8"))
    assert named, "no path was found on the page"
    assert sorted(path for path in named if not exists(path)) == []


def test_a_path_that_does_not_exist_is_caught() -> None:
    named = paths_in("In `ops/wiring.py`, `seams/` and `methods/<name>.py`:\n\n```text\nsrc/gone.py  text\n```\n")
    assert named == {"ops/wiring.py", "seams/", "src/gone.py"}
    assert not any(map(exists, named))


def test_the_page_has_exactly_the_contracts_of_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    rules = PAGE.read_text(encoding="utf-8").partition("\n## Rules\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \|$", rules, flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(contract["id"] for contract in contracts)
    assert all(sentence.endswith(".") for _, sentence in rows)


# -------------------------------------------------------------------------------------------------------- the picture
def rooms() -> dict[str, Path]:
    """Every package and module right below `attemper` and `attemper.lab`, as the picture calls it."""
    library = {path.stem: path for path in SOURCE.iterdir() if path.stem not in WRITTEN and path.suffix in ("", ".py")}
    lab = {path.stem: path for path in LAB.iterdir() if path.stem not in WRITTEN and path.suffix in ("", ".py")}
    return library | {"lab_errors" if name in library else name: path for name, path in lab.items()}


def picture() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The arrows between rooms: imports, and dotted ones."""
    found = re.search(r"^```mermaid\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert found, "the page has no picture"
    arrows = re.findall(r"^ +(\w+)(?:\[\w+\])? (-->|-\.->) (\w+)", found[1], flags=re.MULTILINE)
    return (
        {(start, end) for start, kind, end in arrows if kind == "-->"},
        {(start, end) for start, kind, end in arrows if kind == "-.->"},
    )


def imported_by(room: Path) -> set[str]:
    """The dotted names that the files of a room import, inside of functions too."""
    names: set[str] = set()
    for file in room.rglob("*.py") if room.is_dir() else [room]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_room_is_in_the_picture() -> None:
    imports, by_name = picture()
    assert by_name == {("ops", "kernels")}
    assert {name for arrow in imports | by_name for name in arrow} == set(rooms())


def test_every_arrow_of_the_picture_is_an_import() -> None:
    known = rooms()
    for start, end in picture()[0]:
        target = ".".join(known[end].relative_to(SOURCE.parent).with_suffix("").parts)
        assert any(name == target or name.startswith(target + ".") for name in imported_by(known[start])), (
            f"the picture has an arrow from {start} to {end}, and no file of {start} imports {target}"
        )
