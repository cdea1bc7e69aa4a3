"""What a crash, a full disk, a bad copy or a curious hand leaves of a file, and what the command line says then."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attemper.lab.cli import main

Damage = Callable[[random.Random, Path], None]


# ------------------------------------------------------------------------------------------------------------ any file
def garbage(r: random.Random, path: Path) -> None:
    path.write_bytes(r.randbytes(r.choice([1, 7, 100, 5000])))


def empty(r: random.Random, path: Path) -> None:
    path.write_bytes(b"")


def truncated(r: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: r.randrange(path.stat().st_size)])


def grown(r: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() + r.choice([b"\0", b"\n}", path.read_bytes(), r.randbytes(40)]))


def flipped(r: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(r.choice([1, 1, 3, 30])):
        data[r.randrange(len(data))] = r.randrange(256)
    path.write_bytes(bytes(data))


def zeroed(r: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    begin = r.randrange(len(data))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
    path.write_bytes(bytes(data))


def a_folder(r: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_loop(r: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def a_link_to_nothing(r: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere-to-be-found")


def a_pipe(r: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_file(r: random.Random, path: Path) -> None:
    found = [each for each in path.parent.iterdir() if each.is_file() and each != path]
    if found:
        shutil.copy(r.choice(found), path)


ANY: list[Damage] = [
    garbage, empty, truncated, truncated, grown, flipped, flipped, zeroed, a_folder, a_loop, a_link_to_nothing,
    another_file,
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- JSON
WRONG: list[Any] = [
    None, True, 0, -1, 10**30, 1e300, -1.5, "", "x", "../../x", "a\0b", "9" * 5000, [], [[]], {}, {"a": 1}, [1, "a"],
]  # fmt: skip


def nested(r: random.Random, path: Path) -> None:
    sign = r.choice(["[", '{"a":'])
    path.write_text(sign * r.choice([500, 100_000]))


def strange_numbers(r: random.Random, path: Path) -> None:
    number = r.choice(["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "0x1", "01", "1." + "0" * 5000])
    path.write_text(r.choice([number, f"[{number}]", f'{{"costs": {number}, "pid": {number}, "plan": {number}}}']))


def another_kind(r: random.Random, path: Path) -> None:
    """One value, at any depth, becomes one of another kind, or goes."""
    whole = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, inner in items:
            places.append((value, key))
            if isinstance(inner, dict | list):
                collect(inner)

    if isinstance(whole, dict | list):
        collect(whole)
    if not places:
        return
    holder, key = r.choice(places)
    if r.random() < 0.2:
        del holder[key]
    else:
        holder[key] = r.choice(WRONG)
    path.write_text(json.dumps(whole))


JSON: list[Damage] = [*ANY, a_pipe, nested, strange_numbers, another_kind, another_kind, another_kind, another_kind]


# --------------------------------------------------------------------------------------------------- the command line
def told(words: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def check(words: list[str], *names: str) -> None:
    """Run a command on something damaged: it works all the same, or one line names one of these."""
    code, out, err = told(words)
    assert code in (0, 2), (words, code, err)
    assert "Traceback" not in out + err, err
    if code == 2:
        assert err.startswith("attemper: "), err
        assert err.count("\n") == 1, err
        assert any(name in err for name in names), (names, err)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
