"""Help: every command has one, it is complete, and nobody waits for torch to read it."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attemper.lab.cli.commands import COMMANDS

LAB = Path(__file__).parents[1] / "src" / "attemper" / "lab"
HEAVY = {"torch", "timm", "transformers", "torchvision", "triton", "scipy", "sklearn", "accelerate", "numpy"}

CODE = """
import contextlib, io, json, sys
from attemper.lab.cli import main

told = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code or 0
    told.append([code, out.getvalue(), err.getvalue()])
json.dump({"told": told, "modules": sorted(sys.modules)}, sys.stdout)
"""


def paths(commands: Any = COMMANDS, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and every group of commands, the program itself first."""
    yield before
    for name, each in commands.items():
        yield from [(*before, name)] if isinstance(each, str) else paths(each[1], (*before, name))


GROUPS = {(), *((name,) for name, each in COMMANDS.items() if not isinstance(each, str))}
PATHS = list(paths())
OTHERS = [["--version"], ["comapre"], ["study", "stauts"], ["compare", "--recipies", "cb"]]


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What one process says to all of them in turn, and what it has loaded by then."""
    lines = json.dumps([[*path, "--help"] for path in PATHS] + OTHERS)
    done = subprocess.run(
        [sys.executable, "-c", CODE, lines],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def helps(text: str) -> Iterator[tuple[str, str]]:
    """Every option in the boxes of a help, and what is said about it beside its default."""
    rows = [line[2:].rstrip("│ ") for line in text.splitlines()]
    for row in re.split(r"\n(?=\S)", "\n".join(rows)):
        first, *more = row.split("\n")
        option, _, beside = first.partition("  ")
        said = " ".join(part.strip() for part in (beside, *more))
        if re.match(r"--?[a-z]|\[?[A-Z]+\]?$", option):
            yield option, re.sub(r"\((default: .*|required)\)", "", said).strip()


def test_help_errors_and_the_version_load_nothing_heavy(answers: dict[str, Any]) -> None:
    assert not {name.partition(".")[0] for name in answers["modules"]} & HEAVY


@pytest.mark.parametrize("path", PATHS, ids=lambda path: " ".join(path) or "attemper")
def test_every_command_explains_itself_and_every_option(path: tuple[str, ...], answers: dict[str, Any]) -> None:
    code, text, err = answers["told"][PATHS.index(path)]
    assert (code, err) == (0, "")
    assert "usage: " + " ".join(("attemper", *path)) in text
    assert ">>>" not in text, "a doctest is for those who read the source"
    if path in GROUPS:
        return
    assert "{None}" not in text or path[0] in ("bench", "train"), "an option without a name for its value"
    if path[0] != "bench":
        assert "Examples\n  attemper " + " ".join(path) in text
    options = dict(helps(text))
    assert len(options) > 1, "the boxes were not read"
    assert [option for option, said in options.items() if not said] == []


def test_no_sentence_about_an_option_is_broken_in_two() -> None:
    """In the docstring of a field, tyro takes every further line for a paragraph of its own."""
    for source in (
        *LAB.glob("cli/*.py"),
        LAB / "bench/options.py",
        LAB / "bench/commands.py",
        LAB / "training/spec.py",
    ):
        for kind in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(kind, ast.ClassDef):
                for field, text in itertools.pairwise(kind.body):
                    if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                        assert "\n" not in ast.literal_eval(text.value), f"{source.name}: {ast.unparse(field.target)}"


def test_typing_errors_get_a_suggestion(answers: dict[str, Any]) -> None:
    version, *errors = answers["told"][len(PATHS) :]
    assert version[0] == 0
    assert [code for code, _, _ in errors] == [2, 2, 2]
    for (_, _, said), right in zip(errors, ("'compare'", "'status'", "--recipes"), strict=True):
        assert right in said
