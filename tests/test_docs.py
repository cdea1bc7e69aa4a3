"""The documentation holds: its code runs, prints what the pages say, its links lead somewhere, every method has a card.

Code blocks are tagged `python`; all of them are executed, the blocks of one page in order and in one namespace. Where a
page shows what a block prints, the output stands in a `text` block below it, behind the comment `<!-- output -->`.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import attemper

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("examples/*.md")]
)
CARDS = ROOT / "docs" / "methods"
OUTPUT = "<!-- output -->"
SECTIONS = [
    "In one sentence",
    "Use it",
    "What it computes",
    "Settings and what the paper found",
    "Cost",
    "What the paper leaves open and what we chose",
    "Paper",
]
OWN = [method for method in attemper.list_methods() if method.__module__.startswith("attemper.")]


@dataclass
class Block:
    """One fenced block of a page."""

    info: str
    text: str
    line: int
    """Where its first line stands in the page, counted from 1."""
    output: str | None = None
    """What it prints, where the page shows it."""


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order; a block behind the output mark is attached to the one before it."""
    blocks: list[Block] = []
    opened: Block | None = None
    last_prose = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if opened is None and line.startswith("```"):
            opened = Block(line[3:].strip(), "", number + 1)
        elif opened is not None and line.rstrip() == "```":
            if last_prose == OUTPUT:
                assert opened.info == "text", f"line {opened.line}: {OUTPUT} must stand before a text block"
                assert [b.info for b in blocks[-1:]] == ["python"], f"line {opened.line}: no python block above it"
                blocks[-1].output = opened.text
            else:
                blocks.append(opened)
            opened, last_prose = None, ""
        elif opened is not None:
            opened.text += line + "\n"
        elif line.strip():
            assert last_prose != OUTPUT, f"line {number}: {OUTPUT} must stand before a text block"
            last_prose = line.strip()
    assert opened is None, f"line {opened.line - 1}: the block is never closed"
    return blocks


def prose_of(text: str) -> str:
    """A page without its fenced blocks and inline code."""
    text = re.sub(r"^```.*?^```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def run_page(text: str, name: str, namespace: dict[str, object]) -> None:
    """Execute a page's python blocks; raise where one fails or prints something else than the page shows."""
    for block in blocks_of(text):
        if block.info != "python":
            continue
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, name, "exec")  # tracebacks point into the page
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None:
            assert printed.getvalue() == block.output, f"{name}, line {block.line}, prints something else"


@contextlib.contextmanager
def namespace_of(name: str) -> Iterator[dict[str, object]]:
    """The namespace of a module that can be imported, as dataclasses and pickle expect."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        yield module.__dict__
    finally:
        del sys.modules[name]


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "page_" + re.sub(r"\W", "_", page_id(page))
    with torch.random.fork_rng(), namespace_of(name) as namespace:
        torch.manual_seed(0)
        run_page(page.read_text(encoding="utf-8"), page_id(page), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_python_block_is_exempt_from_running(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        word = re.split(r"\W", block.info)[0].lower()
        if word in ("python", "py", "python3", "pycon"):
            assert block.info == "python", f"{page_id(page)}, line {block.line - 1}: write ```python and let it run"


def anchors_of(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked by."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"(?ms)^```.*?^```\s*$", "", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page_id(page)} links to {link}, which does not exist"
        assert target.is_relative_to(ROOT), f"{page_id(page)} links to {link}, outside the repository"
        if fragment:
            assert fragment in anchors_of(target), f"{page_id(page)} links to {link}: no such heading"


@pytest.mark.parametrize("name", [method.name for method in OWN])
def test_every_method_has_a_card_with_the_fixed_sections_in_order(name: str) -> None:
    card = CARDS / f"{name}.md"
    assert card.exists(), f"{name} has no card: write docs/methods/{name}.md"
    text = card.read_text(encoding="utf-8")
    assert re.findall(r"^## +(.+?) *$", text, re.MULTILINE) == SECTIONS
    bodies = [body.strip() for body in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]]
    assert all(bodies), f"{name}: a section of the card is empty"
    assert any(block.info == "python" and f"{name}(" in block.text for block in blocks_of(text)), "show a recipe"


def test_every_card_belongs_to_a_method() -> None:
    cards = {card.stem for card in CARDS.glob("*.md")} - {"README"}
    assert cards == {method.name for method in OWN}


def methods_in_readme(column: int = 1) -> dict[str, str]:
    """Recipe name → one column of the table between the markers, the status unless told otherwise."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- methods -->\n(.*?)<!-- /methods -->", text, re.DOTALL)
    assert found, "README.md has no table between <!-- methods --> and <!-- /methods -->"
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in found[1].strip().splitlines()[2:]]
    return {re.sub(r"\[?`(\w+)`.*", r"\1", row[0]): row[column] for row in rows}


def test_readme_lists_every_method_as_working() -> None:
    table = methods_in_readme()
    for method in OWN:
        assert table.get(method.name) == "working", f"{method.name} is not listed as working in README.md"


def test_readme_says_of_every_method_what_its_class_says() -> None:
    assert methods_in_readme(2) == {m.name: f"{m.paper.title}, {m.paper.venue}" for m in OWN}
    assert methods_in_readme(3) == {m.name: m.summary for m in OWN}


def test_readme_calls_nothing_working_that_is_not() -> None:
    working = {name for name, status in methods_in_readme().items() if status == "working"}
    assert working == {method.name for method in OWN}
    assert set(methods_in_readme().values()) <= {"working", "coming"}


PAGE = f"""
```python
print("one")
```

{OUTPUT}
```text
one
```
"""


def test_a_page_that_shows_the_wrong_output_is_caught() -> None:
    run_page(PAGE, "page", {})
    with pytest.raises(AssertionError, match="prints something else"):
        run_page(PAGE.replace("```text\none", "```text\ntwo"), "page", {})


def test_an_output_mark_without_its_block_is_caught() -> None:
    with pytest.raises(AssertionError, match="must stand before a text block"):
        blocks_of(PAGE.replace("```text", "More prose.\n\n```text"))
    with pytest.raises(AssertionError, match="no python block above"):
        blocks_of(PAGE.replace("```python", "```sh"))
